"""problem + budget -> Solution: the order of the solver's stages, written once.

Enters: a `Problem` and a budget in bytes. Leaves: a `Solution` whose plan passes `check`, is no
worse than any plan of the portfolio, and carries its proven bound. A new `Solver` gives the same
plan for the same problem, budget and effort on any machine, unless the time limit leaves stages
out: then the solution says which. One that was asked before knows more, and may give another plan.

What runs: presolve (`reduce`: all that follows speaks of the reduced problem, whose peaks are
never below the real ones; `_plan` leads back); the stages of `search.stages`, for all budgets and
for the one asked for; the check, and the bound.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection

from autoremat_solver.certificate import holds
from autoremat_solver.check import check
from autoremat_solver.effort import CutOff, Effort
from autoremat_solver.model.indexed import index
from autoremat_solver.model.readable import require_consistent
from autoremat_solver.model.reduce import reduce
from autoremat_solver.plan import Plan, Solution, Status, Step, StepKind
from autoremat_solver.plans.front import Candidate
from autoremat_solver.problem import Op, Phase, Problem
from autoremat_solver.search.smallest import smallest_candidate
from autoremat_solver.search.stages import AT_BUDGET, FASTEST, LEANEST, STAGES, Run
from autoremat_solver.search.state import PROVEN, Search
from autoremat_solver.simulate import simulate

LATE_BOUND = 0.05  # of the usual effort, for the bound where there is no time for anything
BOUND_AT_SMALLEST = 2.0  # times the usual effort for a bound: nowhere else is it as hard
LEAN_PLAN_OPERATIONS = 200_000  # simulated for `lean_plan`


class Solver:
    """Plans of one problem for many budgets.

    Args:
        problem: the step.
        time_limit_s: wall-clock seconds of each call of a method that is given no other, after
            which no further stage begins; 0 keeps to simple strategies.
        effort: factor of what each stage may count up to.
        bound_effort: the same for bounds, `effort` if not given; who needs the plan more than its
            certificate gives less.
        good_enough: a gap at which the longer searches are left out; what is known of a problem of
            this size decides if it is smaller than that.
        without: names of stages (`stages.STAGES`) to leave out, to see what they are worth.
        strict: raise `CertificateError` where a bound or a floor is above a plan that exists; else
            it is a warning, and the plan comes without certificate.

    Raises:
        ProblemError: if a value that the backward needs may neither be saved nor recomputed.
        ValueError: if a number is negative, or no stage has such a name.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        time_limit_s: float = 30.0,
        effort: float = 1.0,
        bound_effort: float | None = None,
        good_enough: float = 0.0,
        without: Collection[str] = (),
        strict: bool = False,
    ) -> None:
        """Simulate the simple strategies."""
        _require_limits(
            time_limit_s, effort=effort, bound_effort=bound_effort or 0.0, good_enough=good_enough
        )
        if unknown := set(without) - {stage.name for stage in STAGES}:
            known = ", ".join(stage.name for stage in STAGES)
            raise ValueError(f"No stage is called {min(unknown)!r}; there are: {known}.")
        self.problem = problem
        self.time_limit_s = time_limit_s
        self.strict = strict
        self._effort, self._bound_effort, self._without = effort, bound_effort, frozenset(without)
        require_consistent(index(problem))
        self._reduction = reduce(problem)
        self._search = Search(index(self._reduction.problem))
        self._search.good_enough = good_enough
        self._checked: dict[int, Candidate] = {}  # by id, held so that no id means another

    def solve(
        self, budget_nbytes: int, *, time_limit_s: float | None = None, effort: float | None = None
    ) -> Solution:
        """The fastest plan found whose peak is at most the budget.

        Args:
            budget_nbytes: bytes live at any step, resident ones included.
            time_limit_s: for this call; the solver's own if not given.
            effort: the same.

        Returns:
            With status INFEASIBLE the plan of the smallest peak found, which is above the budget.

        Raises:
            TypeError: if the budget is no integer.
            ValueError: if it, the time limit or the effort is negative.
        """
        _require_budget(budget_nbytes)
        began, run = time.monotonic(), self._run(time_limit_s, effort)
        best = self._searched(budget_nbytes, run)
        status = Status.FEASIBLE if best.peak_nbytes <= budget_nbytes else Status.INFEASIBLE
        return self._solution(best, status, budget_nbytes, began, run)

    def plan(self, budget_nbytes: int) -> Plan:
        """The plan of `solve`, without its certificate: for who asks for many to choose from.

        Like that one's it is above the budget where none within it is found.

        Args:
            budget_nbytes: bytes live at any step, resident ones included.

        Raises:
            TypeError: if the budget is no integer.
            ValueError: if it is negative.
        """
        _require_budget(budget_nbytes)
        return self._plan(self._searched(budget_nbytes, self._run(None, None)))

    def plans(self) -> list[Plan]:
        """All plans found so far that none beats in peak and time, the smallest peak first."""
        return [self._plan(member) for member in self._search.front.members]

    def smallest_peak(
        self, *, time_limit_s: float | None = None, effort: float | None = None
    ) -> Solution:
        """The plan of the smallest peak found; the budgets asked for before do not matter."""
        began, run = time.monotonic(), self._run(time_limit_s, effort)
        run.through((*FASTEST, *LEANEST), self._search, 0)
        self._search.bound_effort *= BOUND_AT_SMALLEST
        smallest = self._smallest()
        return self._solution(smallest, Status.FEASIBLE, smallest.peak_nbytes, began, run)

    def lean_plan(self) -> Plan:
        """The leanest plan that local search makes of what is known; no program is solved.

        Of a new solver it is the same plan each time. Its peak may be above that of
        `smallest_peak`.
        """
        lean = smallest_candidate(self._search, Effort(LEAN_PLAN_OPERATIONS))
        return self._plan(lean if self._passes(lean) else self._smallest())

    def fastest(self, *, time_limit_s: float | None = None) -> Solution:
        """The plan of the smallest time under no budget; ties go to the smaller peak."""
        began, run = time.monotonic(), self._run(time_limit_s, None)
        run.through(FASTEST, self._search, 0)
        unlimited = 2 * self._search.indexed.total_nbytes + self.problem.resident_nbytes
        unlimited = max(unlimited, self._search.fastest.peak_nbytes)
        best = self._valid_within(unlimited)
        assert best is not None, "the simple strategies pass the check"
        status = Status.OPTIMAL if self._search.fastest_is_proven else Status.FEASIBLE
        # A bound for what this one takes would not hold for faster plans that take more.
        return self._solution(best, status, unlimited, began, run)

    def pareto(
        self,
        points: int = 12,
        *,
        time_limit_s: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Solution]:
        """The plans from the smallest peak to the fastest one, none beaten in peak and time.

        Budgets spread evenly over the peaks in between are solved one after the other, the largest
        first, and each may use what the others found. Budgets that the time limit does not reach
        are left out.

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
        cut_off = CutOff(self.time_limit_s if time_limit_s is None else time_limit_s)
        tell = progress or (lambda solved, asked: None)
        effort = self._effort / points
        found = [
            self.fastest(time_limit_s=cut_off.left_s),
            self.smallest_peak(time_limit_s=cut_off.left_s, effort=effort),
        ]
        tell(len(found), points)
        high, low = (solution.timeline.peak_nbytes for solution in found)
        for left in range(points - 2, 0, -1):
            if cut_off.is_over:
                break
            budget_nbytes = low + (high - low) * left // (points - 1)
            found.append(self.solve(budget_nbytes, time_limit_s=cut_off.left_s, effort=effort))
            tell(len(found), points)
        return _unbeaten(found)

    def _run(self, time_limit_s: float | None, effort: float | None) -> Run:
        limit_s = self.time_limit_s if time_limit_s is None else time_limit_s
        factor = self._effort if effort is None else effort
        _require_limits(limit_s, effort=factor)
        run = Run(CutOff(limit_s), factor, self._without)
        usual = factor if self._bound_effort is None else self._bound_effort
        self._search.bound_effort = usual if limit_s > 0 else LATE_BOUND
        return run

    def _smallest(self) -> Candidate:
        """The smallest peak, of those that no other budget has to do with if they were searched.

        What a search at one budget found by chance may be smaller still, but another search would
        not find it again: the answer has to be one that can be asked for.
        """
        smallest = self._search.smallest or self._search.front.smallest
        while not self._passes(smallest):
            self._search.front.drop(smallest)
            smallest = self._search.front.smallest
        return smallest

    def _searched(self, budget_nbytes: int, run: Run) -> Candidate:
        """The fastest member that fits, else the smallest."""
        run.through(FASTEST, self._search, budget_nbytes)
        fastest = self._search.fastest
        if fastest.peak_nbytes > budget_nbytes or not self._search.fastest_is_proven:
            run.through(AT_BUDGET, self._search, budget_nbytes)
        return self._valid_within(budget_nbytes) or self._smallest()

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
            warnings.warn(
                f"The plan of {member.method!r} is dropped, please report it: {violations[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._checked[id(member)] = member
        return True

    def _plan(self, member: Candidate) -> Plan:
        """A member's plan of the problem that was given."""
        lifted = self._reduction.lift(self._search.indexed.plan(member.steps))
        return without_unread(self.problem, lifted)

    def _solution(
        self, best: Candidate, status: Status, budget_nbytes: int, began: float, run: Run
    ) -> Solution:
        plan = self._plan(best)
        timeline = simulate(self.problem, plan)
        if status is Status.INFEASIBLE and timeline.peak_nbytes <= budget_nbytes:
            status = Status.FEASIBLE
        if status is Status.FEASIBLE and run.left_out:
            status = Status.TIME_LIMIT
        target_us = timeline.time_us / (1 + PROVEN)
        bound_us = self._search.bound_us(max(budget_nbytes, timeline.peak_nbytes), target_us)
        if not holds("bound in us", bound_us, timeline.time_us, strict=self.strict):
            bound_us, status = 0.0, _without_certificate(status)
        elif status is Status.OPTIMAL:
            bound_us = timeline.time_us
        elif status is not Status.INFEASIBLE and bound_us >= target_us:
            status = Status.OPTIMAL
        floor_nbytes = self._search.bounds.floor_nbytes
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
            tried=tuple(dict.fromkeys(run.tried)),
            left_out=tuple(dict.fromkeys(run.left_out)),
        )


def _without_certificate(status: Status) -> Status:
    return status if status is Status.INFEASIBLE else Status.UNPROVEN


def without_unread(problem: Problem, plan: Plan) -> Plan:
    """The plan without runs whose results nobody reads: they cost time, and no one runs them.

    Only what must run stays all the same. A rerun of what the forward need not run is then the
    first run of it.
    """
    pinned = frozenset(problem.outputs)
    wanted: set[str] = set()
    kept: list[str] = []
    for step in reversed(plan.steps):
        op = problem.op_by_name[step.target]
        if wanted.isdisjoint(op.outputs) and not _must_run(step, op, pinned):
            continue
        kept.append(op.name)
        wanted.difference_update(op.outputs)
        wanted.update(name for name in op.inputs if name not in pinned)
    return Plan.of(reversed(kept))


def _must_run(step: Step, op: Op, pinned: frozenset[str]) -> bool:
    is_free = op.phase is Phase.EITHER and pinned.isdisjoint(op.outputs)
    return step.kind is StepKind.FIRST_RUN and not is_free


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


def _require_limits(time_limit_s: float, **factors: float) -> None:
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}: give seconds, 0 or more.")
    for name, factor in factors.items():
        if not 0 <= factor < math.inf:
            raise ValueError(f"{name} is {factor}: give a factor, 0 or more.")


def _require_budget(budget_nbytes: int) -> None:
    if isinstance(budget_nbytes, bool) or not isinstance(budget_nbytes, int):
        raise TypeError(
            f"The budget is {budget_nbytes!r} ({type(budget_nbytes).__name__}): give bytes as int."
        )
    if budget_nbytes < 0:
        raise ValueError(f"The budget is {budget_nbytes} bytes: it cannot be negative.")
