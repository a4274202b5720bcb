"""problem + budget -> Solution: the order of the solver's stages, written once.

Enters: a `Problem` and a budget in bytes. Leaves: a `Solution` whose plan passes `check`, is no
worse than any plan of the portfolio, and carries its proven bound.

The stages: exhaustive search, which ends it for small problems; presolve (`reduce`: all that
follows speaks of the reduced problem, whose peaks are never below the real ones; `_plan` leads
back); the stages of `search`, for all budgets and for the one asked for; where none fits, those of
`smallest`; the check, and the bound.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

from autoremat_solver.certificate import holds
from autoremat_solver.check import check
from autoremat_solver.exact.search import MOST_OPS, ExactSearch, SearchLimit
from autoremat_solver.model.indexed import index
from autoremat_solver.model.readable import require_consistent
from autoremat_solver.model.reduce import Reduction, reduce
from autoremat_solver.plan import Plan, Solution, Status, Step, StepKind
from autoremat_solver.plans.front import Candidate, arranged
from autoremat_solver.problem import Phase, Problem
from autoremat_solver.search.smallest import smallest_candidate
from autoremat_solver.search.stages import PROVEN, Search
from autoremat_solver.simulate import simulate

PREPARED_SHARE = 0.4  # of the time limit, by when plans for all budgets are made
SMALLEST_SHARE = 0.65  # by when the smallest peak is found; the rest makes its plan faster
SEARCH_SHARE = 0.85  # the rest is for the last simulation under way, the bound and the check
CURVE_ENDS_SHARE = 0.3  # of the time for a whole curve, for each of its two ends at most


class Solver:
    """Plans of one problem for many budgets.

    Args:
        problem: the step.
        time_limit_s: wall-clock time for each call of a method that is given no other; 0 keeps to
            simple strategies.
        strict: raise `CertificateError` where a bound or a floor is above a plan that exists; else
            it is a warning, and the plan comes without certificate.

    Raises:
        ProblemError: if a value that the backward needs may neither be saved nor recomputed.
    """

    def __init__(
        self, problem: Problem, *, time_limit_s: float = 30.0, strict: bool = False
    ) -> None:
        """Simulate the simple strategies."""
        if not time_limit_s >= 0:
            raise ValueError(f"time_limit_s is {time_limit_s}: give seconds, 0 or more.")
        self.problem = problem
        self.time_limit_s = time_limit_s
        self.strict = strict
        require_consistent(index(problem))
        is_small = len(problem.ops) <= MOST_OPS
        self._reduction = Reduction(problem, {}) if is_small else reduce(problem)
        self._search = Search(index(self._reduction.problem))
        self._exact = ExactSearch.of(self._search.indexed) if time_limit_s > 0 else None
        self._floor_nbytes = self._search.bounds.floor_nbytes
        self._smallest: Candidate | None = None
        self._checked: set[int] = set()
        self._rejected: list[Candidate] = []

    def solve(self, budget_nbytes: int, *, time_limit_s: float | None = None) -> Solution:
        """The fastest plan found whose peak is at most the budget.

        Args:
            budget_nbytes: bytes live at any step, resident ones included.
            time_limit_s: for this call; the solver's own if not given.

        Returns:
            With status INFEASIBLE the plan of the smallest peak found, which is above the budget.

        Raises:
            TypeError: if the budget is no integer.
            ValueError: if it is negative.
        """
        _require_budget(budget_nbytes)
        began, limit_s = time.monotonic(), self._limit_s(time_limit_s)
        deadline = began + SEARCH_SHARE * limit_s
        if (exact := self._solve_exactly(budget_nbytes, deadline)) is not None:
            return self._solution(*exact, budget_nbytes, began, limit_s)
        fastest = self._search.find_fastest(deadline)
        if self._search.fastest_is_proven and fastest.peak_nbytes <= budget_nbytes:
            return self._solution(fastest, Status.OPTIMAL, budget_nbytes, began, limit_s)
        self._search.prepare(began + PREPARED_SHARE * limit_s)
        if self._is_lean(budget_nbytes):
            # What the search for the smallest peak passes on its way is the best to begin with,
            # and a peak that it claims is met when it is asked for.
            self._find_smallest(began + SMALLEST_SHARE * limit_s)
            self._search.rearrange(budget_nbytes, deadline)
        elif budget_nbytes >= self._search.bounds.floor_nbytes:
            self._search.at_budget(budget_nbytes, deadline)
        if self._search.front.fastest_within(budget_nbytes) is None:
            self._find_smallest(deadline)
        best = self._valid_within(budget_nbytes)
        if best is None:
            # What a search at this budget found by chance may be smaller still, but another
            # search would not find it again: the answer has to be one that can be asked for.
            smallest = self._find_smallest(deadline)
            while not self._passes(smallest):
                self._search.front.drop(smallest)
                smallest = self._search.front.smallest
            return self._solution(smallest, Status.INFEASIBLE, budget_nbytes, began, limit_s)
        in_time = time.monotonic() < deadline
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        return self._solution(best, status, budget_nbytes, began, limit_s)

    def smallest_peak(self, *, time_limit_s: float | None = None) -> Solution:
        """The plan of the smallest peak found; the budgets asked for before do not matter."""
        began, limit_s = time.monotonic(), self._limit_s(time_limit_s)
        deadline = began + SEARCH_SHARE * limit_s
        if (exact := self._solve_exactly(None, deadline)) is not None:
            return self._solution(*exact, exact[0].peak_nbytes, began, limit_s)
        self._search.find_fastest(deadline)
        self._search.prepare(began + PREPARED_SHARE * limit_s)
        peak = self._find_smallest(began + SMALLEST_SHARE * limit_s).peak_nbytes
        self._search.rearrange(peak, deadline)
        smallest = self._valid_within(peak) or self._find_smallest(deadline)
        in_time = time.monotonic() < deadline
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        return self._solution(smallest, status, smallest.peak_nbytes, began, limit_s)

    def lean_plan(self) -> Plan:
        """The leanest plan that local search makes of the simple strategies; no program is solved.

        Its peak may be above that of `smallest_peak`.
        """
        if not self._search.is_prepared:
            smallest_candidate(self._search, time.monotonic() + self.time_limit_s)
        while not self._passes(lean := self._search.front.smallest):
            self._search.front.drop(lean)
        return self._plan(lean)

    def fastest(self, *, time_limit_s: float | None = None) -> Solution:
        """The plan of the smallest time under no budget; ties go to the smaller peak."""
        began, limit_s = time.monotonic(), self._limit_s(time_limit_s)
        best = self._search.find_fastest(began + limit_s)
        in_time = time.monotonic() < began + limit_s
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        status = Status.OPTIMAL if self._search.fastest_is_proven else status
        return self._solution(best, status, best.peak_nbytes, began, limit_s)

    def pareto(
        self,
        points: int = 12,
        *,
        time_limit_s: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Solution]:
        """The plans from the smallest peak to the fastest one, none beaten in peak and time.

        Budgets spread evenly over the peaks in between are solved one after the other, and each
        may use what the others found. All of it together keeps to the time limit; what is left
        of it is shared evenly, and budgets that it does not reach are left out.

        Args:
            points: budgets, the two ends included; at least 2.
            time_limit_s: for the whole curve; the solver's own if not given.
            progress: called with (budgets solved, `points`) after each; the last call tells how
                many the time limit reached.

        Returns:
            At most `points` solutions, the smallest peak first.

        Raises:
            ValueError: if there are fewer than 2 points.
        """
        if points < 2:
            raise ValueError(f"points is {points}: a curve has two ends, give 2 or more.")
        began, limit_s = time.monotonic(), self._limit_s(time_limit_s)
        end_s = CURVE_ENDS_SHARE * limit_s
        tell = progress or (lambda solved, asked: None)
        found = [self.fastest(time_limit_s=end_s), self.smallest_peak(time_limit_s=end_s)]
        tell(len(found), points)
        high, low = (solution.timeline.peak_nbytes for solution in found)
        for left in range(points - 2, 0, -1):
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                break
            budget_nbytes = low + (high - low) * left // (points - 1)
            found.append(self.solve(budget_nbytes, time_limit_s=left_s / left))
            tell(len(found), points)
        return _unbeaten(found)

    def _limit_s(self, given_s: float | None) -> float:
        return self.time_limit_s if given_s is None else given_s

    def _solve_exactly(
        self, budget_nbytes: int | None, deadline: float
    ) -> tuple[Candidate, Status] | None:
        """The cheapest plan within the budget, or of the smallest peak if there is none.

        Args:
            budget_nbytes: the peak allowed; None for the smallest.
            deadline: `time.monotonic()` at which to stop.

        Returns:
            None if the problem is too large for the exhaustive search, or its plan is dropped.
        """
        if self._exact is None:
            return None
        try:
            steps, status = None, Status.OPTIMAL
            if budget_nbytes is not None:
                steps = self._exact.cheapest(budget_nbytes, deadline)
                status = Status.INFEASIBLE if steps is None else Status.OPTIMAL
            is_smallest = steps is None
            if steps is None:
                steps = self._exact.smallest(self._search.front.smallest.peak_nbytes, deadline)
        except SearchLimit:
            self._exact = None
            return None
        new = arranged(self._search.indexed, steps, "exhaustive search")
        if is_smallest:
            self._floor_nbytes = new.peak_nbytes
        self._search.front.add(new)
        return (new, status) if self._passes(new) else None

    def _is_lean(self, budget_nbytes: int) -> bool:
        """Whether the budget lies below all plans for all budgets, and above the floor.

        Never in a graph without phases: plans for all budgets keep the given order there, and
        another order may reach the budget without any rerun.
        """
        search = self._search
        if not search.is_prepared or search.plain_chains or Phase.ANY in search.indexed.phase:
            return False
        return search.bounds.floor_nbytes <= budget_nbytes < search.portfolio[0].peak_nbytes

    def _find_smallest(self, deadline: float) -> Candidate:
        """The plan of the smallest peak; once, if the plans that its search starts from exist."""
        if self._smallest is None:
            found = smallest_candidate(self._search, deadline)
            if not self._search.is_prepared:
                return found
            self._smallest = found
        return self._smallest

    def _valid_within(self, budget_nbytes: int) -> Candidate | None:
        """The fastest member that fits and passes the independent check."""
        while (member := self._search.front.fastest_within(budget_nbytes)) is not None:
            if self._passes(member):
                return member
            self._search.front.drop(member)
        return None

    def _passes(self, member: Candidate) -> bool:
        if id(member) in self._checked:
            return True
        violations = check(self.problem, self._plan(member))
        if violations:
            self._rejected.append(member)
            warnings.warn(
                f"The plan of {member.method!r} is dropped, please report it: {violations[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._checked.add(id(member))
        return True

    def _plan(self, member: Candidate) -> Plan:
        """A member's plan of the problem that was given."""
        lifted = self._reduction.lift(self._search.indexed.plan(member.steps))
        return without_unread(self.problem, lifted)

    def _solution(
        self, best: Candidate, status: Status, budget_nbytes: int, began: float, limit_s: float
    ) -> Solution:
        plan = self._plan(best)
        timeline = simulate(self.problem, plan)
        if status is Status.INFEASIBLE and timeline.peak_nbytes <= budget_nbytes:
            status = Status.FEASIBLE
        bound_us = self._search.bounds.time_us(
            max(budget_nbytes, timeline.peak_nbytes),
            target_us=timeline.time_us / (1 + PROVEN),
        )
        if not holds("bound in us", bound_us, timeline.time_us, strict=self.strict):
            bound_us, status = 0.0, _without_certificate(status)
        elif status is Status.OPTIMAL:
            bound_us = timeline.time_us
        elif status is Status.FEASIBLE and timeline.time_us <= bound_us * (1 + PROVEN):
            status = Status.OPTIMAL
        floor_nbytes = self._floor_nbytes
        if not holds("floor in bytes", floor_nbytes, timeline.peak_nbytes, strict=self.strict):
            floor_nbytes = self.problem.resident_nbytes
        return Solution(
            plan=plan,
            timeline=timeline,
            status=status,
            bound_us=bound_us,
            floor_nbytes=floor_nbytes,
            method=best.method,
            seconds=time.monotonic() - began,
        )


def _without_certificate(status: Status) -> Status:
    return status if status is Status.INFEASIBLE else Status.UNPROVEN


def without_unread(problem: Problem, plan: Plan) -> Plan:
    """The plan without repeats whose results nobody reads: they cost time, and no one runs them."""
    pinned = frozenset(problem.outputs)
    wanted: set[str] = set()
    kept: list[Step] = []
    for step in reversed(plan.steps):
        op = problem.op_by_name[step.target]
        if step.kind is StepKind.RECOMPUTE and wanted.isdisjoint(op.outputs):
            continue
        kept.append(step)
        wanted.difference_update(op.outputs)
        wanted.update(name for name in op.inputs if name not in pinned)
    return Plan(tuple(reversed(kept)))


def solve(problem: Problem, budget_nbytes: int, *, time_limit_s: float = 30.0) -> Solution:
    """The fastest plan found whose peak is at most the budget; see `Solver.solve`."""
    return Solver(problem, time_limit_s=time_limit_s).solve(budget_nbytes)


def _unbeaten(found: list[Solution]) -> list[Solution]:
    """Those that no other one beats, by peak."""
    found = sorted(found, key=lambda s: (s.timeline.peak_nbytes, s.timeline.time_us))
    result: list[Solution] = []
    for solution in found:
        if not result or solution.timeline.time_us < result[-1].timeline.time_us:
            result.append(solution)
    return result


def _require_budget(budget_nbytes: int) -> None:
    if isinstance(budget_nbytes, bool) or not isinstance(budget_nbytes, int):
        raise TypeError(
            f"The budget is {budget_nbytes!r} ({type(budget_nbytes).__name__}): give bytes as int."
        )
    if budget_nbytes < 0:
        raise ValueError(f"The budget is {budget_nbytes} bytes: it cannot be negative.")
