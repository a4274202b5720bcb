"""What a repair step may change: where a value lies idle above the budget, and how to let it go.

Enters: a `Layout` and a budget. Leaves: `Gap`s, the cheapest relief first, and for each the
`Change`s that let its value go: make it again at the end of the gap, with what that takes, or, in a
graph without phases, make it later or read it earlier. `rearrange` chooses among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.search.arrangement import Layout, Rules

MOST_RERUNS = 120  # that one change may add
ALIKE = 1.5  # times the best change's price may that of one made together with it be
MANY = (-1, -1, -1)  # the key of several changes made together


@dataclass(frozen=True)
class Change:
    """A way to hold fewer bytes.

    Attributes:
        price: time per byte relieved.
        key: what tells it from others.
        steps: those between which something is let go (after, until).
        reruns: by operation, what runs again right before it.
        order: the order of first runs, if it changes.
        cost_us: time that it adds.
        dropped: later reruns that are not needed any more, as (operation, before).
    """

    price: float
    key: tuple[int, int, int]
    steps: tuple[int, int]
    reruns: Mapping[int, frozenset[int]]
    order: tuple[int, ...] | None = None
    cost_us: float = 0.0
    dropped: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Gap:
    """Steps (after, until) in which an instance lies idle while the budget is exceeded."""

    value: int
    instance: int
    after: int
    until: int
    relief: int


def gaps_above(
    indexed: Indexed,
    layout: Layout,
    budget_nbytes: int,
    most: int,
    weigh: Callable[[int], NDArray[np.float64]] | None,
) -> list[Gap]:
    """Where idle values could be let go, the cheapest relief first.

    Args:
        indexed: the step.
        layout: what exceeds the budget.
        budget_nbytes: the peak allowed.
        most: how many gaps, at most.
        weigh: factors of so many prices; None for 1.
    """
    spans = layout.spans
    excess = np.maximum(layout.live - budget_nbytes, 0)
    over, count = np.zeros((2, len(excess) + 1), dtype=np.int64)
    excess.cumsum(out=over[1:])
    (excess > 0).cumsum(out=count[1:])
    is_read = np.ones(len(spans.step), dtype=np.bool_)
    is_read[spans.made] = False
    (reads,) = is_read.nonzero()
    after, until = spans.step[reads - 1], spans.step[reads]
    steps = count[until] - count[np.minimum(after + 1, until)]
    instance = spans.made.searchsorted(reads) - 1
    nbytes = indexed.derived(_movable_nbytes)[spans.value[instance]]
    (kept,) = ((steps > 0) & (nbytes > 0)).nonzero()
    after, until, instance = after[kept], until[kept], instance[kept]
    relief = np.minimum(over[until] - over[after + 1], nbytes[kept] * steps[kept])
    price = indexed.derived(_again_us)[spans.value[instance]] / relief
    if weigh is not None:
        price *= weigh(len(kept))
    columns = (spans.value[instance], instance, after, until, relief)
    best = np.lexsort((instance, price))[:most]
    rows = np.stack(columns, axis=1)[best].tolist()
    return [Gap(*row) for row in rows]


class Closures:
    """What making a value again at a step takes, given what is live there."""

    def __init__(self, rules: Rules, layout: Layout, budget_nbytes: int) -> None:
        """Note where there is room."""
        self._indexed, self._layout, self._budget = rules.indexed, layout, budget_nbytes
        self._earliest = rules.earliest_places(layout.arrangement.order)
        self._room: NDArray[np.int64] = budget_nbytes - layout.live

    def ways(self, gap: Gap, *, sharing: bool = False) -> Iterator[Change]:
        """Let a value go in a gap, holding its inputs or making these again too.

        Args:
            gap: where it lies idle.
            sharing: leave later reruns out whose results may be held from the gap's end instead.
        """
        layout, indexed = self._layout, self._indexed
        place = layout.places[gap.until]
        if self._earliest[indexed.producer[gap.value]] > place:
            return
        burdens: dict[int, int] = {}  # the second closure meets most of the first one's values
        seen: set[tuple[frozenset[int], int]] = set()
        for hold in (False, True):
            found = self._closure(gap, place, hold, burdens)
            if found is None or found in seen:
                continue
            seen.add(found)
            ops, burden = found
            if gap.relief <= burden:
                continue
            dropped = self._superfluous(gap, ops) if sharing else frozenset()
            cost = math.fsum(indexed.time_us[op] for op in ops)
            cost -= math.fsum(indexed.time_us[op] for op, _ in dropped)
            price = (max(0.0, cost) + 1e-9) / (gap.relief - burden)
            key = (gap.value, layout.arrangement.order[place], int(hold))
            before = layout.arrangement.order[place]
            steps = (gap.after, gap.until)
            yield Change(price, key, steps, {before: ops}, cost_us=cost, dropped=dropped)

    def _closure(
        self, gap: Gap, place: int, hold: bool, burdens: dict[int, int]
    ) -> tuple[frozenset[int], int] | None:
        """Operations to run again, and excess bytes from holding their other inputs longer."""
        indexed, layout = self._indexed, self._layout
        ops: set[int] = set()
        burden = 0
        stack = [indexed.producer[gap.value]]
        while stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            if len(ops) > MOST_RERUNS:
                return None
            for u in indexed.inputs[op]:
                earlier = None if indexed.barred[u] else layout.before(u, gap.until)
                may = self._earliest[indexed.producer[u]] <= place
                if earlier is None:
                    if not may:
                        return None
                    stack.append(indexed.producer[u])
                    continue
                last = layout.last[earlier]
                if indexed.pinned[u] or last >= gap.until:
                    continue
                more = burdens.get(u)
                if more is None:
                    more = burdens[u] = self._burden(u, last, gap)
                if more == 0 or hold or not may:
                    burden += more
                else:
                    stack.append(indexed.producer[u])
        return frozenset(ops), burden

    def _superfluous(self, gap: Gap, ops: frozenset[int]) -> frozenset[tuple[int, int]]:
        """Later reruns of the operations whose results may be held from the gap's end instead."""
        indexed, layout = self._indexed, self._layout
        order, dropped = layout.arrangement.order, set[tuple[int, int]]()
        for op in sorted(ops, key=indexed.rank.__getitem__, reverse=True):
            later = layout.next_run(op, gap.until)
            if later is None or any(indexed.pinned[v] for v in indexed.outputs[op]):
                continue
            room = self._room[gap.until : later].min(initial=self._budget)
            for v in indexed.outputs[op]:
                instance = layout.before(v, later + 1)
                reads = () if instance is None else layout.reads(instance)
                if any((layout.steps[s], order[layout.places[s]]) not in dropped for s in reads):
                    room -= indexed.nbytes[v]
            if room >= 0:
                dropped.add((op, order[layout.places[later]]))
        return frozenset(dropped)

    def _burden(self, value: int, last: int, gap: Gap) -> int:
        """Bytes beyond the budget, over all steps, if a value is held from `last` to the gap's end.

        Inside the gap, what is let go makes room.
        """
        nbytes = self._indexed.nbytes[value]
        room = self._room[last + 1 : gap.until]
        if room.size == 0 or np.minimum.reduce(room) >= nbytes:  # in half the time of `room.min()`
            return 0
        begin = max(gap.after, last) - last
        lack = nbytes - room
        lack[begin:] -= self._indexed.nbytes[gap.value]
        np.maximum(lack, 0, out=lack)
        np.minimum(lack, nbytes, out=lack)
        return int(np.add.reduce(lack))


def all_gaps(indexed: Indexed, layout: Layout) -> Iterator[Gap]:
    """Wherever an instance lies idle in the backward."""
    start = next((s for s, op in enumerate(layout.steps) if indexed.is_backward[op]), None)
    for instance, value in enumerate(layout.value if start is not None else ()):
        nbytes = 0 if indexed.pinned[value] else indexed.nbytes[value]
        events = (layout.born[instance], *layout.reads(instance)) if nbytes else ()
        for after, until in itertools.pairwise(events):
            if until > after + 1 and until > (start or 0):
                yield Gap(value, instance, after, until, nbytes * (until - after - 1))


def together(changes: list[Change]) -> Iterator[Change]:
    """Many changes as one, then half as many: those that meet no better one at any step.

    Equal blocks of a step exceed the budget in equal ways: this repairs all of them at once.
    """
    chosen: list[Change] = []
    for change in changes:
        if change.order is not None or change.price > ALIKE * changes[0].price:
            continue
        after, until = change.steps
        if all(until <= other.steps[0] or other.steps[1] <= after for other in chosen):
            chosen.append(change)
    while len(chosen) > 1:
        reruns: dict[int, frozenset[int]] = {}
        for change in chosen:
            for before, ops in change.reruns.items():
                reruns[before] = reruns.get(before, frozenset()) | ops
        yield Change(chosen[0].price, MANY, chosen[0].steps, reruns)
        chosen = chosen[: len(chosen) // 2]


def moves(indexed: Indexed, layout: Layout, gap: Gap) -> Iterator[Change]:
    """Make a value only where it is first read, or read it for the last time before the gap."""
    order = layout.arrangement.order
    step, reads = layout.born[gap.instance], layout.reads(gap.instance)
    maker, reader = layout.steps[step], layout.steps[gap.until]
    here, there = layout.places[step], layout.places[gap.until]
    if gap.until == reads[0] and order[here] == maker and here < there - 1:
        moved = (*order[:here], *order[here + 1 : there], maker, *order[there:])
        steps = (gap.after, gap.until)
        yield Change(-gap.relief, (gap.value, maker, 2), steps, {}, moved)
    if gap.until == reads[-1] and order[there] == reader:
        made = max((order.place[indexed.producer[v]] for v in indexed.inputs[reader]), default=-1)
        target = 1 + max(made, layout.places[gap.after])
        if target < there:
            moved = (*order[:target], reader, *order[target:there], *order[there + 1 :])
            steps = (gap.after, gap.until)
            yield Change(-gap.relief, (gap.value, reader, 3), steps, {}, moved)


def _movable_nbytes(indexed: Indexed) -> NDArray[np.int64]:
    """Per value its bytes, 0 for outputs of the problem: they stay."""
    return np.where(indexed.pinned, 0, indexed.nbytes)


def _again_us(indexed: Indexed) -> NDArray[np.float64]:
    """Per value the time of the operation that makes it."""
    return np.array(indexed.time_us)[indexed.producer]
