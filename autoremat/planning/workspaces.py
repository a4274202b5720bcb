"""What operations take for themselves, at other sizes than those that they were measured at.

Enters: a graph, stated at the upper corner of its ranges. Leaves: the same, which knows of each
operation how much of its workspace does not shrink with the sizes. Guarantees: an operation with a
workspace that takes more at the smallest sizes is counted with that at all sizes.

A convolution lays its weights out anew whatever the batch is, and images in proportion to it. So a
workspace is taken to be a fixed part, and one that grows as the varying values do that the
operation reads and makes. Both are known where it was measured at two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoremat_solver import Op
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import OpCost
from autoremat.planning.sizes import Symbols, lowest_of, sizes_of, subject_at, varying_by
from autoremat.problem.subject import Subject

Price = Callable[[Sequence[fx.Node]], Mapping[fx.Node, OpCost]]


def with_fixed_workspaces(subject: Subject, said: Symbols, price: Price) -> Subject:
    """The graph, with the part of each workspace that does not shrink with its sizes.

    Args:
        subject: the graph, stated at its largest sizes.
        said: by symbol, the smallest size that was said of it.
        price: measures operations at sizes that are set while it is called.
    """
    lowered, least = subject.lowered, _least(subject, said)
    ops = (*lowered.graph.forward, *lowered.graph.backward)
    varying = {op.name: varying_by(lowered, op.name) for op in ops if op.workspace_nbytes}
    nodes = [lowered.node_of[name] for name, storages in varying.items() if storages]
    if not nodes or least == sizes_of(subject):
        return subject
    with _torch.sizes_as({**subject.sizes, **least}):
        small = {node.name: cost for node, cost in price(nodes).items() if cost.measured}
    smaller = subject_at(subject, least).lowered.storages.nbytes
    fixed: dict[str, int] = {}

    def counted(op: Op) -> Op:
        """With what it takes at most; what of that is fixed is noted."""
        if op.name not in small or op.name not in varying:
            return op
        once_nbytes = sum(lowered.storages.nbytes[n] for n in varying[op.name])
        share = sum(smaller[n] for n in varying[op.name]) / max(1, once_nbytes)
        known_nbytes = subject.costs[lowered.node_of[op.name]].workspace_nbytes
        copied_nbytes = max(0, op.workspace_nbytes - known_nbytes)  # of what a compiler lays out
        least_nbytes = small[op.name].workspace_nbytes + round(share * copied_nbytes)
        most_nbytes = max(op.workspace_nbytes, least_nbytes)
        if share < 1:
            within_nbytes = (least_nbytes - share * most_nbytes) / (1 - share)
            fixed[op.name] = min(most_nbytes, max(0, round(within_nbytes)))
        return replace(op, workspace_nbytes=most_nbytes)

    graph = lowered.graph
    graph = replace(
        graph,
        forward=tuple(map(counted, graph.forward)),
        backward=tuple(map(counted, graph.backward)),
    )
    return replace(subject, lowered=replace(lowered, graph=graph, fixed_nbytes=fixed))


def _least(subject: Subject, said: Symbols) -> dict[Any, int]:
    """By symbol, the smallest size; half of the largest of what was only seen.

    Never 1, nor below what the graph's code asks for: torch has other code there, and libraries
    have other kernels for batches of one.
    """
    found = {}
    for symbol, high in sizes_of(subject).items():
        low = said[symbol] if said.get(symbol, high) < high else high // 2
        found[symbol] = max(2, lowest_of(subject, symbol), low)
    return found
