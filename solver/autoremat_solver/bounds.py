"""What no plan can beat: a lower bound on the time at a budget and on the reachable peak.

The class of plans that both bounds speak of: every FORWARD operation runs exactly once in the
forward, in the problem's order; every BACKWARD operation runs exactly once, in the problem's
order; FORWARD and EITHER operations may run again (EITHER ones also for the first time) at any
point after the first backward operation, any number of times; EITHER operations may run
anywhere in the forward. That contains every plan that `check` accepts.

Why the rows are valid. At the backward position k, a value that a backward operation at or after
k reads is live or is made again later: its bytes count n_v (1 - r_p(v)). What position k itself
reads is live. At a forward step, what later forward operations read is live, and a value made
already that the backward reads is live or is made again.

Those rows do not see a value that is kept only to recompute others from it. At a few backward
positions k ("snapshots") the program therefore says what is live (y) and what runs after k (q):

    y_v = 1                     v read at k
    y_v + q_p(v) >= 1           v read by the backward after k
    y_u + q_p(u) >= q_o         o runs after k and reads u
    q_o <= r_o
    constant + sum n_v y_v <= budget
"""

from __future__ import annotations

import math
import time
from itertools import accumulate

from autoremat_solver._pulp import LinearSolver
from autoremat_solver.formulation import Formulation
from autoremat_solver.indexed import Indexed
from autoremat_solver.problem import Phase

ROUNDS = 12
SNAPSHOTS = (0.02, 0.5, 0.2, 0.1, 0.35, 0.7)
SNAPSHOT_COLUMNS = 20_000
ROWS_PER_ROUND = 6
TOLERANCE = 1e-6


class Bounds:
    """Lower bounds of one problem; rows found for one budget serve the next.

    Attributes:
        floor_nbytes: no plan of the class has a smaller peak.
    """

    def __init__(self, formulation: Formulation) -> None:
        """Compute what no budget changes, and the floor."""
        self._formulation = formulation
        self._indexed = formulation.indexed
        self._forward_ops = [
            op for op, phase in enumerate(self._indexed.phase) if phase is Phase.FORWARD
        ]
        self._forward_live, self._fixed_from = _forward_live(self._indexed, self._forward_ops)
        self._counted = [
            v
            for v in self._indexed.candidates
            if v not in formulation.free
            and self._indexed.last_demand[v] >= 0
            and self._indexed.nbytes[v] > 0
        ]
        self._linear: LinearSolver | None = None
        self._snapshot_rows: list[tuple[int, int]] = []
        self._row_of: dict[int, int] = {}
        self._constant_of: dict[int, int] = {}
        self._scale = max(1, sum(self._indexed.nbytes))
        ones = [1.0] * len(formulation.program.costs)
        loads = self.loads(ones)
        self.floor_nbytes = int(max(loads, default=self._indexed.problem.resident_nbytes))

    def loads(self, values: list[float]) -> list[float]:
        """Lower bound on live bytes per forward operation, then per backward position."""
        indexed, rerun = self._indexed, self._formulation.rerun
        steps = len(self._forward_ops)
        change = [0.0] * (steps + len(indexed.backward_ops) + 1)
        again = [0.0] * len(indexed.nbytes)
        for v in self._counted:
            column = rerun.get(indexed.producer[v])
            again[v] = 0.0 if column is None else values[column]
            kept = indexed.nbytes[v] * (1.0 - again[v])
            change[self._fixed_from[v]] += kept
            change[steps + indexed.last_demand[v] + 1] -= kept
        kept_at = list(accumulate(change[:-1]))
        fixed = self._forward_live + self._formulation.backward_live_nbytes
        loads = [a + b for a, b in zip(fixed, kept_at, strict=True)]
        for k, demanded in enumerate(indexed.demands):
            read = (v for v in set(demanded) if again[v] > 0.0)
            loads[steps + k] += sum(indexed.nbytes[v] * again[v] for v in read)
        return loads

    def time_us(self, budget_nbytes: int, time_limit_s: float) -> float:
        """No plan of the class whose peak is at most the budget takes less time.

        Args:
            budget_nbytes: the peak allowed.
            time_limit_s: stop adding rows then; fewer rows give a lower, still proven bound.
        """
        constant = self._formulation.constant_us
        if self._linear is None:
            self._linear = LinearSolver(self._formulation.program)
        for slot, row in self._row_of.items():
            self._linear.set_upper(row, (budget_nbytes - self._constant_of[slot]) / self._scale)
        for row, constant_nbytes in self._snapshot_rows:
            self._linear.set_upper(row, (budget_nbytes - constant_nbytes) / self._scale)
        until = time.monotonic() + time_limit_s
        best = self._converge(budget_nbytes, until)
        unlimited = budget_nbytes >= self._scale + self._indexed.problem.resident_nbytes
        if not unlimited and not self._snapshot_rows and self._indexed.backward_ops:
            self._add_snapshots(budget_nbytes)
            best = max(best, self._converge(budget_nbytes, until))
        return max(0.0, constant + best - TOLERANCE * (constant + best))

    def _converge(self, budget_nbytes: int, until: float) -> float:
        """Add violated rows until there are none; the cost above the constant."""
        assert self._linear is not None
        best = 0.0
        for _ in range(ROUNDS):
            answer = self._linear.relax(until - time.monotonic())
            if answer is None:
                break
            best = max(best, answer.objective)
            if not self._add_rows(answer.values, budget_nbytes):
                break
        return best

    def _add_snapshots(self, budget_nbytes: int) -> None:
        count = len(self._indexed.backward_ops)
        columns = 1 + len(self._indexed.candidates) + len(self._formulation.rerun)
        affordable = max(1, SNAPSHOT_COLUMNS // columns)
        for position in dict.fromkeys(int(share * count) for share in SNAPSHOTS[:affordable]):
            self._add_snapshot(position, budget_nbytes)

    def _add_snapshot(self, position: int, budget_nbytes: int) -> None:
        """Columns and rows of what is live at a backward position."""
        assert self._linear is not None
        indexed, linear, rerun = self._indexed, self._linear, self._formulation.rerun
        now = frozenset(indexed.demands[position])
        known = now | self._formulation.free
        live: dict[int, int] = {}
        after: dict[int, int] = {}

        def sources(v: int) -> dict[int, float]:
            """Columns of which one must be 1 for v to be readable after the position."""
            op = indexed.producer[v]
            if v not in live:
                live[v] = linear.add_column()
            if op in rerun and op not in after:
                after[op] = linear.add_column()
                linear.add_row({after[op]: 1.0, rerun[op]: -1.0}, 0.0)
                stack.append(op)
            return {live[v]: 1.0} | ({after[op]: 1.0} if op in after else {})

        stack: list[int] = []
        for v, last in enumerate(indexed.last_demand):
            if last > position and v not in known:
                linear.add_row(sources(v), math.inf, 1.0)
        while stack:
            op = stack.pop()
            for v in indexed.inputs[op]:
                if v not in known:
                    linear.add_row(sources(v) | {after[op]: -1.0}, math.inf, 0.0)
        constant = self._formulation.backward_live_nbytes[position]
        constant += sum(indexed.nbytes[v] for v in now - self._formulation.free)
        kept = {c: indexed.nbytes[v] / self._scale for v, c in live.items() if indexed.nbytes[v]}
        row = linear.add_row(kept, (budget_nbytes - constant) / self._scale)
        self._snapshot_rows.append((row, constant))

    def _add_rows(self, values: list[float], budget_nbytes: int) -> bool:
        assert self._linear is not None
        loads = self.loads(values)
        slack = self._scale * 1e-7
        over = [
            slot
            for slot, load in enumerate(loads)
            if load > budget_nbytes + slack and slot not in self._row_of
        ]
        for slot in _spread(over, loads, ROWS_PER_ROUND):
            constant, by_column = self._row(slot)
            scaled = {column: nbytes / self._scale for column, nbytes in by_column.items()}
            self._constant_of[slot] = constant
            upper = (budget_nbytes - constant) / self._scale
            self._row_of[slot] = self._linear.add_row(scaled, upper)
        return bool(over)

    def _row(self, slot: int) -> tuple[int, dict[int, int]]:
        indexed, rerun = self._indexed, self._formulation.rerun
        steps = len(self._forward_ops)
        now = frozenset(indexed.demands[slot - steps]) if slot >= steps else frozenset()
        fixed = self._forward_live + self._formulation.backward_live_nbytes
        constant = fixed[slot]
        by_column: dict[int, int] = {}
        for v in self._counted:
            if not self._fixed_from[v] <= slot <= steps + indexed.last_demand[v]:
                continue
            constant += indexed.nbytes[v]
            column = rerun.get(indexed.producer[v])
            if column is not None and v not in now:
                by_column[column] = by_column.get(column, 0) - indexed.nbytes[v]
        return constant, by_column


def _forward_live(indexed: Indexed, forward_ops: list[int]) -> tuple[list[int], list[int]]:
    """Bytes live at each FORWARD operation in any plan, and per value the first slot after that."""
    steps = len(forward_ops)
    step_of = {op: step for step, op in enumerate(forward_ops)}
    last = [-1] * len(indexed.nbytes)
    for step, op in enumerate(forward_ops):
        for v in indexed.inputs[op]:
            last[v] = step
    for v in indexed.demands[0] if indexed.demands else ():
        last[v] = steps - 1
    change = [0] * (steps + 1)
    fixed_from = [steps] * len(indexed.nbytes)
    for v, nbytes in enumerate(indexed.nbytes):
        born = step_of.get(indexed.producer[v])
        if born is None:
            continue
        end = steps - 1 if indexed.pinned[v] else max(last[v], born)
        change[born] += nbytes
        change[end + 1] -= nbytes
        fixed_from[v] = end + 1
    live = list(accumulate(change[:-1], initial=indexed.problem.resident_nbytes))[1:]
    return (
        [n + indexed.workspace_nbytes[op] for n, op in zip(live, forward_ops, strict=True)],
        fixed_from,
    )


def _spread(slots: list[int], loads: list[float], count: int) -> list[int]:
    """The worst slots, no two of them neighbours: neighbours hold nearly the same values."""
    chosen: list[int] = []
    apart = max(1, len(loads) // 200)
    for slot in sorted(slots, key=lambda s: (-loads[s], s)):
        if all(abs(slot - other) >= apart for other in chosen):
            chosen.append(slot)
        if len(chosen) == count:
            break
    return chosen
