"""What makes a graph the same one: to a stored plan, and to questions that were answered before.

Enters: a graph. Leaves: its operations as records, or all that its plan depends on as a text.
"""

from __future__ import annotations

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.plan_file import NodeRecord
from autoremat.elsewhere.present import triton_version
from autoremat.graph.joint_graph import JointGraph
from autoremat.problem.subject import Subject


def fingerprint(joint: JointGraph) -> tuple[NodeRecord, ...]:
    """What must be the same of a graph for a plan to be a plan of it."""
    return tuple(_record(node) for node in joint.nodes)


def operations(joint: JointGraph) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """A graph but for its sizes: the name of each node, its operator and what it reads."""
    return tuple((node.name, node.target, node.inputs) for node in fingerprint(joint))


def in_words(subject: Subject) -> str:
    """All that a plan of a graph, and its peak, depend on beside what is asked of it."""
    there = subject.elsewhere and (subject.elsewhere, triton_version())
    return repr((fingerprint(subject.joint), subject.lowered.problem, there))


def _record(node: fx.Node) -> NodeRecord:
    target = {"placeholder": "input", "output": "output"}.get(node.op)
    if target is None:
        target = getattr(node.target, "__name__", "") or str(node.target)
        target = str(node.target) if isinstance(node.target, _torch.OpOverload) else target
    return NodeRecord(
        name=node.name,
        target=target,
        inputs=tuple(source.name for source in node.all_input_nodes),
        results=tuple(map(_shape, _torch.tensor_leaves(_torch.fake_value(node)))),
    )


def _shape(tensor: torch.Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} ({sizes})"
