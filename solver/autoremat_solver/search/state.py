"""What is known of one problem while it is searched: the plans found, and what they rest on.

Enters: an `Indexed` problem. Leaves: a `Search`, which the stages of `stages` fill. It knows no
stage, and no clock.
"""

from __future__ import annotations

import copy

from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, Front
from autoremat_solver.problem import Phase
from autoremat_solver.program.formulation import Formulation
from autoremat_solver.program.lazy_rows import LazyRows
from autoremat_solver.search.portfolio import ChainPlans, simple_candidates

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
        portfolio: the front as the stages for all budgets left it; empty before they ran.
        smallest: the plan of the smallest peak; None before it was searched for.
        rows: the integer program of the budget that is being worked on.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Simulate the simple strategies."""
        self.indexed = indexed
        self.bounds = Bounds(indexed)
        self.formulation = Formulation(indexed)
        self.front = Front()
        self.save_sets: list[frozenset[int]] = []
        self.chains: list[ChainPlans] = []
        self.portfolio: list[Candidate] = []
        self.smallest: Candidate | None = None
        self.rows: LazyRows | None = None
        self._fastest_is_proven: bool | None = None
        for member in simple_candidates(indexed):
            self.front.add(member)

    def apart(self) -> Search:
        """The same search with the plans for all budgets only: no other budget matters to it."""
        other = copy.copy(self)
        other.front = Front()
        for member in self.portfolio:
            other.front.add(member)
        return other

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

    @property
    def plain_chains(self) -> list[ChainPlans]:
        """The cuttings in which nothing but the exact tables has to be looked at."""
        return [chain for chain in self.chains if chain.is_plain]

    def is_lean(self, budget_nbytes: int) -> bool:
        """Whether the budget lies below all plans for all budgets.

        Never in a graph without phases: plans for all budgets keep the given order there, and
        another order may reach the budget without any rerun.
        """
        if not self.portfolio or self.plain_chains or Phase.ANY in self.indexed.phase:
            return False
        return budget_nbytes < self.portfolio[0].peak_nbytes

    def bound_us(self, budget_nbytes: int, target_us: float) -> float:
        """No plan within the budget takes less; stops at the target."""
        return self.bounds.time_us(budget_nbytes, float("inf"), target_us=target_us)
