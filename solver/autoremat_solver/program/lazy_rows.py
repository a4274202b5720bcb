"""The integer program with peak rows made on demand from the exact simulator.

Enters: a formulation and a budget. Leaves: candidates, most of them near the budget. Each round
solves the relaxation, rounds it, lays the plan out, simulates it, and gives every backward
position that is over the budget a row: expected load + what the simulator found beyond it <=
budget. The relaxation is nearly integral (it is a min-cut but for the peak rows), so rounding it
costs little; one integer solve at the end settles the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.plans.realise import Retention
from autoremat_solver.program._pulp import Answer, LinearSolver, solver_of
from autoremat_solver.program.formulation import Formulation, SlotLoad

ROWS_PER_ROUND = 8
INTEGER_GAP = 0.002
INTEGER_SOLVES = 3
NO_GAIN = 1e-4  # of the step's time
SAME = 1e-4

Rows = frozenset[tuple[int, float]]


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
        retention: how plans are laid out.
        label: what candidates are called.
        solved: integer answers by their peak rows, to share among retentions of one budget.
    """

    formulation: Formulation
    retention: Retention
    label: str
    solved: dict[Rows, Answer] = field(default_factory=dict)
    _rows: dict[int, _PeakRow] = field(default_factory=dict)
    _best_us: float = math.inf

    def candidates(
        self,
        budget_nbytes: int,
        *,
        rounds: int,
        integer_s: float,
        deadline: float,
        known_us: float = math.inf,
    ) -> Iterator[Candidate]:
        """Plans of ever better fit; the caller keeps the best.

        Args:
            budget_nbytes: the peak wanted.
            rounds: how often to solve the relaxation.
            integer_s: time for each of the integer solves at the end; 0 for none.
            deadline: `time.monotonic()` at which to stop.
            known_us: time of the fastest plan known to fit; integer solves that could gain next
                to nothing on it are left out.
        """
        self._best_us = known_us
        linear = solver_of(self.formulation)
        objective = -math.inf
        for new, relaxed in self._by_relaxation(linear, budget_nbytes, rounds, deadline):
            objective = relaxed
            yield self._noted(new, budget_nbytes)
        if integer_s > 0 and self._may_gain(objective):
            yield from self._by_integers(linear, budget_nbytes, integer_s, deadline)

    def _by_relaxation(
        self, linear: LinearSolver, budget_nbytes: int, rounds: int, deadline: float
    ) -> Iterator[tuple[Candidate, float]]:
        """Roundings of the relaxation with its objective, until one fits or nothing changes."""
        seen: list[tuple[frozenset[int] | None, float]] = []
        for _ in range(rounds):
            answer = linear.relax(deadline - time.monotonic())
            if answer is None:
                return
            plan = None
            for plan in self._rounded(answer):
                yield plan, answer.objective
            assert plan is not None
            again = any(
                plan.saved == saved and math.isclose(answer.objective, objective, rel_tol=SAME)
                for saved, objective in seen
            )
            if not self._update(linear, plan, answer, budget_nbytes) or again:
                return
            seen.append((plan.saved, answer.objective))

    def _by_integers(
        self, linear: LinearSolver, budget_nbytes: int, integer_s: float, deadline: float
    ) -> Iterator[Candidate]:
        for _ in range(INTEGER_SOLVES):
            rows = frozenset((k, row.transient_nbytes) for k, row in self._rows.items())
            answer = self.solved.get(rows)
            if answer is None:
                left = min(integer_s, deadline - time.monotonic())
                answer = linear.integer(left, INTEGER_GAP)
            if answer is None:
                return
            self.solved[rows] = answer
            plan = candidate(
                self.formulation.indexed,
                self.formulation.saved_at(answer.values),
                f"{self.label}, integer",
                self.retention,
            )
            yield self._noted(plan, budget_nbytes)
            if not self._update(linear, plan, answer, budget_nbytes):
                return

    def _noted(self, plan: Candidate, budget_nbytes: int) -> Candidate:
        if plan.peak_nbytes <= budget_nbytes:
            self._best_us = min(self._best_us, plan.time_us)
        return plan

    def _may_gain(self, objective: float) -> bool:
        """Whether the best plan is worth more than a rounding error above the relaxation."""
        return self._best_us > (self.formulation.constant_us + objective) * (1 + NO_GAIN)

    def _rounded(self, answer: Answer) -> Iterator[Candidate]:
        """Plans from the relaxation; the last one saves what is more than half saved."""
        half = self.formulation.saved_at(answer.values)
        for threshold in (0.999, 0.001):
            saved = self.formulation.saved_at(answer.values, threshold)
            if saved != half:
                yield candidate(self.formulation.indexed, saved, self.label, self.retention)
        yield candidate(self.formulation.indexed, half, self.label, self.retention)

    def _update(
        self, linear: LinearSolver, plan: Candidate, answer: Answer, budget_nbytes: int
    ) -> bool:
        """Correct the rows by what the simulator says; whether the plan was over the budget."""
        scale = max(1, self.formulation.indexed.total_nbytes)
        loads = _slot_peaks(self.formulation, plan)
        point = [1.0 if x > 0.5 else 0.0 for x in answer.values]
        for position, row in self._rows.items():
            self._correct(row, loads[position] - row.load.at(point))
        over = [k for k, load in enumerate(loads) if load > budget_nbytes]
        new = [k for k in over if k not in self._rows]
        for position in _worst(new, loads, ROWS_PER_ROUND):
            load = self.formulation.expected_load(position)
            scaled = {column: nbytes / scale for column, nbytes in load.by_column.items()}
            row = _PeakRow(linear.add_row(scaled, 0.0), load, 0.0)
            row.transient_nbytes = max(0.0, loads[position] - load.at(point))
            self._rows[position] = row
        for row in self._rows.values():
            room = budget_nbytes - row.load.constant_nbytes - row.transient_nbytes
            linear.set_upper(row.number, room / scale)
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
