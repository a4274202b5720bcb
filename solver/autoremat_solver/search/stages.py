"""The stages of a search, in their order.

Enters: a `Search`, a budget, and what cuts the list off. Leaves: more candidates in its front. Each
stage has an effort that is counted, so what it finds depends on the problem, the budget and the
stages before it, and on nothing else. The clock is asked between stages only; `Run.left_out` says
which ones it left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoremat_solver.effort import CutOff, Effort
from autoremat_solver.plans.front import arranged
from autoremat_solver.problem import Phase
from autoremat_solver.program.lazy_rows import LazyRows
from autoremat_solver.search.anneal import annealed
from autoremat_solver.search.portfolio import (
    chain_candidate,
    chain_plans,
    priced_save_sets,
    single_level_candidates,
)
from autoremat_solver.search.rearrange import rearranged
from autoremat_solver.search.smallest import smallest_candidate
from autoremat_solver.search.state import Search

# A gap at which the longer searches are left out; it grows with the problem: they gain less there.
GOOD_ENOUGH, MOST_GAP = 1e-3, 1e-2
MEDIUM = 750  # operations up to which the first one holds
SMALL = 600  # operations of a problem that gets a stage's effort; others get it in proportion
LEAST, MOST = 0.03, 3.0  # times a stage's effort, that any problem gets
BASINS = 3  # starts that are rearranged, next to the budget
STEPS_OF_REPAIR = 250  # times the operations that may be simulated for one of them, at least
GOALS, GOAL = 3, 0.8  # that free orders are annealed for, each so much of the smallest peak so far
SPREAD = 8  # starts that are rearranged, from all over what is above it


@dataclass(frozen=True)
class Stage:
    """One way to find plans.

    Attributes:
        name: what tables and solutions call it.
        does: in a few words.
        find: adds what it finds to the search's front.
        operations: its effort: so many operations may be simulated.
        is_wanted: whether it can help at a budget at all.
    """

    name: str
    does: str
    find: Callable[[Search, int, Effort], None]
    operations: int = 0
    is_wanted: Callable[[Search, int], bool] = lambda search, budget_nbytes: True


@dataclass
class Run:
    """One run of stages.

    Attributes:
        cut_off: asked before each stage.
        effort: factor of every stage's effort.
        without: names of stages to leave out.
        tried: the stages that ran.
        left_out: the stages that did not, because it was late.
    """

    cut_off: CutOff
    effort: float = 1.0
    without: frozenset[str] = frozenset()
    tried: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def through(self, stages: Iterable[Stage], search: Search, budget_nbytes: int) -> None:
        """Run the stages that are wanted."""
        share = self.effort * max(LEAST, min(MOST, len(search.indexed.phase) / SMALL))
        for stage in stages:
            if stage.name in self.without or not stage.is_wanted(search, budget_nbytes):
                continue
            if self.cut_off.is_over:
                self.left_out.append(stage.name)
                continue
            stage.find(search, budget_nbytes, Effort(int(share * stage.operations)))
            self.tried.append(stage.name)


def _price(search: Search, budget_nbytes: int, effort: Effort) -> None:
    search.save_sets = priced_save_sets(search.formulation)
    for saved in search.save_sets:
        for new in single_level_candidates(search.indexed, saved):
            search.add_lasting(new)


def _cut_into_chains(search: Search, budget_nbytes: int, effort: Effort) -> None:
    search.has_chains = True
    for chain in chain_plans(search.indexed, search.save_sets):
        search.chains.append(chain)
        for new in chain.candidates(search.indexed):
            search.add_lasting(new)


def _look_up(search: Search, budget_nbytes: int, effort: Effort) -> None:
    for chain in search.plain_chains:
        table = chain.table_for(budget_nbytes)
        if table is not None and table.smallest_slot() <= table.slots:
            search.front.add(chain_candidate(search.indexed, table, table.slots, chain.name))


def _relax(search: Search, budget_nbytes: int, effort: Effort) -> None:
    search.rows = LazyRows(search.formulation, budget_nbytes)
    for new in search.rows.by_relaxation():
        search.front.add(new)


def _solve_integers(search: Search, budget_nbytes: int, effort: Effort) -> None:
    if search.rows is None or search.rows.budget_nbytes != budget_nbytes:
        return
    known = search.front.fastest_within(budget_nbytes)
    known_us = math.inf if known is None else known.time_us
    for new in search.rows.by_integers(known_us):
        search.front.add(new)


def _find_smallest(search: Search, budget_nbytes: int, effort: Effort) -> None:
    search.lean = search.apart()
    search.smallest = smallest_candidate(search.lean, effort)
    search.take_over(search.lean)


def _anneal_smallest(search: Search, budget_nbytes: int, effort: Effort) -> None:
    """What annealing comes to at a goal out of reach is lower, too; the budget has no say in it."""
    if search.lean is None or search.smallest is None:
        return
    resident_nbytes = search.indexed.problem.resident_nbytes
    for left in range(GOALS, 0, -1):
        goal_nbytes = resident_nbytes + int(GOAL * (search.smallest.peak_nbytes - resident_nbytes))
        _anneal(search.lean, goal_nbytes, effort.part(1 / left))
        search.smallest = search.lean.front.smallest
    search.take_over(search.lean)


def _quicken_smallest(search: Search, budget_nbytes: int, effort: Effort) -> None:
    """Apart from other budgets too: the plan may be lower, and its peak is one to ask for."""
    if search.lean is None or search.smallest is None:
        return
    peak_nbytes = search.smallest.peak_nbytes
    _rearrange(search.lean, peak_nbytes, effort)
    search.smallest = search.lean.front.fastest_within(peak_nbytes)
    search.take_over(search.lean)
    search.lean = None


def _rearrange(search: Search, budget_nbytes: int, effort: Effort) -> None:
    """Repair and improve plans from all over the front: the best ones need not lead to the best."""
    members = search.front.members
    fitting = [m for m in members if m.peak_nbytes <= budget_nbytes][:-BASINS:-1]
    above = search.front.above(budget_nbytes)
    count = min(SPREAD, effort.operations // (STEPS_OF_REPAIR * len(search.indexed.phase) + 1))
    apart = max(1, len(above) // max(1, count))
    starts = dict.fromkeys([*map(id, fitting), *map(id, above[:BASINS]), *map(id, above[::apart])])
    schedules = [m.steps for m in members if id(m) in starts]
    for steps in rearranged(search.indexed, schedules, budget_nbytes, effort):
        search.front.add(arranged(search.indexed, steps, "rearranged"))


def _anneal(search: Search, budget_nbytes: int, effort: Effort) -> None:
    indexed, members = search.indexed, search.front.members
    schedules = [m.steps for m in members]
    for steps in annealed(indexed, schedules, budget_nbytes, effort):
        search.front.add(arranged(indexed, steps, "annealed"))


def _may_gain(search: Search, budget_nbytes: int) -> bool:
    """Whether a plan within the budget may be there, and tables of a plain chain gave none."""
    if search.plain_chains and search.front.fastest_within(budget_nbytes) is not None:
        return False
    return budget_nbytes >= search.bounds.floor_nbytes


def _is_open(search: Search, budget_nbytes: int) -> bool:
    """Whether a plan within the budget may be there that is faster by more than next to nothing."""
    if not _may_gain(search, budget_nbytes):
        return False
    best = search.front.fastest_within(budget_nbytes)
    if best is None:
        return True
    enough = GOOD_ENOUGH * max(1.0, len(search.indexed.phase) / MEDIUM)
    target_us = best.time_us / (1 + max(search.good_enough, min(enough, MOST_GAP)))
    return search.bound_us(budget_nbytes, target_us) < target_us


def _is_free(search: Search, budget_nbytes: int) -> bool:
    """Whether the order of first runs is free, and another plan could be better."""
    return Phase.ANY in search.indexed.phase and _is_open(search, budget_nbytes)


def _is_unpriced(search: Search, budget_nbytes: int) -> bool:
    return not search.save_sets


def _is_uncut(search: Search, budget_nbytes: int) -> bool:
    """Whether there are no chains yet, and something would be gained by them."""
    if search.has_chains or search.plain_chains:
        return False
    is_met = search.front.fastest_within(budget_nbytes) is not None
    return not is_met or _is_open(search, budget_nbytes)


def _is_plain(search: Search, budget_nbytes: int) -> bool:
    return bool(search.plain_chains)


def _needs_smallest(search: Search, budget_nbytes: int) -> bool:
    """What the search for the smallest peak passes on its way is the best to begin with."""
    if search.smallest is not None:
        return False
    is_met = search.front.fastest_within(budget_nbytes) is not None
    return not is_met or (search.is_lean(budget_nbytes) and _is_open(search, budget_nbytes))


def _is_refused(search: Search, budget_nbytes: int) -> bool:
    """Whether the smallest peak is what there is to offer; tables of a plain chain are exact."""
    if search.lean is None or search.plain_chains:
        return False
    return search.front.fastest_within(budget_nbytes) is None


def _is_refused_and_free(search: Search, budget_nbytes: int) -> bool:
    return Phase.ANY in search.indexed.phase and _is_refused(search, budget_nbytes)


FASTEST = (Stage("prices", "min-cuts at seven prices of memory", _price, 0, _is_unpriced),)
CHAINS = Stage("chains", "dynamic programs over chains of blocks", _cut_into_chains, 0, _is_uncut)
SMALLEST = Stage(
    "smallest", "the smallest peak, step by step", _find_smallest, 4_500_000, _needs_smallest
)
LOWER = Stage(
    "anneal smallest", "free orders, lower", _anneal_smallest, 30_000_000, _is_refused_and_free
)
QUICKEN = Stage(
    "quicken smallest", "ruin and repair at that peak", _quicken_smallest, 18_000_000, _is_refused
)
LEANEST = (CHAINS, SMALLEST, LOWER, QUICKEN)
AT_BUDGET = (
    Stage("plain chain", "binomial checkpointing, if the step is a chain", _look_up, 0, _is_plain),
    Stage("relaxations", "the program with peak rows, rounded", _relax, 0, _may_gain),
    Stage("integers", "the program with peak rows, solved", _solve_integers, 0, _may_gain),
    CHAINS,
    Stage("anneal", "free orders, move by move", _anneal, 30_000_000, _is_free),
    Stage("anneal more", "the same, from the best so far", _anneal, 100_000_000, _is_free),
    SMALLEST,
    LOWER,
    QUICKEN,
    Stage("rearrange", "ruin and repair", _rearrange, 6_000_000, _is_open),
)
STAGES = (*FASTEST, *AT_BUDGET)
