"""The cheapest plan of a small problem, by exhaustive search: proven, not bounded.

Enters: an `Indexed` problem and a budget. Leaves: the cheapest schedule within the budget, or the
proof that there is none, or `SearchLimit` if the problem is too large for it. The class of plans
is all that `check` accepts.

A* over states, which are what ran and what is held: `phases` has those of a step with a
forward and a backward, `order` those of a graph without phases. Three facts keep the states
few, and lose no plan:

- A value need not be dropped before its bytes are wanted. So everything is held until an operation
  does not fit, and then one least set of held values goes: a branch for each such set.
- What remaining operations read and nobody holds must be made again, and so must what that reads:
  the time of these runs is a lower bound on what is to come, whatever the budget.
- Who holds more can let go: a state is of no use if another one in which the same ran holds all
  that it holds, and costs no more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase
from autoremat_solver.simulate import measure

from tests.solver.exact.order import UnphasedStates
from tests.solver.exact.phases import PhasedStates

MOST_OPS = 28
MOST_STATES = 10_000


class SearchLimit(Exception):
    """The search was given up: nothing is known."""


class States(Protocol):
    """Where schedules of one problem can stand, and how they go on from there."""

    @property
    def start(self) -> Any:
        """Before the first operation."""

    def is_end(self, state: Any, /) -> bool:
        """Whether a schedule may end here."""

    def to_pay(self, state: Any, /) -> float:
        """Time that any end of the schedule adds to the cost, at least; infinite if none exists."""

    def parts(self, state: Any, /) -> tuple[Hashable, int]:
        """What more held values cannot make up for, and the held values as a bit mask."""

    def left_to_run(self, state: Any, /) -> int:
        """Operations that have to run still, reruns not counted."""

    def successors(self, state: Any, room_nbytes: int, /) -> Iterator[tuple[int, float, Any]]:
        """Operation, what it adds to the cost, and the state after it, for all that fit."""


class ExactSearch:
    """The search over one problem, for many budgets.

    Args:
        indexed: the step.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes."""
        self._indexed = indexed
        is_phaseless = Phase.ANY in indexed.phase
        self._states: States = UnphasedStates(indexed) if is_phaseless else PhasedStates(indexed)

    @classmethod
    def of(cls, indexed: Indexed) -> ExactSearch | None:
        """The search, if the problem is small enough to try it."""
        return cls(indexed) if len(indexed.phase) <= MOST_OPS else None

    def cheapest(self, budget_nbytes: int) -> list[int] | None:
        """The cheapest schedule whose peak is at most the budget; None if there is none.

        Args:
            budget_nbytes: the peak allowed, resident bytes included.

        Raises:
            SearchLimit: after `MOST_STATES` states.
        """
        states, room = self._states, budget_nbytes - self._indexed.problem.resident_nbytes
        first = states.start
        best = {first: 0.0}
        came_from: dict[Any, tuple[Any, int]] = {}
        order = itertools.count()
        queue = [(states.to_pay(first), states.left_to_run(first), next(order), 0.0, first)]
        seen: dict[Hashable, list[tuple[int, float]]] = {}
        expanded = 0
        while queue:
            *_, paid, state = heapq.heappop(queue)
            if paid > best[state]:
                continue
            if states.is_end(state):
                return _path(came_from, state)
            place, held = states.parts(state)
            others = seen.setdefault(place, [])
            if any(cost <= paid and not held & ~more for more, cost in others):
                continue
            others.append((held, paid))
            expanded += 1
            if expanded > MOST_STATES:
                raise SearchLimit
            for op, cost_us, new in states.successors(state, room):
                cost = paid + cost_us
                if cost >= best.get(new, math.inf):
                    continue
                ahead = states.to_pay(new)
                if ahead < math.inf:
                    best[new] = cost
                    came_from[new] = (state, op)
                    rank = (cost + ahead, states.left_to_run(new), next(order))
                    heapq.heappush(queue, (*rank, cost, new))
        return None

    def smallest(self, known_nbytes: int) -> list[int]:
        """The cheapest schedule of the smallest peak.

        Args:
            known_nbytes: a peak that some schedule reaches.

        Raises:
            SearchLimit: after `MOST_STATES` states for one budget.
        """
        low, high = 0, known_nbytes
        while low < high:
            middle = (low + high) // 2
            steps = self.cheapest(middle)
            if steps is None:
                low = middle + 1
            else:
                high = measure(self._indexed, steps).peak_nbytes
        steps = self.cheapest(high)
        assert steps is not None, "the known peak is one that some schedule reaches"
        return steps


def _path(came_from: dict[Any, tuple[Any, int]], state: Any) -> list[int]:
    steps = []
    while state in came_from:
        state, op = came_from[state]
        steps.append(op)
    return steps[::-1]
