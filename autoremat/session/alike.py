"""Plans by which graphs communicate again, compared with those of other ranks.

Enters: the parts that graphs are going to run by. Leaves: nothing, or the error of a rank whose
plan communicates otherwise than that of another. Guarantees: nobody waits for another rank; of two
that take different plans at the same point of their training, the later one raises before it runs,
instead of waiting in a collective for what the other will never send.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import distributed

from autoremat.errors import SteeringError
from autoremat.graph.collectives import communication
from autoremat.planning.identity import operations
from autoremat.planning.part import Part
from autoremat.ranks.figures import settled
from autoremat.ranks.store import shared_store

_taken: Counter[str] = Counter()  # how often plans of a graph were taken in this process


@dataclass(frozen=True)
class Communication:
    """What a rank's plan of a graph communicates.

    Attributes:
        rank: whose plan it is.
        order: names of the collectives as they run.
    """

    rank: int
    order: list[str]


def require_alike(plans: Mapping[str, Sequence[Part]]) -> None:
    """Compare what plans communicate again with what other ranks take at this point.

    Args:
        plans: of each graph, by its name.

    Raises:
        SteeringError: naming the other rank and the first difference.
    """
    if shared_store() is None:
        return
    for name, parts in plans.items():
        for part in parts:
            if part.subject.constraints.allowed:
                _require(name, part)


def _require(name: str, part: Part) -> None:
    joint, own = part.subject.joint, distributed.get_rank()
    graph = hashlib.sha256(repr(operations(joint)).encode()).hexdigest()
    _taken[graph] += 1
    orders = communication(joint, part.planned.whole.choice.solution.plan.schedule)
    by_key = {
        f"{ranks} {graph} {_taken[graph]}": Communication(own, order)
        for ranks, order in orders.items()
    }
    for key, found in settled(by_key, Communication).items():
        if found.order != by_key[key].order:
            pairs = zip_longest(found.order, by_key[key].order, fillvalue="nothing more")
            theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
            raise SteeringError(
                f"The plan of graph {name} communicates {ours} on rank {own} where that of rank "
                f"{found.rank} communicates {theirs}: they would wait for each other. With "
                "repeatable= their plans have to be equal, so all that they depend on has to be: "
                "sizes of batches, and bytes of parameters and of optimizer state. Make those "
                "equal, or drop repeatable=."
            )
