"""A schedule that takes too much -> the same schedule with values sent away, within the budget.

Enters: operations in their order, a budget for the device and one for the host. Leaves: the copies
that keep both, or None where no copies can. The worst operation is looked at first: of all values
that lie idle while it runs, those leave that make computing wait least for their bytes; ties go by
the taste of the caller (`TASTES`). Then all that turns out not to be needed stays. A heuristic:
which values leave is not proven to be best. If a single host is large enough, it succeeds whenever
the schedule's largest operation fits with what it reads and the outputs made before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.offload.placing import (
    Away,
    Gap,
    Placed,
    free_of,
    gaps_of,
    place,
    starts_of,
    steps_with,
    unhindered,
)
from autoremat_solver.simulate import measure

Floats = NDArray[np.float64]
Taste = Callable[[Floats, Floats], Floats]
# Of values that make computing wait equally: by their bytes and how long they lie idle.
TASTES: dict[str, Taste] = {
    "longest idle first": lambda nbytes, idle_us: idle_us,
    "largest first": lambda nbytes, idle_us: nbytes,
    "largest for longest first": lambda nbytes, idle_us: nbytes * idle_us,
}


@dataclass(frozen=True)
class Within:
    """What a schedule has to keep.

    Attributes:
        device_nbytes: live on the device, resident ones included.
        host_nbytes: held on the host.
        movable: the values that may leave.
        time_us: it has to be faster than that.
    """

    device_nbytes: int
    host_nbytes: int
    movable: frozenset[int]
    time_us: float = math.inf


@dataclass(frozen=True)
class Relieved:
    """A schedule with copies.

    Attributes:
        steps: operation numbers of the problem with copies.
        time_us: of all of it.
    """

    steps: list[int]
    time_us: float


def relieve(
    indexed: Indexed,
    runs: list[int],
    within: Within,
    taste: Taste,
    effort: Effort,
) -> Relieved | None:
    """The schedule with copies that keep it within its limits; None if none are found.

    Args:
        indexed: the problem without copies; it has a link.
        runs: a schedule of it.
        within: what it has to keep.
        taste: what is preferred among values that cost the same time.
        effort: what may be spent; None is returned once it is.
    """
    relief = _Relief(indexed, runs, within, taste)
    while relief.excess_nbytes > 0:
        effort.simulated(len(runs))
        is_late = relief.starts_us[-1] >= within.time_us
        if is_late or effort.is_spent or not relief.send_away():
            return None
    relief.keep_what_may_stay(effort)
    return Relieved(steps_with(indexed, runs, relief.placed), relief.starts_us[-1])


class _Relief:
    """One schedule, with the copies chosen so far."""

    def __init__(self, indexed: Indexed, runs: list[int], within: Within, taste: Taste) -> None:
        self._indexed, self._runs, self._taste = indexed, runs, taste
        self._budget_nbytes, self._host_nbytes = within.device_nbytes, within.host_nbytes
        self._gaps = gaps_of(indexed, runs, within.movable)
        self._after = np.array([gap.after for gap in self._gaps], dtype=np.int64)
        self._before = np.array([gap.before for gap in self._gaps], dtype=np.int64)
        self._nbytes = np.array([indexed.nbytes[gap.value] for gap in self._gaps], dtype=np.int64)
        self._on_host = [_on_host_nbytes(indexed, gap) for gap in self._gaps]
        self._number = {gap: number for number, gap in enumerate(self._gaps)}
        self._alone_nbytes = np.array(measure(indexed, runs).live_nbytes, dtype=np.int64)
        self._on_host_nbytes = np.zeros(len(runs) + 1, dtype=np.int64)
        self._away: dict[Gap, Away] = {}
        self.placed: list[Placed] = []
        self.starts_us = unhindered(indexed, runs)
        self._live_nbytes = self._alone_nbytes

    @property
    def excess_nbytes(self) -> int:
        """What the worst operation takes above the budget."""
        return int(self._live_nbytes.max(initial=0)) - self._budget_nbytes

    def send_away(self) -> bool:
        """Send away what is to be gone while the worst operation runs; whether there is any."""
        worst, excess_nbytes = int(self._live_nbytes.argmax()), self.excess_nbytes
        sent, again = [], set()
        for number in self._candidates(worst):
            gap = self._gaps[number]
            if gap in self._away:
                again.add(gap)  # it was there in spite of its copies: they have to be waited for
            else:
                host = self._on_host_nbytes[gap.after + 1 : gap.before + 1]
                if int(host.max()) + self._on_host[number] > self._host_nbytes:
                    continue
                host += self._on_host[number]
                self._away[gap] = free_of(gap)
            sent.append(gap)
            excess_nbytes -= int(self._nbytes[number])
            if excess_nbytes <= 0:
                break
        self._place()
        there = {one.away.gap for one in self.placed if not _is_away(one, worst)}
        for gap in sent:
            if gap in again or gap in there:
                self._away[gap] = self._away[gap].during(worst)
        self._place()
        return bool(sent)

    def keep_what_may_stay(self, effort: Effort) -> None:
        """Leave out copies without which budget and time are kept, the smallest first."""
        for gap in sorted(self._away, key=lambda g: (self._indexed.nbytes[g.value], g.after)):
            effort.simulated(len(self._runs))
            if effort.is_spent:
                return
            before = dict(self._away), self.placed, self.starts_us, self._live_nbytes
            del self._away[gap]
            self._place()
            if self.excess_nbytes > 0 or self.starts_us[-1] > before[2][-1]:
                self._away, self.placed, self.starts_us, self._live_nbytes = before
            else:
                host = self._on_host_nbytes[gap.after + 1 : gap.before + 1]
                host -= _on_host_nbytes(self._indexed, gap)

    def _candidates(self, worst: int) -> list[int]:
        """Gaps whose value is there while the worst operation runs, the best to send away first."""
        idle = (self._after < worst) & (worst < self._before)
        for one in self.placed:
            if _is_away(one, worst):
                idle[self._number[one.away.gap]] = False
        found = np.flatnonzero(idle)
        starts = np.array(self.starts_us)
        waits_us = self._waits_us(found, worst, starts)
        idle_us = starts[self._before[found]] - starts[self._after[found]]
        nbytes = self._nbytes[found].astype(np.float64)
        useful = np.minimum(nbytes, self.excess_nbytes)
        order = np.lexsort((found, -self._taste(nbytes, idle_us), waits_us / useful))
        chosen: list[int] = found[order].tolist()
        return chosen

    def _waits_us(self, gaps: NDArray[np.int64], worst: int, starts: Floats) -> Floats:
        """How long computing would wait, about, for each of these to be away at an operation."""
        link = self._indexed.problem.link
        assert link is not None
        out_us = link.latency_us + self._nbytes[gaps] / link.out_nbytes_per_us
        in_us = link.latency_us + self._nbytes[gaps] / link.in_nbytes_per_us
        own = {self._number[one.away.gap]: one for one in self.placed}
        outs = sorted((one.away.gap.after, one.sent_us) for one in self.placed)
        ins = sorted((one.away.gap.before, one.starts_us) for one in self.placed)
        busy_us = np.array([0.0, *(sent for _, sent in outs)])
        due_us = np.array([*(start for _, start in ins), np.inf])
        behind = np.searchsorted([after for after, _ in outs], self._after[gaps], side="right")
        ahead = np.searchsorted([before for before, _ in ins], self._before[gaps], side="left")
        sent_us = np.maximum(busy_us[behind], starts[self._after[gaps] + 1]) + out_us
        starts_us = np.minimum(due_us[ahead], starts[self._before[gaps]]) - in_us
        computing_us = 2 * link.ask_us + link.slowdown * (out_us + in_us)
        for number, gap in enumerate(gaps.tolist()):
            if gap in own:
                computing_us[number] = 0.0  # it is in the plan already
                sent_us[number], starts_us[number] = own[gap].sent_us, own[gap].starts_us
        out_waits = np.maximum(0.0, sent_us - starts[worst])
        in_waits = np.maximum(0.0, starts[worst + 1] - starts_us)
        waits: Floats = out_waits + in_waits + computing_us
        return waits

    def _place(self) -> None:
        """Place all copies anew: first as if computing never waited longer than it does now."""
        args = self._indexed, self._runs, self._away.values()
        self.placed = place(*args, self.starts_us)
        self.starts_us = starts_of(self._indexed, self._runs, self.placed)
        change = np.zeros(len(self._runs) + 1, dtype=np.int64)
        for one in self.placed:
            nbytes = self._indexed.nbytes[one.away.gap.value]
            change[one.release] -= nbytes
            change[one.reload] += nbytes
        self._live_nbytes = self._alone_nbytes + np.cumsum(change)[:-1]


def _on_host_nbytes(indexed: Indexed, gap: Gap) -> int:
    assert indexed.problem.link is not None
    return indexed.problem.link.on_host_nbytes(indexed.nbytes[gap.value])


def _is_away(one: Placed, place: int) -> bool:
    return one.release <= place < one.reload
