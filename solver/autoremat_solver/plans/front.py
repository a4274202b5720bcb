"""The plans found so far: the fastest for every peak, none of them beaten in both.

Enters: save sets with a retention. Leaves: for a budget the fastest plan that
fits, ties to the smaller peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plan import Timeline
from autoremat_solver.plans.fast_measure import fast_measure
from autoremat_solver.plans.realise import KEEP, Retention, realise

SAME_PEAK = 0.003  # by which a smaller peak is not worth any time


@dataclass(frozen=True)
class Candidate:
    """A schedule of operation numbers with what `simulate` says of it.

    Attributes:
        steps: the schedule.
        timeline: its live bytes and time.
        method: the strategy that made it.
        peak_nbytes: the timeline's peak.
        saved: the values that were asked to be saved; None if the schedule stems from no save set.
        retention: how long recomputed values may be read; with `saved` it gives the schedule.
    """

    steps: list[int]
    timeline: Timeline
    method: str
    peak_nbytes: int
    saved: frozenset[int] | None
    retention: Retention

    @property
    def time_us(self) -> float:
        """Time of the whole step."""
        return self.timeline.time_us


def candidate(
    indexed: Indexed, saved: frozenset[int], method: str, retention: Retention = KEEP
) -> Candidate:
    """The plan of a save set, with its simulated peak and time."""
    return realised(indexed, realise(indexed, saved, retention), saved, method, retention)


def realised(
    indexed: Indexed, steps: list[int], saved: frozenset[int], method: str, retention: Retention
) -> Candidate:
    """The same, of which the schedule is known."""
    timeline = fast_measure(indexed, steps)
    return Candidate(steps, timeline, method, timeline.peak_nbytes, saved, retention)


def arranged(indexed: Indexed, steps: list[int], method: str) -> Candidate:
    """The plan of a schedule that stems from no save set."""
    timeline = fast_measure(indexed, steps)
    return Candidate(steps, timeline, method, timeline.peak_nbytes, None, KEEP)


def leaner(one: Candidate, other: Candidate) -> Candidate:
    """The one of the smaller peak; the faster one where the peaks are nearly the same."""
    low, high = sorted((one, other), key=lambda m: (m.peak_nbytes, m.time_us))
    nearly = high.peak_nbytes <= low.peak_nbytes * (1 + SAME_PEAK)
    return high if nearly and high.time_us < low.time_us else low


class Front:
    """Candidates by peak; each is faster than all with a smaller peak."""

    def __init__(self) -> None:
        """An empty front."""
        self._members: list[Candidate] = []

    def add(self, new: Candidate) -> bool:
        """Keep the candidate unless a member is as good in both; whether it was kept."""
        for old in self._members:
            if old.peak_nbytes <= new.peak_nbytes and old.time_us <= new.time_us:
                return False
        self._members = [
            old
            for old in self._members
            if old.peak_nbytes < new.peak_nbytes or old.time_us < new.time_us
        ]
        self._members.append(new)
        self._members.sort(key=lambda member: member.peak_nbytes)
        return True

    def fastest_within(self, budget_nbytes: int) -> Candidate | None:
        """The fastest member whose peak fits; None if none fits."""
        fitting = [m for m in self._members if m.peak_nbytes <= budget_nbytes]
        return fitting[-1] if fitting else None

    def above(self, budget_nbytes: int) -> list[Candidate]:
        """Members that do not fit, nearest first."""
        return [m for m in self._members if m.peak_nbytes > budget_nbytes]

    @property
    def smallest(self) -> Candidate:
        """The member of the smallest peak."""
        return self._members[0]

    @property
    def members(self) -> list[Candidate]:
        """All members, smallest peak first."""
        return list(self._members)

    def drop(self, member: Candidate) -> None:
        """Forget a member (it failed the independent check)."""
        self._members = [old for old in self._members if old is not member]
