"""Communication in a graph: what may run again, and what lives longer than the graph says.

Enters: a `JointGraph`. Leaves: facts about its functional collectives. Guarantees: what every
process has to take part in runs again only where it gathers what parameters alone decide.
"""

from __future__ import annotations

from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.storages import Storages


def gathers_parameters(node: fx.Node, joint: JointGraph) -> bool:
    """Whether a node gathers shards of parameters, or waits for that.

    The processes have equal plans, so that all of them gather again, or none does.
    """
    if _torch.is_wait(node.target):
        return all(gathers_parameters(source, joint) for source in node.all_input_nodes)
    if _torch.is_getitem(node):
        return gathers_parameters(node.all_input_nodes[0], joint)
    return _torch.is_gather(node.target) and all(
        _is_of_parameters(source, joint) for source in node.all_input_nodes
    )


def _is_of_parameters(node: fx.Node, joint: JointGraph) -> bool:
    """Whether nothing but static inputs decides a value: no communication on the way."""
    if node.op != "call_function":
        return node in joint.static_inputs and node not in joint.overwritten
    if _torch.is_collective(node.target):
        return gathers_parameters(node, joint)
    return all(_is_of_parameters(source, joint) for source in node.all_input_nodes)


def late_nbytes(joint: JointGraph, storages: Storages) -> int:
    """What a process group may still hold when the graph has freed it: one buffer, the largest.

    Its own threads or streams let go of it, some time after it was waited for.
    """
    found = (node for node in joint.nodes if _torch.is_collective(node.target))
    sizes = (storages.total_nbytes([node]) for node in found if not _torch.is_wait(node.target))
    return max(sizes, default=0)
