"""The integer program with peak rows made on demand from the exact simulator.

Enters: a formulation and a budget. Leaves: candidates, most of them near the budget. Each round
solves the relaxation, rounds it, lays the plan out, simulates it, and gives every backward
position that is over the budget a row: expected load + what the simulator found beyond it <=
budget. The relaxation is nearly integral (it is a min-cut but for the peak rows), so rounding it
costs little; one integer solve at the end settles the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.program._pulp import Answer, LinearSolver, solver_of
from autoremat_solver.program.formulation import Formulation, SlotLoad

ROUNDS = 12  # relaxations, at most
ROWS_PER_ROUND = 8
INTEGER_GAP = 0.002  # of the time of all reruns
STEP_GAP = 2e-4  # of the step's time: where little runs again, the other gap is next to nothing
INTEGER_SOLVES = 3
NO_GAIN = 1e-4  # of the step's time
SAME = 1e-4
RELAXED, INTEGER = "ILP", "ILP, integer"


@dataclass
class _PeakRow:
    number: int
    load: SlotLoad
    transient_nbytes: float


@dataclass
class LazyRows:
    """One budget's program.

    Attributes:
        formulation: columns and rows without memory.
        budget_nbytes: the peak wanted.
    """

    formulation: Formulation
    budget_nbytes: int
    _rows: dict[int, _PeakRow] = field(default_factory=dict)
    _objective: float = -math.inf

    @cached_property
    def _linear(self) -> LinearSolver:
        return solver_of(self.formulation)

    def by_relaxation(self) -> Iterator[Candidate]:
        """Roundings of the relaxation, of ever better fit, until one fits or nothing changes."""
        seen: list[tuple[frozenset[int] | None, float]] = []
        for _ in range(ROUNDS):
            answer = self._linear.relax()
            if answer is None:
                return
            self._objective = answer.objective
            *others, plan = self._rounded(answer)
            yield from (*others, plan)
            again = any(
                plan.saved == saved and math.isclose(answer.objective, objective, rel_tol=SAME)
                for saved, objective in seen
            )
            if not self._update(plan, answer) or again:
                return
            seen.append((plan.saved, answer.objective))

    def by_integers(self, known_us: float = math.inf) -> Iterator[Candidate]:
        """Integer points with the rows that the relaxations left, as long as they exceed any.

        Args:
            known_us: time of the fastest plan known to fit: where that is hardly above the
                relaxation there is nothing to gain.
        """
        if known_us <= (self.formulation.constant_us + self._objective) * (1 + NO_GAIN):
            return
        for _ in range(INTEGER_SOLVES):
            answer = self._linear.integer(INTEGER_GAP, STEP_GAP * self.formulation.constant_us)
            if answer is None:
                return
            saved = self.formulation.saved_at(answer.values)
            plan = candidate(self.formulation.indexed, saved, INTEGER)
            yield plan
            if not self._update(plan, answer):
                return

    def _rounded(self, answer: Answer) -> Iterator[Candidate]:
        """Plans from the relaxation; the last one saves what is more than half saved."""
        half = self.formulation.saved_at(answer.values)
        for threshold in (0.999, 0.001):
            saved = self.formulation.saved_at(answer.values, threshold)
            if saved != half:
                yield candidate(self.formulation.indexed, saved, RELAXED)
        yield candidate(self.formulation.indexed, half, RELAXED)

    def _update(self, plan: Candidate, answer: Answer) -> bool:
        """Correct the rows by what the simulator says; whether the plan was over the budget."""
        scale = max(1, self.formulation.indexed.total_nbytes)
        loads = _slot_peaks(self.formulation, plan)
        point = [1.0 if x > 0.5 else 0.0 for x in answer.values]
        for position, row in self._rows.items():
            self._correct(row, loads[position] - row.load.at(point))
        over = [k for k, load in enumerate(loads) if load > self.budget_nbytes]
        new = [k for k in over if k not in self._rows]
        for position in _worst(new, loads, ROWS_PER_ROUND):
            load = self.formulation.expected_load(position)
            scaled = {column: nbytes / scale for column, nbytes in load.by_column.items()}
            row = _PeakRow(self._linear.add_row(scaled, 0.0), load, 0.0)
            row.transient_nbytes = max(0.0, loads[position] - load.at(point))
            self._rows[position] = row
        for row in self._rows.values():
            room = self.budget_nbytes - row.load.constant_nbytes - row.transient_nbytes
            self._linear.set_upper(row.number, room / scale)
        return bool(over)

    def _correct(self, row: _PeakRow, transient_nbytes: float) -> None:
        """Follow a rise at once and a fall by half, so that rows do not swing."""
        if transient_nbytes > row.transient_nbytes:
            row.transient_nbytes = transient_nbytes
        else:
            row.transient_nbytes = (row.transient_nbytes + transient_nbytes) / 2


def _slot_peaks(formulation: Formulation, plan: Candidate) -> list[int]:
    """Per backward position the highest live bytes since the previous backward operation.

    The forward counts towards the first position: what is saved is live in both.
    """
    backward = formulation.indexed.is_backward
    peaks: list[int] = []
    highest = 0
    for op, live in zip(plan.steps, plan.timeline.live_nbytes, strict=True):
        highest = max(highest, live)
        if backward[op]:
            peaks.append(highest)
            highest = 0
    return peaks


def _worst(positions: list[int], loads: list[int], count: int) -> list[int]:
    """The highest positions, spread so that no two stand for the same peak."""
    apart = max(1, len(loads) // 100)
    chosen: list[int] = []
    for k in sorted(positions, key=lambda k: (-loads[k], k)):
        if all(abs(k - other) >= apart for other in chosen):
            chosen.append(k)
        if len(chosen) == count:
            break
    return chosen
