"""Communication in a graph: what may run again, and what lives longer than the graph says.

Enters: a `JointGraph`. Leaves: facts about its functional collectives. Guarantees: what every
process has to take part in runs again only where it gathers what parameters alone decide, or where
the user says that it may.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.storages import Storages


def may_communicate_again(node: fx.Node, joint: JointGraph, allowed: Set[fx.Node]) -> bool:
    """Whether a node gathers shards of parameters, or is allowed to run again, or waits for such.

    The processes have equal plans, so that all of them communicate again, or none does.
    """
    if node in allowed:
        return True
    if _torch.is_wait(node.target) or _torch.is_getitem(node):
        return may_communicate_again(node.all_input_nodes[0], joint, allowed)
    return _torch.is_gather(node.target) and all(
        _is_of_parameters(source, joint) for source in node.all_input_nodes
    )


def _is_of_parameters(node: fx.Node, joint: JointGraph) -> bool:
    """Whether nothing but static inputs decides a value: no communication on the way."""
    if node.op != "call_function":
        return node in joint.static_inputs and node not in joint.overwritten
    if _torch.is_collective(node.target):
        return may_communicate_again(node, joint, frozenset())
    return all(_is_of_parameters(source, joint) for source in node.all_input_nodes)


def run_once_collectives(joint: JointGraph, run_once: Collection[fx.Node]) -> list[str]:
    """Names of the operators of the forward that would communicate again if they were allowed."""
    targets = {node.target for node in joint.nodes if node in run_once}
    found = (t for t in targets if _torch.is_collective(t) and not _torch.is_wait(t))
    return sorted({str(target).rpartition(".")[0] for target in found})


def late_nbytes(joint: JointGraph, storages: Storages) -> int:
    """What a process group may still hold when the graph has freed it: one buffer, the largest.

    Its own threads or streams let go of it, some time after it was waited for.
    """
    found = (node for node in joint.nodes if _torch.is_collective(node.target))
    sizes = (storages.total_nbytes([node]) for node in found if not _torch.is_wait(node.target))
    return max(sizes, default=0)
