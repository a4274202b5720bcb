"""What a session keeps of a graph that it planned, so that the step can be run again op by op.

Enters: a joint graph before and after it was prepared, and the two modules of its plan. Leaves: a
`PlannedGraph`, found again by its `fingerprint`. Compilers change the modules that they are given,
hence the copies; nothing here holds a parameter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph, copy_module

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class PlannedGraph:
    """A graph and its plan, written out.

    Attributes:
        joint: the graph that was planned.
        forward: the plan's forward module.
        backward: the plan's backward module.
    """

    joint: JointGraph
    forward: fx.GraphModule
    backward: fx.GraphModule

    def copied(self) -> PlannedGraph:
        """The same with modules of its own, as they are now."""
        return PlannedGraph(self.joint, copy_module(self.forward), copy_module(self.backward))


def fingerprint(module: fx.GraphModule) -> str:
    """The same text for a joint graph whenever it is captured again."""
    text = "\n".join(
        f"{node.name} = {node.target}({node.args}, {node.kwargs}): {_torch.fake_value(node)}"
        for node in module.graph.nodes
    )
    return _ADDRESS.sub("", text)  # of what stands for an object, as a device mesh, which is new
