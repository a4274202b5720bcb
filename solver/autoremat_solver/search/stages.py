"""The stages over one problem: for all budgets first, then for one budget at a time.

Enters: an `Indexed` problem. Leaves: candidates in a Pareto front, which keeps all that no other
one beats. The stages for all budgets: simple strategies, the fastest plan (min-cut), priced
min-cuts, chain plans. For one budget: a greedy, chain plans near it, the integer program with peak
rows, local search and rearranging.
"""

from __future__ import annotations

import copy
import math
import time

from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, Front, arranged
from autoremat_solver.plans.greedy import greedy_candidate
from autoremat_solver.plans.local_search import fill, squeeze
from autoremat_solver.plans.realise import KEEP
from autoremat_solver.program._pulp import Answer
from autoremat_solver.program.formulation import Formulation
from autoremat_solver.program.lazy_rows import LazyRows, Rows
from autoremat_solver.search.portfolio import (
    ChainPlans,
    chain_candidate,
    chain_plans,
    priced_save_sets,
    scaled,
    simple_candidates,
    single_level_candidates,
)
from autoremat_solver.search.rearrange import rearranged

PROVEN = 1e-5
CLOSE_EFFORT = 0.25  # for the bound that decides it
GOOD_ENOUGH = 5e-3  # a gap at which the longest search is left out
TRIALS = 120


class Search:
    """All plans found for one problem, and the stages that find them.

    Attributes:
        indexed: the problem.
        bounds: what no plan can beat.
        front: the plans found so far.
        chains: the cuttings into blocks; none before `prepare`.
        portfolio: the front as the stages for all budgets left it; empty before `prepare`.
        is_prepared: whether `prepare` ran.
        fastest_is_proven: whether no plan under any budget is faster than `find_fastest`'s.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Simulate the simple strategies."""
        self.indexed = indexed
        self.bounds = Bounds(indexed)
        self.front = Front()
        self.chains: list[ChainPlans] = []
        self.portfolio: list[Candidate] = []
        self.is_prepared = False
        self.fastest_is_proven = False
        self._formulation = Formulation(indexed)
        self._save_sets: list[frozenset[int]] = []
        self._fastest: Candidate | None = None
        for member in simple_candidates(indexed):
            self.front.add(member)

    def apart(self) -> Search:
        """The same search with an empty front: what it finds depends on no earlier budget."""
        other = copy.copy(self)
        other.front = Front()
        return other

    def find_fastest(self, deadline: float) -> Candidate:
        """The fastest plan under no budget; once."""
        if self._fastest is None and time.monotonic() < deadline:
            self._save_sets = priced_save_sets(self._formulation, deadline)
            for saved in self._save_sets:
                for new in single_level_candidates(self.indexed, saved):
                    self.front.add(new)
            if self._save_sets:
                self._fastest = self.front.members[-1]
                unlimited = sum(self.indexed.nbytes) * 2 + self.indexed.problem.resident_nbytes
                bound = self.bounds.time_us(unlimited)
                self.fastest_is_proven = self._fastest.time_us <= bound * (1 + PROVEN)
        if self._fastest is None or not self.fastest_is_proven:
            return self.front.members[-1]
        return self._fastest

    def prepare(self, deadline: float) -> None:
        """Plans for all budgets; once."""
        if self.is_prepared or time.monotonic() >= deadline:
            return
        self.is_prepared = True
        for chain in chain_plans(self.indexed, self._save_sets, deadline):
            self.chains.append(chain)
            for new in chain.candidates(self.indexed):
                self.front.add(new)
                if time.monotonic() >= deadline:
                    break
        self.portfolio = self.front.members

    @property
    def plain_chains(self) -> list[ChainPlans]:
        """The cuttings in which nothing but the exact tables has to be looked at."""
        return [chain for chain in self.chains if chain.is_plain]

    def at_budget(self, budget_nbytes: int, deadline: float) -> None:
        """Plans for one budget."""
        began = time.monotonic()
        left = deadline - began
        if sum(self.from_chain(chain, budget_nbytes) for chain in self.chains):
            return
        self.front.add(greedy_candidate(self.indexed, budget_nbytes, deadline=began + 0.1 * left))
        for chain in self.chains:
            self._near_budget(chain, budget_nbytes, time.monotonic() + 0.1 * left)
        retentions = [("ILP", KEEP)]
        retentions += [(f"ILP, {c.name}", c.per_block) for c in self.chains[:2]]
        solved: dict[Rows, Answer] = {}
        for label, retention in retentions:
            rows = LazyRows(self._formulation, retention, label, solved)
            known = self.front.fastest_within(budget_nbytes)
            for new in rows.candidates(
                budget_nbytes,
                rounds=12,
                integer_s=0.05 * left,
                deadline=time.monotonic() + 0.2 * left,
                known_us=math.inf if known is None else known.time_us,
            ):
                self.front.add(new)
        self._polish(budget_nbytes, deadline)
        best = self.front.fastest_within(budget_nbytes)
        if best is None or not self._is_close(best, budget_nbytes):
            self.rearrange(budget_nbytes, deadline)

    def from_chain(self, chain: ChainPlans, budget_nbytes: int) -> bool:
        """The chain plan of exactly this budget; whether it leaves nothing to search for."""
        table = chain.table_for(budget_nbytes)
        if table is None or table.smallest_slot() > table.slots:
            return False
        new = chain_candidate(self.indexed, table, table.slots, chain.name)
        self.front.add(new)
        return chain.is_plain and new.peak_nbytes <= budget_nbytes

    def _near_budget(self, chain: ChainPlans, budget_nbytes: int, deadline: float) -> None:
        """The chain plans whose exact peak is just within the budget, by bisection."""
        for table in chain.tables:
            slots = table.distinct_slots()
            low, high = 0, len(slots) - 1
            while low <= high and time.monotonic() < deadline:
                middle = (low + high) // 2
                new = chain_candidate(self.indexed, table, slots[middle], chain.name)
                self.front.add(new)
                if new.peak_nbytes <= budget_nbytes:
                    low = middle + 1
                else:
                    high = middle - 1

    def _polish(self, budget_nbytes: int, deadline: float) -> None:
        """Squeeze the nearest plans above the budget, fill the best ones below it."""
        trials = scaled(TRIALS, self.indexed)
        above = [m for m in self.front.above(budget_nbytes) if m.saved is not None]
        for start in above[:2]:
            new = squeeze(self.indexed, start, budget_nbytes, trials=trials // 3, deadline=deadline)
            if new is not None:
                self.front.add(new)
        fitting = [m for m in self.front.members if m.peak_nbytes <= budget_nbytes]
        for start in [m for m in fitting if m.saved is not None][:-4:-1]:
            self.front.add(
                fill(self.indexed, start, budget_nbytes, trials=trials, deadline=deadline)
            )

    def rearrange(self, budget_nbytes: int, deadline: float) -> None:
        """Repair and improve the best plans below the budget and the nearest ones above it."""
        fitting = [m for m in self.front.members if m.peak_nbytes <= budget_nbytes]
        starts = [*fitting[:-3:-1], *self.front.above(budget_nbytes)[:3]]
        schedules = [m.steps for m in starts]
        for steps in rearranged(self.indexed, schedules, budget_nbytes, deadline=deadline):
            self.front.add(arranged(self.indexed, steps, "rearranged"))

    def _is_close(self, best: Candidate, budget_nbytes: int) -> bool:
        """Whether the longest search could win too little to be worth its time."""
        target_us = best.time_us / (1 + GOOD_ENOUGH)
        bound = self.bounds.time_us(budget_nbytes, effort=CLOSE_EFFORT, target_us=target_us)
        return bound >= target_us
