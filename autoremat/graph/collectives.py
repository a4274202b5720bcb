"""Communication in a graph: what may run again, and what lives longer than the graph says.

Enters: a `JointGraph`. Leaves: facts about its functional collectives. Guarantees: what every
process has to take part in runs again only where the user says that it may.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.storages import Storages


def may_communicate_again(node: fx.Node, allowed: Set[fx.Node]) -> bool:
    """Whether a node is allowed to run again, or waits for one that is."""
    if _torch.is_wait(node.target) or _torch.is_getitem(node):
        return may_communicate_again(node.all_input_nodes[0], allowed)
    return node in allowed


def communication(joint: JointGraph, schedule: Iterable[str]) -> dict[tuple[int, ...], list[str]]:
    """By ranks that communicate with each other, their operations in the order of a schedule.

    Args:
        joint: the graph.
        schedule: names of its operations as they run; a repeat is a recompute.
    """
    found = (node for node in joint.nodes if _torch.is_collective(node.target))
    ranks = {n.name: _torch.communicating_ranks(n) for n in found if not _torch.is_wait(n.target)}
    order: dict[tuple[int, ...], list[str]] = {}
    for name in schedule:
        if name in ranks:
            order.setdefault(ranks[name], []).append(name)
    return order


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
