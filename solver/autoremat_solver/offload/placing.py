"""A schedule of operations and the gaps in which values are away -> the copies, just in time.

Enters: operations in their order, and per gap how early its value must be gone and how late it may
be back. Leaves: a `Placed` for each: in which slots its copies begin and are waited for.
Guarantees: a value is sent as soon as it may be, is waited for where its copy has arrived, and
comes back as late as its reader allows, on engines that take one copy after the other; only where a
gap demands more does computing wait. Slot i is before the i-th operation.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from autoremat_solver.model.copies import COPY_KINDS, computing_us
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plan import StepKind
from autoremat_solver.simulate import stalls_of

ROUNDING_US = 1e-9  # times that differ by less are the same


@dataclass(frozen=True, slots=True)
class Gap:
    """An instance between two accesses: what it takes may be had elsewhere meanwhile.

    Attributes:
        value: its number.
        after: the operation, by its place in the schedule, that makes or reads it last before.
        before: the one that reads it next.
    """

    value: int
    after: int
    before: int


@dataclass(frozen=True, slots=True)
class Away:
    """A gap in which the value is away.

    Attributes:
        gap: which one.
        gone_by: the slot in which its copy is waited for at the latest.
        back_from: the slot in which it may come back at the earliest.
    """

    gap: Gap
    gone_by: int
    back_from: int

    def during(self, place: int) -> Away:
        """The same, and it is away while this operation runs."""
        return replace(
            self, gone_by=min(self.gone_by, place), back_from=max(self.back_from, place + 1)
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """One value's copies.

    Attributes:
        away: what they are for.
        release: the slot in which the copy to the host is waited for.
        reload: the slot in which the copy back begins.
        sent_us: when the first has arrived, if nothing makes it late.
        starts_us: when the second has to begin to be in time.
    """

    away: Away
    release: int
    reload: int
    sent_us: float
    starts_us: float


def gaps_of(indexed: Indexed, runs: list[int], movable: Collection[int]) -> list[Gap]:
    """All gaps of these values in which at least one operation runs; outputs have none."""
    last: dict[int, int] = {}
    found = []
    for place, op in enumerate(runs):
        for value in indexed.inputs[op]:
            may_leave = value in movable and indexed.nbytes[value] and not indexed.pinned[value]
            if may_leave and last[value] < place - 1:
                found.append(Gap(value, last[value], place))
            last[value] = place
        last.update(dict.fromkeys(indexed.outputs[op], place))
    return found


def free_of(gap: Gap) -> Away:
    """The gap with copies wherever they cost no time."""
    return Away(gap, gap.before, gap.after + 1)


def place(
    indexed: Indexed, runs: list[int], away: Iterable[Away], starts_us: list[float]
) -> list[Placed]:
    """Copies for all gaps in which a value is away.

    Args:
        indexed: the problem without copies; it has a link.
        runs: the schedule.
        away: at most one of each gap.
        starts_us: when each operation begins, and after the last when it ends.
    """
    link, nbytes = indexed.problem.link, indexed.nbytes
    assert link is not None
    by_after = sorted(away, key=lambda a: (a.gap.after, a.gone_by, a.gap.before, a.gap.value))
    sent: list[float] = []
    free_us = 0.0
    for one in by_after:
        made_us = starts_us[one.gap.after] + indexed.time_us[runs[one.gap.after]]
        free_us = max(free_us, made_us) + link.out_us(nbytes[one.gap.value])
        sent.append(free_us)
    placed = []
    next_us = float("inf")
    for number in sorted(range(len(sent)), key=lambda n: (-by_after[n].gap.before, n)):
        one, gap = by_after[number], by_after[number].gap
        arrived = bisect_left(starts_us, sent[number] - ROUNDING_US, gap.after + 1, gap.before)
        release = min(arrived, one.gone_by)
        next_us = min(next_us, starts_us[gap.before]) - link.in_us(nbytes[gap.value])
        begins = bisect_right(starts_us, next_us + ROUNDING_US, 0, gap.before + 1) - 1
        reload = max(begins, one.back_from, release)
        placed.append(Placed(one, release, reload, sent[number], next_us))
    return placed


def steps_with(indexed: Indexed, runs: list[int], placed: list[Placed]) -> list[int]:
    """The whole schedule, as operation numbers of the problem with copies (`model.copies`).

    In each slot values leave first, in the order in which they have to be gone; then copies are
    waited for, so that what they free is there for those that come back.
    """
    slots: list[list[tuple[int, int, int]]] = [[] for _ in range(len(runs) + 1)]
    for one in placed:
        gap = one.away.gap
        slots[gap.after + 1].append((0, one.release, _number(indexed, StepKind.OFFLOAD, gap)))
        slots[one.release].append((1, gap.after, _number(indexed, StepKind.RELEASE, gap)))
        slots[one.reload].append((2, gap.before, _number(indexed, StepKind.RELOAD, gap)))
    steps: list[int] = []
    for slot, op in zip(slots, [*runs, None], strict=True):
        steps += [number for _, _, number in sorted(slot)]
        steps += [] if op is None else [op]
    return steps


def _number(indexed: Indexed, kind: StepKind, gap: Gap) -> int:
    return len(indexed.time_us) + 3 * gap.value + COPY_KINDS.index(kind)


def starts_of(indexed: Indexed, runs: list[int], placed: list[Placed]) -> list[float]:
    """When each operation of the schedule begins with these copies; last, when it ends."""
    steps = steps_with(indexed, runs, placed)
    stalls = stalls_of(indexed, steps) if placed else [0.0] * len(steps)
    count, now_us = len(indexed.time_us), 0.0
    starts = []
    for op, stall_us in zip(steps, stalls, strict=True):
        now_us += stall_us
        if op < count:
            starts.append(now_us)
        now_us += computing_us(indexed, op)
    return [*starts, now_us]


def unhindered(indexed: Indexed, runs: list[int]) -> list[float]:
    """When each operation begins if no copy hinders it; last, when it ends."""
    return list(accumulate((indexed.time_us[op] for op in runs), initial=0.0))
