"""problem + budgets for device and host -> Solution, whose plan may offload as well as recompute.

Enters: a `Problem` with a link, and bytes for both memories. Leaves: a `Solution` that passes
`check` and is never worse than what `Solver` finds without a host. Its bound and its floor hold for
plans that offload (`offload.bounds`), not only for those that recompute.

How: what recompute alone finds at the budget is the yardstick. Then plans that recompute less and
take more are relieved by sending values away (`relieve`), the fastest first, as long as one could
still win; all of them are plans that the search has found before, and plans for budgets in between.
The winner descends: repeats are left out where sending away what they make costs less. A local
search: how good it is on small problems is told by the oracle of the tests.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autoremat_solver.check import check
from autoremat_solver.effort import CutOff, Effort
from autoremat_solver.model.copies import copy_of
from autoremat_solver.model.indexed import index
from autoremat_solver.offload.bounds import least_peak_nbytes, least_us
from autoremat_solver.offload.relieve import TASTES, Within, relieve
from autoremat_solver.plan import Plan, Solution, Status, Step
from autoremat_solver.problem import Problem
from autoremat_solver.search.state import PROVEN
from autoremat_solver.simulate import simulate
from autoremat_solver.solve import Solver, without_unread

BUDGETS_BETWEEN = 1  # for which plans are searched, between the budget and the fastest plan's peak
RELIEF = 2_000_000  # operations that may be simulated to relieve plans, at effort 1
SURE_HALVINGS = 4  # of what the smallest peak may be, however late it is
CLOSE_ENOUGH = 1 / 512  # of the smallest peak, at which its search ends


@dataclass(frozen=True)
class _Found:
    """A plan that is in both budgets."""

    plan: Plan
    time_us: float
    peak_nbytes: int
    method: str


class OffloadSolver:
    """Plans of one problem for many budgets, with a host beside the device.

    Args:
        problem: the step; it has a link and no regions.
        host_nbytes: what the host may hold.
        time_limit_s: wall-clock seconds of each call, after which nothing further begins.
        effort: factor of what each search may count up to.
        recompute: whether operations may run again too; else values can only be sent away.
        movable: names of the values that may leave; all if not given.

    Raises:
        ProblemError: if the problem has regions, or a value that the backward needs may neither be
            saved nor recomputed.
        ValueError: if the problem has no link, or a number is negative.
    """

    def __init__(
        self,
        problem: Problem,
        host_nbytes: int,
        *,
        time_limit_s: float = 30.0,
        effort: float = 1.0,
        recompute: bool = True,
        movable: Collection[str] | None = None,
    ) -> None:
        """Simulate the simple strategies."""
        if problem.link is None:
            raise ValueError(
                "The problem has no link to a host: give it one with `replace(problem, link=...)`."
            )
        if host_nbytes < 0:
            raise ValueError(f"host_nbytes is {host_nbytes}: it cannot be negative.")
        self.problem, self.host_nbytes = problem, host_nbytes
        self.time_limit_s, self._effort, self._recompute = time_limit_s, effort, recompute
        self._indexed = index(problem)
        names = enumerate(value.name for value in problem.values)
        self._movable = frozenset(v for v, name in names if movable is None or name in movable)
        self.solver = Solver(problem, time_limit_s=time_limit_s, effort=effort)
        self._fastest = self.solver.fastest()
        self._recomputed: dict[int, Solution] = {}

    def solve(self, budget_nbytes: int) -> Solution:
        """The fastest plan found that keeps both budgets.

        With status INFEASIBLE it is the plan of the smallest peak found, above the budget.

        Args:
            budget_nbytes: bytes live on the device at any step, resident ones included.
        """
        began, cut_off = time.monotonic(), CutOff(self.time_limit_s)
        if budget_nbytes < self.floor_nbytes:
            return self._solution(self._smallest, Status.INFEASIBLE, began)
        effort = Effort(int(RELIEF * self._effort))
        best = self._alone(budget_nbytes)
        is_done = best is not None and best.time_us <= self.least_us * (1 + PROVEN)
        for plan in () if is_done else self._starts(budget_nbytes, cut_off):
            best = self._better(best, plan, budget_nbytes, effort.part(0.25))
        if best is None:
            smallest = self._smallest
            if smallest.peak_nbytes > budget_nbytes:
                return self._solution(smallest, Status.INFEASIBLE, began)
            best = smallest
        if is_done or not _repeats(best.plan):
            return self._solution(best, Status.FEASIBLE, began)
        if cut_off.is_over:
            return self._solution(best, Status.TIME_LIMIT, began)
        best = self._descended(best, budget_nbytes, effort)
        return self._solution(best, Status.FEASIBLE, began)

    def smallest_peak(self) -> Solution:
        """The fastest plan found of the smallest peak found."""
        return self.solve(self._smallest.peak_nbytes)

    def alone(self, budget_nbytes: int) -> Solution:
        """What `Solver` finds for this budget, without anything sent away; searched for once."""
        if budget_nbytes not in self._recomputed:
            self._recomputed[budget_nbytes] = self.solver.solve(budget_nbytes)
        return self._recomputed[budget_nbytes]

    @property
    def floor_nbytes(self) -> int:
        """No plan peaks below, with copies or without."""
        return least_peak_nbytes(self._indexed)

    @property
    def least_us(self) -> float:
        """No plan takes less: the fastest one without a budget needs no copies."""
        return max(least_us(self._indexed), self._fastest.bound_us)

    def _alone(self, budget_nbytes: int) -> _Found | None:
        """What is found without sending anything away; None if that does not fit."""
        if not self._recompute:
            fastest = self._fastest
            return self._found(fastest.plan, fastest.method) if self._fits(budget_nbytes) else None
        solution = self.alone(budget_nbytes)
        if solution.timeline.peak_nbytes > budget_nbytes:
            return None
        return self._found(solution.plan, solution.method)

    def _fits(self, budget_nbytes: int) -> bool:
        return self._fastest.timeline.peak_nbytes <= budget_nbytes

    def _found(self, plan: Plan, method: str) -> _Found:
        timeline = simulate(self.problem, plan)
        return _Found(plan, timeline.time_us, timeline.peak_nbytes, method)

    def _starts(self, budget_nbytes: int, cut_off: CutOff) -> Iterator[Plan]:
        """Plans without copies that take more than the budget, the fastest first."""
        yield self._fastest.plan
        if not self._recompute:
            return
        high = self._fastest.timeline.peak_nbytes
        low = max(budget_nbytes, self._indexed.problem.resident_nbytes)
        for part in range(BUDGETS_BETWEEN, 0, -1):
            if not cut_off.is_over:
                between = low + (high - low) * part // (BUDGETS_BETWEEN + 1)
                self.solver.solve(between, time_limit_s=cut_off.left_s)
        yield from reversed(self.solver.plans())

    def _better(
        self, best: _Found | None, plan: Plan, budget_nbytes: int, effort: Effort
    ) -> _Found | None:
        """The plan relieved, if that is faster than the best so far."""
        runs = self._indexed.numbers(plan)
        if best is not None and simulate(self.problem, plan).time_us >= best.time_us:
            return best
        for name, taste in TASTES.items():
            limit_us = math.inf if best is None else best.time_us
            within = Within(budget_nbytes, self.host_nbytes, self._movable, limit_us)
            relieved = relieve(self._indexed, runs, within, taste, effort)
            if relieved is None or relieved.time_us >= limit_us:
                continue
            new = self._plan(relieved.steps)
            if not check(self.problem, new, budget_nbytes, self.host_nbytes):
                best = self._found(new, f"offload, {name}")
        return best

    def _plan(self, steps: list[int]) -> Plan:
        """The plan of operation numbers with copies."""
        runs = iter(self._indexed.plan([s for s in steps if s < len(self._indexed.time_us)]).steps)
        copies = [copy_of(self._indexed, step) for step in steps]
        names = [value.name for value in self.problem.values]
        return Plan(
            tuple(next(runs) if copy is None else Step(copy[0], names[copy[1]]) for copy in copies)
        )

    def _descended(self, best: _Found, budget_nbytes: int, effort: Effort) -> _Found:
        """Leave out repeats, many at once and then fewer, where sending away costs less."""
        size = len(_repeats(best.plan)) // 2
        while size and not effort.is_spent:
            begun, at = best, 0
            while at < len(repeats := _repeats(best.plan)):
                if effort.is_spent:
                    return best
                left = _without(self.problem, best.plan, set(repeats[at : at + size]))
                new = best if left is None else self._better(best, left, budget_nbytes, effort)
                if new is None or new is best:
                    at += size
                else:
                    best = new
            if size > 1 or best is begun:
                size //= 2
        return best

    @functools.cached_property
    def _smallest(self) -> _Found:
        """What is proven to be the smallest is mostly within reach; else by halving up to it.

        Once, and however much was spent before, since a refusal rests on it.
        """
        cut_off = CutOff(self.time_limit_s)
        effort = Effort(int(RELIEF * self._effort))
        least = least_peak_nbytes(self._indexed)
        starts = [self._fastest.plan]
        smallest = self._found(self._fastest.plan, self._fastest.method)
        if (reached := self._relieved(starts, least, effort)) is not None:
            return reached
        if self._recompute:
            lean = self.solver.smallest_peak(time_limit_s=self.time_limit_s)
            smallest = min(smallest, self._found(lean.plan, lean.method), key=_peak_and_time)
            starts.append(lean.plan)
        halvings = 0
        while smallest.peak_nbytes - least > least * CLOSE_ENOUGH and not effort.is_spent:
            if halvings >= SURE_HALVINGS and cut_off.is_over:
                break
            halvings += 1
            middle = (least + smallest.peak_nbytes) // 2
            new = self._relieved(starts, middle, effort)
            if new is None:
                least = middle + 1
            else:
                smallest = new
        return smallest

    def _relieved(self, plans: list[Plan], budget_nbytes: int, effort: Effort) -> _Found | None:
        best: _Found | None = None
        for plan in plans:
            best = self._better(best, plan, budget_nbytes, effort.part(0.1))
        return best

    def _solution(self, best: _Found, status: Status, began: float) -> Solution:
        if status is not Status.INFEASIBLE and best.time_us <= self.least_us * (1 + PROVEN):
            status = Status.OPTIMAL
        return Solution(
            plan=best.plan,
            timeline=simulate(self.problem, best.plan),
            status=status,
            bound_us=min(self.least_us, best.time_us),
            floor_nbytes=self.floor_nbytes,
            method=best.method,
            seconds=time.monotonic() - began,
        )


def _peak_and_time(found: _Found) -> tuple[int, float]:
    return found.peak_nbytes, found.time_us


def _repeats(plan: Plan) -> list[int]:
    """The places of a plan's repeats in its schedule."""
    seen: set[str] = set()
    found = []
    for place, name in enumerate(plan.schedule):
        found += [place] if name in seen else []
        seen.add(name)
    return found


def _without(problem: Problem, plan: Plan, places: set[int]) -> Plan | None:
    """The plan without copies and without these runs; None if it is none then."""
    kept = [name for place, name in enumerate(plan.schedule) if place not in places]
    left = without_unread(problem, Plan.of(kept))
    return None if check(problem, left) else left
