"""The O(n) integer program "what is saved, what is recomputed" as plain data.

Enters: an `Indexed` problem. Leaves: columns and rows; `_pulp` runs them.

| symbol   | column       | meaning                                                     |
|----------|--------------|-------------------------------------------------------------|
| s_v      | save[v]      | the backward reads the forward's instance of value v        |
| r_o      | rerun[o]     | operation o runs in the backward                            |
| f_o      | run[o]       | EITHER operation o runs in the forward                      |

    min  sum t_o r_o + sum t_o f_o
    s_v + r_p(v) >= 1             for v read by a backward operation, p(v) its producer
    s_u + r_p(u) >= r_o           for o and every value u that it reads
    s_v = 1                       for v that the first backward operation reads
    f_o + r_o >= 1                for EITHER operations that the backward needs at all
    s_v <= f_p(v), f_p(u) >= f_o  for EITHER operations
    live bytes at backward position k <= budget

Without the last rows the matrix is a min-cut's: the relaxation is integral. They are made on
demand (`lazy_rows`). The shape without memory is that of torch's min-cut
partitioner; [Jain2020] is the full time-indexed program, whose relaxation is too weak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.problem import Phase

T = TypeVar("T")
Row = tuple[dict[int, float], float, float]


@dataclass(frozen=True)
class LinearProgram:
    """Minimise costs over columns within [0, upper] and rows within [lower, upper].

    Attributes:
        costs: per column.
        uppers: per column; 0 or 1.
        rows: coefficients by column, lower and upper bound.
    """

    costs: list[float]
    uppers: list[float]
    rows: list[Row]


@dataclass(frozen=True)
class SlotLoad:
    """Live bytes at one backward position: constant + sum of coefficients times columns.

    Attributes:
        constant_nbytes: live whatever is saved, resident bytes and workspace included.
        by_column: bytes per column.
    """

    constant_nbytes: int
    by_column: dict[int, int]

    def at(self, values: list[float]) -> float:
        """The load at a point."""
        return self.constant_nbytes + math.fsum(n * values[c] for c, n in self.by_column.items())


class Formulation:
    """Columns and rows of one problem.

    Attributes:
        save: value -> column.
        rerun: operation -> column; operations that cannot run in the backward have none.
        run: EITHER operation -> column.
        constant_us: time of the operations that run exactly once in any plan.

    Args:
        indexed: the step.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Make the columns and the rows without memory."""
        self.indexed = indexed
        self.save: dict[int, int] = {}
        self.rerun: dict[int, int] = {}
        self.run: dict[int, int] = {}
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._rows: list[Row] = []
        self._always = frozenset(indexed.always_forward)
        self.constant_us = math.fsum(indexed.time_us[op] for op in self._always) + math.fsum(
            indexed.time_us[op] for op in indexed.backward_ops
        )
        self._derived: dict[Callable[..., Any], Any] = {}
        self._make_columns()
        self._make_rows()

    def derived(self, make: Callable[[Formulation], T]) -> T:
        """`make(self)`, computed once: for modules that prepare objects of their own."""
        if make not in self._derived:
            self._derived[make] = make(self)
        found: T = self._derived[make]
        return found

    @property
    def program(self) -> LinearProgram:
        """The columns and rows without memory."""
        return LinearProgram(list(self._costs), list(self._uppers), list(self._rows))

    def _column(self, cost: float, upper: float = 1.0) -> int:
        self._costs.append(cost)
        self._uppers.append(upper)
        return len(self._costs) - 1

    def _make_columns(self) -> None:
        indexed = self.indexed
        for v in indexed.candidates:
            op = indexed.producer[v]
            self.save[v] = self._column(0.0, 0.0 if indexed.barred[v] else 1.0)
            late = indexed.phase[op] is Phase.EITHER and not indexed.forced[v]
            if op not in self.rerun and (indexed.rerunnable[op] or late):
                free = late and op in self._always
                self.rerun[op] = self._column(0.0 if free else indexed.time_us[op])
            if indexed.phase[op] is Phase.EITHER and op not in self.run:
                self._column_for_run(op)

    def _column_for_run(self, op: int) -> None:
        stack = [op]
        while stack:
            op = stack.pop()
            if self.indexed.phase[op] is not Phase.EITHER or op in self.run:
                continue
            cost = 0.0 if op in self._always else self.indexed.time_us[op]
            self.run[op] = self._column(cost)
            stack.extend(self.indexed.producer[v] for v in self.indexed.inputs[op])

    def _sources(self, v: int) -> dict[int, float]:
        """Columns of which one must be 1 for v to be readable in the backward."""
        indexed = self.indexed
        op = indexed.producer[v]
        columns = {self.save[v]: 1.0}
        first_instance_only = indexed.pinned[v] and indexed.phase[op] is Phase.FORWARD
        if op in self.rerun and not first_instance_only:
            columns[self.rerun[op]] = 1.0
        return columns

    def _make_rows(self) -> None:
        indexed = self.indexed
        for v, last in enumerate(indexed.last_demand):
            if last >= 0:
                self._rows.append((self._sources(v), 1.0, math.inf))
        for v in self.at_once:
            self._rows.append(({self.save[v]: 1.0}, 1.0, math.inf))
        for op, column in self.rerun.items():
            for v in indexed.inputs[op]:
                row = self._sources(v)
                row[column] = row.get(column, 0.0) - 1.0
                self._rows.append((row, 0.0, math.inf))
        for op in self._needed_somewhere():
            columns = {self.run[op]: 1.0}
            if op in self.rerun:
                columns[self.rerun[op]] = 1.0
            self._rows.append((columns, 1.0, math.inf))
        for op, column in self.run.items():
            for v in indexed.outputs[op]:
                if v in self.save:
                    self._rows.append(({column: 1.0, self.save[v]: -1.0}, 0.0, math.inf))
            for v in indexed.inputs[op]:
                before = self.run.get(indexed.producer[v])
                if before is not None:
                    self._rows.append(({before: 1.0, column: -1.0}, 0.0, math.inf))
            if op in self.rerun and not indexed.rerunnable[op]:
                self._rows.append(({column: 1.0, self.rerun[op]: 1.0}, -math.inf, 1.0))

    def _needed_somewhere(self) -> list[int]:
        """EITHER operations that run at least once in every plan: f_o + r_o >= 1.

        Those rows are implied for whole operations, but not for half ones.
        """
        needed: set[int] = set()
        stack = [v for values in self.indexed.demands for v in values]
        while stack:
            op = self.indexed.producer[stack.pop()]
            if op in self.run and op not in needed:
                needed.add(op)
                stack.extend(self.indexed.inputs[op])
        return sorted(needed)

    @cached_property
    def at_once(self) -> list[int]:
        """What the first backward operation reads: no recompute can run before it."""
        return sorted(set(self.indexed.demands[0])) if self.indexed.demands else []

    @cached_property
    def backward_live_nbytes(self) -> list[int]:
        """Per backward position: bytes of backward values, outputs, workspace and residents."""
        indexed = self.indexed
        count = len(indexed.backward_ops)
        change = [0] * (count + 1)
        position_of = {op: k for k, op in enumerate(indexed.backward_ops)}
        last: dict[int, int] = {}
        for k, op in enumerate(indexed.backward_ops):
            for v in indexed.inputs[op]:
                last[v] = k
        for v, nbytes in enumerate(indexed.nbytes):
            op = indexed.producer[v]
            if indexed.is_backward[op]:
                born = position_of[op]
                end = count if indexed.pinned[v] else max(last.get(v, born), born) + 1
            elif indexed.pinned[v] and indexed.phase[op] is Phase.FORWARD:
                born, end = 0, count
            else:
                continue
            change[born] += nbytes
            change[end] -= nbytes
        live, result = indexed.problem.resident_nbytes, []
        for k, op in enumerate(indexed.backward_ops):
            live += change[k]
            result.append(live + indexed.least_extra_nbytes[op])
        return result

    @cached_property
    def free(self) -> frozenset[int]:
        """Candidates that are counted in `backward_live_nbytes` already."""
        return frozenset(
            v
            for v in self.indexed.candidates
            if self.indexed.pinned[v]
            and self.indexed.phase[self.indexed.producer[v]] is Phase.FORWARD
        )

    @cached_property
    def last_need(self) -> list[int]:
        """Per value an estimate of the last backward position that needs it saved.

        Its last direct read, or the first position that needs a value recomputed from it.
        """
        indexed = self.indexed
        nearest = list(indexed.first_demand)
        last = list(indexed.last_demand)
        for op in reversed(indexed.forward_order):
            if op not in self.rerun:
                continue
            needed = [nearest[w] for w in indexed.outputs[op] if nearest[w] >= 0]
            if not needed:
                continue
            for v in indexed.inputs[op]:
                last[v] = max(last[v], min(needed))
                if indexed.first_demand[v] < 0:
                    nearest[v] = min(needed) if nearest[v] < 0 else min(nearest[v], min(needed))
        return last

    def expected_load(self, position: int) -> SlotLoad:
        """Live bytes at a backward position if every recomputed value has one copy.

        An estimate: the transients of recompute are missing. The caller adds what the
        simulator says is missing.
        """
        indexed = self.indexed
        constant = self.backward_live_nbytes[position]
        by_column: dict[int, int] = {}
        for v in indexed.candidates:
            nbytes = indexed.nbytes[v]
            if not nbytes or v in self.free:
                continue
            if indexed.first_demand[v] <= position <= indexed.last_demand[v]:
                constant += nbytes
            elif self.last_need[v] >= position:
                by_column[self.save[v]] = nbytes
        return SlotLoad(constant, by_column)

    def saved_at(self, values: list[float], threshold: float = 0.5) -> frozenset[int]:
        """Values whose save column is above the threshold."""
        again = {
            v
            for v in self.at_once
            if values[self.rerun.get(self.indexed.producer[v], self.save[v])] > threshold
            and self.indexed.producer[v] in self.rerun
        }
        return frozenset(
            v for v, column in self.save.items() if values[column] > threshold and v not in again
        )
