"""The interval program: what is live at some positions of the spine, what runs again in between.

Enters: a `Spine` and its cuts, positions c_0 = 0 < c_1 < ... < c_m-1. Leaves: a `LinearProgram`
whose optimum no plan beats, and rows to add where its point breaks the budget. The first cut is
position 0; window (a, b] stands for all that runs after the operation at cut a, up to and with the
one at cut b; the last window has no end.

| symbol | column       | 1 in the point of a plan if, and only if                                |
|--------|--------------|-------------------------------------------------------------------------|
| y_v^a  | live[a][v]   | v is live while the operation at cut a runs, and read again after it    |
| z_o^ab | runs[a,b][o] | o runs in window (a, b], its first run not counted if that is a position |
| f_o    | ahead[o]     | EITHER operation o runs in the forward                                  |

Cost: time of o for each z_o of the windows between neighbours; f_o.
A value is read after cut 0 from the forward's instance exactly if y_v^0 = 1 (1 also for what
position 0 reads). Each row holds at the point of every plan that `check` accepts:

    y_v^a + z_p(v)^ab >= 1      v is read at a position in (a, b]: that instance was live at a,
                                or the producer p(v) made it in the window
    y_u^a + z_p(u)^ab >= z_o^ab the first run of o in the window reads u: likewise
    y_v^a + z_p(v)^ab >= y_v^b  what is live at b was live at a, or made in the window
    z_o^ab <= z_o^ac + z_o^cb   and z_o^ac, z_o^cb <= z_o^ab: a run is in one of two halves
    f_o + z_o^0m >= 1           EITHER operations that the backward needs or whose outputs leave
    y_v^0 <= f_p(v) <= f_p(u)   EITHER p(v), and EITHER producers of what it reads
    fixed + reads + sum n_v y_v^a <= budget, at each cut

A value that a position of the window makes first (graphs without phases) has no such row there: it
may be read without a second run. Values that may only be the forward's instance (`must_save`) have
no z in their rows; `must_recompute` ones have y^0 = 0. Two more kinds of rows are added on demand:

    at position k inside the window (a, b] of two neighbours, v not read at k:
        live bytes of v at k >= n_v (1 - z_p(v)^ab)         v is read in (k, b]
        live bytes of v at k >= n_v (y_v^b - z_p(v)^ab)     v is live at b
    at a FORWARD operation: live in any plan + sum n_v y_v^0 over what only the backward reads

What is forgotten: memory between positions, and the order within a window. Windows of several
neighbours cost columns, but matter: without them the relaxation makes a value in small parts, in
many windows, and pays for the way to it only once. [Jain2020] has a window per operation and none
across.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from autoremat_solver.bounds.spine import Spine
from autoremat_solver.problem import Phase
from autoremat_solver.program.formulation import LinearProgram, Row

Columns = dict[int, int]


class IntervalProgram:
    """One set of cuts.

    Args:
        spine: the problem.
        cuts: positions in ascending order, the first one 0.
        all_windows: have a window for each two cuts; otherwise for neighbours and for each cut
            and the end.

    Attributes:
        program: columns and rows, the budget's left out.
        budget_rows: (constant bytes, bytes by column): their sum is at most the budget.
    """

    def __init__(self, spine: Spine, cuts: list[int], *, all_windows: bool) -> None:
        """Make columns and rows."""
        self._spine = spine
        self._indexed = spine.indexed
        self.cuts = cuts
        self._ends = [*cuts[1:], len(spine.ops) - 1]
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._rows: list[Row] = []
        self._needed, self._read = self._needed_from_cut()
        self._live = [self._live_columns(a) for a in range(len(cuts))]
        self._runs: dict[tuple[int, int], Columns] = {}
        for a in range(len(cuts)):
            self._make_window(a, a + 1)
        for length in range(2, len(cuts) + 1):
            for a in range(len(cuts) - length + 1):
                if all_windows or a + length == len(cuts):
                    self._make_window(a, a + length)
        self._make_forward_rows()
        self.program = LinearProgram(self._costs, self._uppers, self._rows)
        self.budget_rows = [self._cut_row(a) for a in range(len(cuts))]

    @property
    def column_count(self) -> int:
        """How large the program is."""
        return len(self._costs)

    def loads(self, values: list[float]) -> list[float]:
        """Lower bound on live bytes per FORWARD operation, then per position, at a point."""
        indexed, spine = self._indexed, self._spine
        forward = spine.forward
        change = [0.0] * (len(forward.nbytes) + 1)
        for v, column in self._live[0].items():
            change[forward.counted_until[v]] += indexed.nbytes[v] * values[column]
        kept, loads = 0.0, []
        for fixed, more in zip(forward.nbytes, change, strict=False):
            kept += more
            loads.append(fixed + kept)
        for a in range(len(self.cuts)):
            loads.extend(self._window_loads(a, values))
        return loads

    def budget_row(self, slot: int, values: list[float]) -> tuple[int, dict[int, int]]:
        """The row of a slot of `loads`, as sharp at the point as `loads` says."""
        forward = self._spine.forward
        steps = len(forward.nbytes)
        if slot < steps:
            until, nbytes = forward.counted_until, self._indexed.nbytes
            kept = {c: nbytes[v] for v, c in self._live[0].items() if until[v] <= slot}
            return forward.nbytes[slot], {c: n for c, n in kept.items() if n}
        position = slot - steps
        a = bisect_left(self.cuts, position + 1) - 1
        if self.cuts[a] == position:
            return self._cut_row(a)
        return self._inner_row(a, position, values)

    def _column(self, cost: float, upper: float = 1.0) -> int:
        self._costs.append(cost)
        self._uppers.append(upper)
        return len(self._costs) - 1

    def _needed_from_cut(self) -> tuple[list[set[int]], list[set[int]]]:
        """Per cut the values that may be read after it; per window of neighbours the ones read."""
        spine = self._spine
        needed: set[int] = set()
        all_needed, all_read = [], []
        for cut, end in zip(reversed(self.cuts), reversed(self._ends), strict=True):
            read = set().union(*spine.reads[cut + 1 : end + 1])
            stack = [v for v in read if v not in needed]
            needed = needed | read
            while stack:
                v = stack.pop()
                op = self._indexed.producer[v]
                if spine.remade[v]:
                    new = [u for u in spine.inputs[op] if u not in needed]
                    needed.update(new)
                    stack.extend(new)
            all_needed.append(needed)
            all_read.append(read)
        return all_needed[::-1], all_read[::-1]

    def _live_columns(self, a: int) -> Columns:
        cut = self.cuts[a]
        needed = {v for v in self._needed[a] if self._spine.born[v] < cut}
        if a > 0:
            return {v: self._column(0.0) for v in sorted(needed)}
        value, columns = self._indexed.problem.values, {}
        at_once = {v for v in self._spine.reads[0] if self._spine.born[v] < 0}
        for v in sorted(needed | at_once):
            columns[v] = self._column(0.0, 0.0 if value[v].must_recompute else 1.0)
            if v in at_once:
                self._rows.append(({columns[v]: 1.0}, 1.0, math.inf))
        return columns

    def _make_window(self, a: int, b: int) -> None:
        """Columns and rows of window (a, b]; the windows that it consists of are there already."""
        spine = self._spine
        runs = self._run_columns(a, b)
        self._runs[a, b] = runs
        for v in sorted(set().union(*self._read[a:b])):
            if spine.born[v] < self.cuts[a]:
                self._rows.append((self._sources(a, b, v), 1.0, math.inf))
        for op, column in runs.items():
            for u in spine.inputs[op]:
                if spine.born[u] < self.cuts[a]:
                    self._row_at_most(column, self._sources(a, b, u))
        for v, column in self._live[b].items() if b < len(self.cuts) else ():
            if spine.born[v] < self.cuts[a]:
                self._row_at_most(column, self._sources(a, b, v))

    def _run_columns(self, a: int, b: int) -> Columns:
        if b == a + 1:
            ops = {self._indexed.producer[v] for v in self._needed[a] if self._spine.remade[v]}
            born = [self._spine.born[self._indexed.outputs[op][0]] for op in sorted(ops)]
            return {
                op: self._column(self._indexed.time_us[op])
                for op, first in zip(sorted(ops), born, strict=True)
                if first < self._ends[b - 1] or b == len(self.cuts)
            }
        parts = [self._runs[a, a + 1], self._runs[a + 1, b]]
        columns = {}
        for op in sorted({*parts[0], *parts[1]}):
            halves = [part[op] for part in parts if op in part]
            if len(halves) == 1:
                columns[op] = halves[0]
                continue
            columns[op] = self._column(0.0)
            self._row_at_most(columns[op], dict.fromkeys(halves, 1.0))
            for half in halves:
                self._row_at_most(half, {columns[op]: 1.0})
        return columns

    def _row_at_most(self, column: int, sources: dict[int, float]) -> None:
        row = dict(sources)
        row[column] = row.get(column, 0.0) - 1.0
        self._rows.append((row, 0.0, math.inf))

    def _sources(self, a: int, b: int, v: int) -> dict[int, float]:
        """Columns of which one is 1 if v can be read in window (a, b]."""
        columns = {self._live[a][v]: 1.0} if v in self._live[a] else {}
        op = self._indexed.producer[v]
        if self._spine.remade[v] and op in self._runs[a, b]:
            columns[self._runs[a, b][op]] = 1.0
        return columns

    def _make_forward_rows(self) -> None:
        """EITHER operations: when they run first."""
        indexed = self._indexed
        ahead: Columns = {}
        must_run = self._must_run()
        for op, phase in enumerate(indexed.phase):
            if phase is Phase.EITHER:
                ahead[op] = self._column(indexed.time_us[op])
        for op, column in ahead.items():
            for v in indexed.outputs[op]:
                if v in self._live[0]:
                    self._row_at_most(self._live[0][v], {column: 1.0})
            for u in indexed.inputs[op]:
                if indexed.producer[u] in ahead:
                    self._row_at_most(column, {ahead[indexed.producer[u]]: 1.0})
            late = self._runs[0, len(self.cuts)].get(op)
            if not indexed.problem.ops[op].recomputable:
                pieces = [self._runs[a, a + 1].get(op) for a in range(len(self.cuts))]
                once = {c: 1.0 for c in (column, *pieces) if c is not None}
                self._rows.append((once, -math.inf, 1.0))
            if op in must_run:
                late = self._column(indexed.time_us[op]) if late is None else late
                self._rows.append(({column: 1.0, late: 1.0}, 1.0, math.inf))

    def _must_run(self) -> set[int]:
        """EITHER operations that run at least once in every plan."""
        indexed = self._indexed
        stack = [indexed.producer[v] for v, pinned in enumerate(indexed.pinned) if pinned]
        stack += [indexed.producer[v] for op in self._spine.ops for v in indexed.inputs[op]]
        found: set[int] = set()
        while stack:
            op = stack.pop()
            if indexed.phase[op] is Phase.EITHER and op not in found:
                found.add(op)
                stack.extend(indexed.producer[v] for v in indexed.inputs[op])
        return found

    def _cut_row(self, a: int) -> tuple[int, dict[int, int]]:
        cut, nbytes = self.cuts[a], self._indexed.nbytes
        now = self._spine.reads[cut]
        kept = {c: nbytes[v] for v, c in self._live[a].items() if v not in now and nbytes[v]}
        return self._spine.load_nbytes[cut], kept

    def _window_loads(self, a: int, values: list[float]) -> list[float]:
        """Lower bounds at the positions from cut a to before the next cut."""
        nbytes, load = self._indexed.nbytes, self._spine.load_nbytes
        constant, kept = self._cut_row(a)
        result = []
        last = self._ends[a] if a + 1 < len(self.cuts) else self._ends[a] + 1
        terms = {v: self._terms(a, v) for v in self._needed[a]}
        at_end = {v: max(0.0, self._at(t, values)[1]) * nbytes[v] for v, t in terms.items()}
        if_read = {v: max(0.0, self._at(t, values)[0]) * nbytes[v] for v, t in terms.items()}
        later: set[int] = set(self._spine.reads[last]) if a + 1 < len(self.cuts) else set()
        for k in range(last - 1, self.cuts[a], -1):
            now = self._spine.reads[k]
            total = 0.0
            for v, floor in at_end.items():
                if v not in now and self._spine.born[v] < k:
                    total += max(floor, if_read[v]) if v in later else floor
            result.append(load[k] + total)
            later |= now
        result.append(constant + sum(n * values[c] for c, n in kept.items()))
        return result[::-1]

    def _terms(self, a: int, v: int) -> tuple[int | None, int | None]:
        """The columns z_p(v) of the window after cut a and y_v at its end, where they exist."""
        op = self._indexed.producer[v]
        run = self._runs[a, a + 1].get(op) if self._spine.remade[v] else None
        end = self._live[a + 1].get(v) if a + 1 < len(self.cuts) else None
        return run, end

    def _at(self, terms: tuple[int | None, int | None], values: list[float]) -> tuple[float, float]:
        """1 - z and y - z at a point."""
        run = 0.0 if terms[0] is None else values[terms[0]]
        end = 0.0 if terms[1] is None else values[terms[1]]
        return 1.0 - run, end - run

    def _inner_row(self, a: int, k: int, values: list[float]) -> tuple[int, dict[int, int]]:
        spine, nbytes = self._spine, self._indexed.nbytes
        later = set().union(*spine.reads[k + 1 : self._ends[a] + 1])
        constant, by_column = spine.load_nbytes[k], dict[int, int]()
        for v in sorted(self._needed[a]):
            if v in spine.reads[k] or spine.born[v] >= k or not nbytes[v]:
                continue
            run, end = terms = self._terms(a, v)
            if_read, at_end = self._at(terms, values)
            if v in later and if_read >= at_end:
                constant += nbytes[v]
            elif end is not None and at_end > 0.0:
                by_column[end] = nbytes[v]
            else:
                continue
            if run is not None:
                by_column[run] = by_column.get(run, 0) - nbytes[v]
        return constant, by_column
