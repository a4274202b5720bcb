"""What is known of one problem while it is searched: the plans found, and what they rest on.

Enters: an `Indexed` problem. Leaves: a `Search`, which the stages of `stages` fill. It knows no
stage, and no clock.
"""

from __future__ import annotations

import copy
from functools import cached_property

from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, Front
from autoremat_solver.problem import Phase
from autoremat_solver.program.formulation import Formulation
from autoremat_solver.program.lazy_rows import LazyRows
from autoremat_solver.search.portfolio import ChainPlans, plain_chains, simple_candidates

PROVEN = 1e-5


class Search:
    """All plans found for one problem.

    Attributes:
        indexed: the problem.
        bounds: what no plan can beat.
        formulation: its integer program.
        front: the plans found so far.
        save_sets: those of the priced min-cuts, the fastest plan's first.
        chains: the cuttings into blocks.
        has_chains: whether they were looked for.
        portfolio: the plans that no budget has to do with: those of the simple strategies, the
            min-cuts and the chains.
        smallest: the plan of the smallest peak; None before it was searched for.
        lean: the search that found it, which knows of no budget, until that plan is made faster.
        rows: the integer program of the budget that is being worked on.
        bound_effort: for bounds, as a share of the usual.
        good_enough: a gap at which the longer searches are left out, whatever the problem.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Simulate the simple strategies."""
        self.indexed = indexed
        self.bounds = Bounds(indexed)
        self.formulation = Formulation(indexed)
        self.front = Front()
        self.save_sets: list[frozenset[int]] = []
        self.chains: list[ChainPlans] = []
        self.has_chains = False
        self.portfolio = Front()
        self.smallest: Candidate | None = None
        self.lean: Search | None = None
        self.rows: LazyRows | None = None
        self.bound_effort = 1.0
        self.good_enough = 0.0
        self._fastest_is_proven: bool | None = None
        for member in simple_candidates(indexed):
            self.add_lasting(member)

    def add_lasting(self, new: Candidate) -> None:
        """Add a plan that no budget has to do with."""
        self.portfolio.add(new)
        self.front.add(new)

    def apart(self) -> Search:
        """The same search with the portfolio only: no other budget matters to it."""
        other = copy.copy(self)
        other.front = copy.copy(self.portfolio)
        return other

    def take_over(self, other: Search) -> None:
        """Add what another search has found."""
        for member in other.front.members:
            self.front.add(member)

    @property
    def fastest(self) -> Candidate:
        """The fastest plan found."""
        return self.front.members[-1]

    @property
    def fastest_is_proven(self) -> bool:
        """Whether no plan under any budget is faster than the min-cut's."""
        if self._fastest_is_proven is None and self.save_sets:
            unlimited = sum(self.indexed.nbytes) * 2 + self.indexed.problem.resident_nbytes
            target_us = self.fastest.time_us / (1 + PROVEN)
            self._fastest_is_proven = self.bound_us(unlimited, target_us) >= target_us
        return bool(self._fastest_is_proven)

    @cached_property
    def plain_chains(self) -> list[ChainPlans]:
        """The cuttings in which nothing but the exact tables has to be looked at."""
        return list(plain_chains(self.indexed))

    def is_lean(self, budget_nbytes: int) -> bool:
        """Whether the budget lies below all plans for all budgets.

        Never in a graph without phases: plans for all budgets keep the given order there, and
        another order may reach the budget without any rerun.
        """
        if not self.chains or self.plain_chains or Phase.ANY in self.indexed.phase:
            return False
        return budget_nbytes < self.portfolio.smallest.peak_nbytes

    def bound_us(self, budget_nbytes: int, target_us: float) -> float:
        """No plan within the budget takes less; stops at the target."""
        return self.bounds.time_us(budget_nbytes, effort=self.bound_effort, target_us=target_us)
