"""The simple strategies that every plan must beat: save all, recompute all, every n, sqrt n.

Enters: a problem. Leaves: named save sets. None looks at the budget; the caller simulates the
plans and keeps the best that fits. Chen et al. [Chen2016] is the sqrt(n) strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.realise import KEEP, Retention
from autoremat_solver.problem import Phase

Recipe = tuple[str, frozenset[int], Retention]


def simple_recipes(indexed: Indexed) -> Iterator[Recipe]:
    """Name, save set and retention of every simple strategy, the most saving one first."""
    everything = save_all(indexed)
    yield "save all", everything, KEEP
    either = {v for v in everything if indexed.phase[indexed.producer[v]] is Phase.EITHER}
    if either:
        yield "save all, late masks", everything - either, KEEP
    yield "recompute all", frozenset(), KEEP
    if len(indexed.forward_order) < 3:
        return
    cuts = live_across(indexed)
    for name, count in _segment_counts(len(indexed.forward_order)):
        saved, per_segment = in_segments(indexed, cuts, count)
        yield name, saved, KEEP
        yield f"{name}, per segment", saved, per_segment


def in_segments(
    indexed: Indexed, cuts: list[list[int]], count: int
) -> tuple[frozenset[int], Retention]:
    """Save what crosses the cuts between so many segments of even time; rerun one at a time."""
    places = _narrowest_near_even(indexed, cuts, count)
    saved = frozenset(v for place in places for v in cuts[place])
    return saved, Retention(segment_end=segment_ends(indexed, places))


def save_all(indexed: Indexed) -> frozenset[int]:
    """Every value that the backward reads directly."""
    return frozenset(v for v, last in enumerate(indexed.last_demand) if last >= 0)


def root_of(length: int) -> int:
    """Segments of the sqrt(n) strategy."""
    return max(2, math.isqrt(length))


def _segment_counts(length: int) -> Iterator[tuple[str, int]]:
    root = root_of(length)
    yield "sqrt n", root
    counts = sorted({count for count in (2, 4, 8, 16, 32, 64) if count < length} - {root})
    for count in counts:
        yield f"{count} segments", count


def live_across(indexed: Indexed) -> list[list[int]]:
    """Per place in `forward_order`, the values made before it that a FORWARD one from it on reads.

    Place p lies before the operation p. EITHER operations do not keep values alive here: without
    recompute they may run in the backward.
    """
    order = indexed.forward_order
    last = [-1] * len(indexed.nbytes)
    for place, op in enumerate(order):
        if indexed.phase[op] is Phase.FORWARD:
            for v in indexed.inputs[op]:
                last[v] = place
    across: list[list[int]] = []
    live: list[int] = []
    for place, op in enumerate(order):
        live = [v for v in live if last[v] >= place]
        across.append(live)
        live = live + [v for v in indexed.outputs[op] if last[v] > place]
    return across


def _narrowest_near_even(indexed: Indexed, cuts: list[list[int]], count: int) -> list[int]:
    """Places that split the forward time evenly, each moved to the narrowest cut nearby."""
    order = indexed.forward_order
    total = math.fsum(indexed.time_us[op] for op in order) or 1.0
    width = [sum(indexed.nbytes[v] for v in cut) for cut in cuts]
    places: list[int] = []
    reach = max(1, len(order) // (2 * count))
    passed, goal = 0.0, 1
    for place, op in enumerate(order):
        if passed >= total * goal / count and place > 0 and goal < count:
            near = range(max(1, place - reach), min(len(order), place + reach))
            places.append(min(near, key=lambda p: (width[p], abs(p - place))))
            goal += 1
        passed += indexed.time_us[op]
    return sorted(set(places))


def segment_ends(indexed: Indexed, places: list[int]) -> list[int]:
    """Per backward position, the last position of the forward segment it works on.

    Args:
        indexed: the step.
        places: where the forward is cut, ascending places in `forward_order`.
    """
    count = len(indexed.backward_ops)
    starts = sorted({*backward_boundaries(indexed, places), count})
    ends: list[int] = []
    for start in starts:
        ends += [start - 1] * (start - len(ends))
    return ends


def backward_boundaries(indexed: Indexed, places: list[int]) -> list[int]:
    """Per cut of the forward, the backward position at which the part before the cut begins.

    The position that puts the fewest reading operations on the wrong side; so a few late or
    early readers do not move it. Falls as the place rises.
    """
    latest = np.array(
        [
            max((indexed.rank[indexed.producer[v]] for v in values), default=-1)
            for values in indexed.demands
        ],
        dtype=np.int64,
    )
    result = []
    for place in places:
        change = np.where(latest >= 0, np.where(latest >= place, -1, 1), 0)
        wrong = np.cumsum(change)
        best = int(wrong.argmin()) if len(wrong) else 0
        result.append(best + 1 if len(wrong) and wrong[best] < 0 else 0)
    return result
