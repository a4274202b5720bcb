"""problem + budget -> Solution: the order of the solver's stages, written once.

Enters: a `Problem` and a budget in bytes. Leaves: a `Solution` whose plan passes `check`, is no
worse than any plan of the portfolio, and carries its proven bound.

The stages: exhaustive search, which ends it for small problems; presolve (`reduce`: all that
follows speaks of the reduced problem, whose peaks are never below the real ones; `_plan` leads
back); simple strategies; the fastest plan (min-cut); priced min-cuts and chain plans, for all
budgets; then for one budget a greedy, chain plans near it, the integer program with peak rows,
local search and rearranging. All plans ever found stay in one Pareto front.
"""

from __future__ import annotations

import math
import time
import warnings

from autoremat_solver._pulp import Answer
from autoremat_solver.bounds import Bounds
from autoremat_solver.check import check
from autoremat_solver.exact import MOST_OPS, ExactSearch, SearchLimit
from autoremat_solver.formulation import Formulation
from autoremat_solver.front import Candidate, Front, arranged, leaner
from autoremat_solver.greedy import greedy_candidate
from autoremat_solver.indexed import index, require_consistent
from autoremat_solver.lazy_rows import LazyRows, Rows
from autoremat_solver.local_search import fill, squeeze
from autoremat_solver.plan import Plan, Solution, Status
from autoremat_solver.portfolio import (
    ChainPlans,
    chain_candidate,
    chain_plans,
    priced_save_sets,
    scaled,
    simple_candidates,
    single_level_candidates,
)
from autoremat_solver.problem import Problem
from autoremat_solver.realise import KEEP
from autoremat_solver.rearrange import lowered, rearranged
from autoremat_solver.reduce import Reduction, reduce
from autoremat_solver.simulate import simulate

PROVEN = 1e-5
GOOD_ENOUGH = 5e-3  # a gap at which the longest search is left out
TRIALS = 120
SEARCH_SHARE = 0.85  # the rest is for the last simulation under way, the bound and the check
LEAST_BOUND_S = 0.3  # for the bound, however late it is
SQUEEZE_STEP = 0.97
CURVE_ENDS_SHARE = 0.3  # of the time for a whole curve, for each of its two ends at most
LEAN_TIME = 1.5  # of the fastest plan's time: what is called slow
SMALLEST_SEARCHES = 6  # whole searches for the smallest peak
SMALLEST_GOAL = 0.6  # of the distance to the floor, for each of them


class Solver:
    """Plans of one problem for many budgets.

    Args:
        problem: the step.
        time_limit_s: wall-clock time for each call of a method; 0 keeps to simple strategies.

    Raises:
        ProblemError: if a value that the backward needs may neither be saved nor recomputed.
    """

    def __init__(self, problem: Problem, *, time_limit_s: float = 30.0) -> None:
        """Simulate the simple strategies."""
        if not time_limit_s >= 0:
            raise ValueError(f"time_limit_s is {time_limit_s}: give seconds, 0 or more.")
        self.problem = problem
        self.time_limit_s = time_limit_s
        require_consistent(index(problem))
        is_small = len(problem.ops) <= MOST_OPS
        self._reduction = Reduction(problem, {}, 0) if is_small else reduce(problem)
        self._indexed = index(self._reduction.problem)
        self._formulation = Formulation(self._indexed)
        self._bounds = Bounds(self._indexed)
        self._exact = ExactSearch.of(self._indexed) if time_limit_s > 0 else None
        self._floor_nbytes = self._bounds.floor_nbytes
        self._front = Front()
        self._chains: list[ChainPlans] = []
        self._fastest: Candidate | None = None
        self._fastest_proven = False
        self._smallest: Candidate | None = None
        self._save_sets: list[frozenset[int]] = []
        self._portfolio: list[Candidate] = []
        self._prepared = False
        self._checked: set[int] = set()
        self._rejected: list[Candidate] = []
        for member in simple_candidates(self._indexed):
            self._front.add(member)

    def solve(self, budget_nbytes: int) -> Solution:
        """The fastest plan found whose peak is at most the budget.

        Args:
            budget_nbytes: bytes live at any step, resident ones included.

        Returns:
            With status INFEASIBLE the plan of the smallest peak found, which is above the budget.

        Raises:
            TypeError: if the budget is no integer.
            ValueError: if it is negative.
        """
        _require_budget(budget_nbytes)
        began = time.monotonic()
        deadline = began + SEARCH_SHARE * self.time_limit_s
        if (exact := self._solve_exactly(budget_nbytes, deadline)) is not None:
            return self._solution(*exact, budget_nbytes, began)
        fastest = self._find_fastest(deadline)
        if self._fastest_proven and self._fits(fastest, budget_nbytes):
            return self._solution(fastest, Status.OPTIMAL, budget_nbytes, began)
        self._prepare(began + 0.4 * self.time_limit_s)
        if budget_nbytes >= self._bounds.floor_nbytes:
            self._search(budget_nbytes, deadline)
        if self._front.fastest_within(budget_nbytes) is None:
            self._find_smallest(deadline)
        best = self._valid_within(budget_nbytes)
        if best is None:
            # What a search at this budget found by chance may be smaller still, but another
            # search would not find it again: the answer has to be one that can be asked for.
            smallest = self._find_smallest(deadline)
            while not self._passes(smallest):
                self._front.drop(smallest)
                smallest = self._front.smallest
            return self._solution(smallest, Status.INFEASIBLE, budget_nbytes, began)
        in_time = time.monotonic() < deadline
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        return self._solution(best, status, budget_nbytes, began)

    def smallest_peak(self) -> Solution:
        """The plan of the smallest peak found; the budgets asked for before do not matter."""
        began = time.monotonic()
        deadline = began + SEARCH_SHARE * self.time_limit_s
        if (exact := self._solve_exactly(None, deadline)) is not None:
            return self._solution(*exact, exact[0].peak_nbytes, began)
        self._find_fastest(deadline)
        self._prepare(began + 0.5 * self.time_limit_s)
        peak = self._find_smallest(deadline).peak_nbytes
        self._search(peak, deadline)
        smallest = self._valid_within(peak) or self._find_smallest(deadline)
        in_time = time.monotonic() < deadline
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        return self._solution(smallest, status, smallest.peak_nbytes, began)

    def fastest(self) -> Solution:
        """The plan of the smallest time under no budget; ties go to the smaller peak."""
        began = time.monotonic()
        best = self._find_fastest(began + self.time_limit_s)
        in_time = time.monotonic() < began + self.time_limit_s
        status = Status.FEASIBLE if in_time else Status.TIME_LIMIT
        status = Status.OPTIMAL if self._fastest_proven else status
        return self._solution(best, status, best.peak_nbytes, began)

    def pareto(self, points: int = 12) -> list[Solution]:
        """The plans from the smallest peak to the fastest one, none beaten in peak and time.

        Budgets spread evenly over the peaks in between are solved one after the other, and each
        may use what the others found. All of it together keeps to the time limit; what is left
        of it is shared evenly, and budgets that it does not reach are left out.

        Args:
            points: budgets, the two ends included; at least 2.

        Returns:
            At most `points` solutions, the smallest peak first.

        Raises:
            ValueError: if there are fewer than 2 points.
        """
        if points < 2:
            raise ValueError(f"points is {points}: a curve has two ends, give 2 or more.")
        limit_s, began = self.time_limit_s, time.monotonic()
        try:
            self.time_limit_s = CURVE_ENDS_SHARE * limit_s
            found = [self.fastest(), self.smallest_peak()]
            high, low = (solution.timeline.peak_nbytes for solution in found)
            for left in range(points - 2, 0, -1):
                left_s = began + limit_s - time.monotonic()
                if left_s <= 0:
                    break
                self.time_limit_s = left_s / left
                found.append(self.solve(low + (high - low) * left // (points - 1)))
        finally:
            self.time_limit_s = limit_s
        return _unbeaten(found)

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
                steps = self._exact.smallest(self._front.smallest.peak_nbytes, deadline)
        except SearchLimit:
            self._exact = None
            return None
        new = arranged(self._indexed, steps, "exhaustive search")
        if is_smallest:
            self._floor_nbytes = new.peak_nbytes
        self._add(new)
        return (new, status) if self._passes(new) else None

    def _add(self, new: Candidate) -> None:
        self._front.add(new)

    def _find_fastest(self, deadline: float) -> Candidate:
        if self._fastest is None and time.monotonic() < deadline:
            self._save_sets = priced_save_sets(self._formulation, deadline)
            for saved in self._save_sets:
                for new in single_level_candidates(self._indexed, saved):
                    self._add(new)
            if self._save_sets:
                self._fastest = self._front.members[-1]
                unlimited = sum(self._indexed.nbytes) * 2 + self.problem.resident_nbytes
                bound = self._bounds.time_us(unlimited, deadline - time.monotonic())
                self._fastest_proven = self._fastest.time_us <= bound * (1 + PROVEN)
        if self._fastest is None or not self._fastest_proven:
            return self._front.members[-1]
        return self._fastest

    def _prepare(self, deadline: float) -> None:
        """Plans for all budgets; once."""
        if self._prepared or time.monotonic() >= deadline:
            return
        self._prepared = True
        for chain in chain_plans(self._indexed, self._save_sets, deadline):
            self._chains.append(chain)
            for new in chain.candidates(self._indexed):
                self._add(new)
                if time.monotonic() >= deadline:
                    break
        self._portfolio = self._front.members

    def _search(self, budget_nbytes: int, deadline: float) -> None:
        """Plans for one budget."""
        began = time.monotonic()
        left = deadline - began
        if sum(self._at_budget(chain, budget_nbytes) for chain in self._chains):
            return
        self._add(greedy_candidate(self._indexed, budget_nbytes, deadline=began + 0.1 * left))
        for chain in self._chains:
            self._near_budget(chain, budget_nbytes, time.monotonic() + 0.1 * left)
        retentions = [("ILP", KEEP)]
        retentions += [(f"ILP, {c.name}", c.per_block) for c in self._chains[:2]]
        solved: dict[Rows, Answer] = {}
        for label, retention in retentions:
            rows = LazyRows(self._formulation, retention, label, solved)
            known = self._front.fastest_within(budget_nbytes)
            for new in rows.candidates(
                budget_nbytes,
                rounds=12,
                integer_s=0.05 * left,
                deadline=time.monotonic() + 0.2 * left,
                known_us=math.inf if known is None else known.time_us,
            ):
                self._add(new)
        self._polish(budget_nbytes, deadline)
        best = self._front.fastest_within(budget_nbytes)
        if best is None or not self._is_close(best, budget_nbytes, 0.1 * left):
            self._rearrange(budget_nbytes, deadline)

    def _is_close(self, best: Candidate, budget_nbytes: int, limit_s: float) -> bool:
        """Whether the longest search could win too little to be worth its time."""
        target_us = best.time_us / (1 + GOOD_ENOUGH)
        return self._bounds.time_us(budget_nbytes, limit_s, target_us=target_us) >= target_us

    def _at_budget(self, chain: ChainPlans, budget_nbytes: int) -> bool:
        """The chain plan of exactly this budget; whether it leaves nothing to search for."""
        table = chain.table_for(budget_nbytes)
        if table is None or table.smallest_slot() > table.slots:
            return False
        new = chain_candidate(self._indexed, table, table.slots, chain.name)
        self._add(new)
        return chain.is_plain and new.peak_nbytes <= budget_nbytes

    def _near_budget(self, chain: ChainPlans, budget_nbytes: int, deadline: float) -> None:
        """The chain plans whose exact peak is just within the budget, by bisection."""
        for table in chain.tables:
            slots = table.distinct_slots()
            low, high = 0, len(slots) - 1
            while low <= high and time.monotonic() < deadline:
                middle = (low + high) // 2
                new = chain_candidate(self._indexed, table, slots[middle], chain.name)
                self._add(new)
                if new.peak_nbytes <= budget_nbytes:
                    low = middle + 1
                else:
                    high = middle - 1

    def _polish(self, budget_nbytes: int, deadline: float) -> None:
        """Squeeze the nearest plans above the budget, fill the best ones below it."""
        trials = scaled(TRIALS, self._indexed)
        above = [m for m in self._front.above(budget_nbytes) if m.saved is not None]
        for start in above[:2]:
            new = squeeze(
                self._indexed, start, budget_nbytes, trials=trials // 3, deadline=deadline
            )
            if new is not None:
                self._add(new)
        fitting = [m for m in self._front.members if m.peak_nbytes <= budget_nbytes]
        for start in [m for m in fitting if m.saved is not None][:-4:-1]:
            self._add(fill(self._indexed, start, budget_nbytes, trials=trials, deadline=deadline))

    def _rearrange(self, budget_nbytes: int, deadline: float) -> None:
        """Repair and improve the best plans below the budget and the nearest ones above it."""
        fitting = [m for m in self._front.members if m.peak_nbytes <= budget_nbytes]
        starts = [*fitting[:-3:-1], *self._front.above(budget_nbytes)[:3]]
        schedules = [m.steps for m in starts]
        for steps in rearranged(self._indexed, schedules, budget_nbytes, deadline=deadline):
            self._add(arranged(self._indexed, steps, "rearranged"))

    def _find_smallest(self, deadline: float) -> Candidate:
        """The smallest peak reached by the portfolio, squeezing it, and lower and lower goals.

        Cached. It starts from the portfolio, so the budgets asked for before do not matter.
        """
        if self._smallest is None:
            if not self._prepared:
                return self._squeezed(self._front.smallest, deadline)
            best = self._from_lean_plan(deadline)
            best = leaner(best, self._squeezed(self._portfolio[0], deadline))
            for chain in self._chains:
                if chain.is_plain:
                    best = self._smallest_of_chain(chain, best)
            searches = 0 if any(chain.is_plain for chain in self._chains) else SMALLEST_SEARCHES
            for _ in range(searches):
                lower = self._searched_below(best, SMALLEST_GOAL, deadline)
                lower = lower or self._searched_below(best, 1.0, deadline)
                if lower is None:
                    break
                best = self._squeezed(lower, deadline)
            self._smallest = best
        return self._smallest

    def _from_lean_plan(self, deadline: float) -> Candidate:
        """The lowest peak reached from the leanest plan that is not slow yet.

        The leanest plan of all may recompute on many levels. Starting below it where little is
        recomputed gives nearly the same peak in a fraction of the time.
        """
        most_us = LEAN_TIME * self._portfolio[-1].time_us
        start = next(m for m in self._portfolio if m.time_us <= most_us)
        half = time.monotonic() + 0.5 * (deadline - time.monotonic())
        steps = lowered(self._indexed, start.steps, self._bounds.floor_nbytes, deadline=half)
        lower = arranged(self._indexed, steps, "rearranged")
        self._add(lower)
        return lower

    def _smallest_of_chain(self, chain: ChainPlans, best: Candidate) -> Candidate:
        """The smallest peak of a chain's exact tables, or the plan given, by bisection."""
        low, high = self._bounds.floor_nbytes, best.peak_nbytes
        while low < high:
            middle = (low + high) // 2
            self._at_budget(chain, middle)
            new = self._front.fastest_within(middle)
            if new is None:
                low = middle + 1
            else:
                best, high = new, new.peak_nbytes
        return best

    def _squeezed(self, best: Candidate, deadline: float) -> Candidate:
        while best.peak_nbytes > self._bounds.floor_nbytes:
            goal = max(self._bounds.floor_nbytes, int(best.peak_nbytes * SQUEEZE_STEP))
            new = None
            if best.saved is not None:
                new = squeeze(self._indexed, best, goal, trials=TRIALS, deadline=deadline)
            if new is None:
                break
            best = new
        floor = self._bounds.floor_nbytes
        steps = lowered(self._indexed, best.steps, floor, deadline=deadline)
        lower = arranged(self._indexed, steps, "rearranged")
        for new in (best, lower):
            self._add(new)
        return lower if lower.peak_nbytes < best.peak_nbytes else best

    def _searched_below(self, best: Candidate, share: float, deadline: float) -> Candidate | None:
        """A plan below a peak that a search finds at that share of its distance to the floor."""
        above_floor = best.peak_nbytes - self._bounds.floor_nbytes
        if above_floor <= 0 or time.monotonic() >= deadline:
            return None
        goal = self._bounds.floor_nbytes + int(above_floor * share)
        others, self._front = self._front, Front()
        try:
            self._search(goal, deadline)
            found = self._front.members
        finally:
            self._front = others
        for new in found:
            self._add(new)
        lower = found[0] if found else None
        return lower if lower is not None and lower.peak_nbytes < best.peak_nbytes else None

    def _valid_within(self, budget_nbytes: int) -> Candidate | None:
        """The fastest member that fits and passes the independent check."""
        slack_nbytes = self._reduction.slack_nbytes
        near = [m for m in self._front.members if m.peak_nbytes <= budget_nbytes + slack_nbytes]
        for member in reversed(near):
            if self._fits(member, budget_nbytes):
                if self._passes(member):
                    return member
                self._front.drop(member)
        return None

    def _fits(self, member: Candidate, budget_nbytes: int) -> bool:
        """Whether the plan's real peak is within the budget; the reduced one may be just above."""
        if member.peak_nbytes <= budget_nbytes:
            return True
        if member.peak_nbytes > budget_nbytes + self._reduction.slack_nbytes:
            return False
        return simulate(self.problem, self._plan(member)).peak_nbytes <= budget_nbytes

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
        return self._reduction.lift(Plan(self._indexed.names(member.steps)))

    def _solution(
        self, best: Candidate, status: Status, budget_nbytes: int, began: float
    ) -> Solution:
        plan = self._plan(best)
        timeline = simulate(self.problem, plan)
        if status is Status.INFEASIBLE and timeline.peak_nbytes <= budget_nbytes:
            status = Status.FEASIBLE
        slack_nbytes = self._reduction.slack_nbytes
        limit = max(budget_nbytes, timeline.peak_nbytes) + slack_nbytes
        left_s = began + self.time_limit_s - time.monotonic()
        bound_s = max(LEAST_BOUND_S, min(0.2 * self.time_limit_s, left_s))
        bound_us = self._bounds.time_us(limit, bound_s, target_us=timeline.time_us / (1 + PROVEN))
        proven = status is Status.OPTIMAL
        bound_us = timeline.time_us if proven else min(bound_us, timeline.time_us)
        if status is Status.FEASIBLE and timeline.time_us <= bound_us * (1 + PROVEN):
            status = Status.OPTIMAL
        return Solution(
            plan=plan,
            timeline=timeline,
            status=status,
            bound_us=bound_us,
            floor_nbytes=self._floor_nbytes - slack_nbytes,
            method=best.method,
            seconds=time.monotonic() - began,
        )


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
