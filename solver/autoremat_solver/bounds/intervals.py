"""The interval program: what is live at some positions of the spine, what runs again in between.

Enters: a `Spine` and its cuts, positions c_0 = 0 < c_1 < ... < c_m-1. Leaves: a `LinearProgram`
whose optimum no plan beats, and rows to add where its point breaks the budget. Window a is all that
runs after the operation at cut a, up to and with the one at the next cut; the last one has no end.

| symbol | column       | 1 in the point of a plan if, and only if                       |
|--------|--------------|----------------------------------------------------------------|
| y_v^a  | live[a][v]   | v is live while the operation at cut a runs, and read after it |
| z_o^a  | runs[a][o]   | operation o runs in window a                                   |
| f_o    | ahead        | EITHER operation o runs in the forward                         |

Cost: time of o for each z_o and f_o. A value is read after cut 0 from the forward's instance
exactly if y_v^0 = 1 (1 also for what position 0 reads). Each row holds at the point of every plan
that `check` accepts:

    y_v^a + z_p(v)^a >= 1      v is read in window a: that instance was live at cut a, or the
                               producer p(v) made it in the window
    y_u^a + z_p(u)^a >= z_o^a  the first run of o in the window reads u: likewise
    y_v^a + z_p(v)^a >= y_v^b  what is live at the next cut b was live at a, or made in between
    f_o + sum of z_o >= 1      EITHER operations that the backward needs or whose outputs leave
    y_v^0 <= f_p(v) <= f_p(u)  EITHER p(v), and EITHER producers of what it reads

Values that may only be the forward's instance (`must_save`) have no z in their rows;
`must_recompute` ones have y^0 = 0. Where a value is far from its last read only some cuts have
columns for it, and z stands for a run in any of the windows between two of these.

Rows for memory are made on demand (`loads`): live bytes at one moment are at least

    at cut a:                      reads + sum of n_v y_v^a
    at position k inside window a: reads + n_v (1 - z_p(v)^a)       v is read in the window after k
                                         + n_v (y_v^b - z_p(v)^a)   v is live at the next cut
    while o runs again in it:      (what o reads and makes, and its workspace) z_o^a
                                         + the same for v that the next cut reads or holds
    at a FORWARD operation:        live in any plan + sum n_v y_v^0, v read by the backward only

and so are the rows for ways across several windows (`paths`).

What is forgotten: the order within a window, and that values are whole, beyond what rounding the
rows for memory tells. Cuts cost columns. A cut where little room is left says the most: there
nearly everything must be made again after it. [Jain2020] has a window per operation, none across.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.bounds.loads import NONE, Load
from autoremat_solver.bounds.paths import NO_OP, Path
from autoremat_solver.bounds.spine import Spine
from autoremat_solver.problem import Phase
from autoremat_solver.program.formulation import LinearProgram, Row

Vector = NDArray[np.float64]
Columns = dict[int, int]

DENSE = 24  # cuts before a value's last read, at each of which it has columns
CLOSE = 0.05  # to breaking a path's row
SPARSE = 3  # of the cuts before these, every third


@dataclass(frozen=True)
class Point:
    """A point of the program: what the columns of the same names in `IntervalProgram` are.

    Attributes:
        values: per column, and a 0 for `NONE`.
        live: per cut and value.
        after: per window and value.
        kept: per cut and value, at least what of the value is live there.
        runs: per window and operation.
        made: per window and value.
    """

    values: Vector
    live: Vector
    after: Vector
    kept: Vector
    runs: Vector
    made: Vector


class IntervalProgram:
    """One set of cuts.

    Args:
        spine: the problem.
        cuts: positions in ascending order, the first one 0.

    Attributes:
        program: columns and rows, those for memory left out.
        ends: per window, its last position.
        read: per window, the values that its positions read.
        live: per cut and value, its column; `NONE` where there is none.
        runs: per window and operation; windows that follow each other may share a column.
        is_new: per window and operation, whether the window before has another column.
        is_alone: per window and operation, whether it has a column of its own.
        made: per window and value, the run that makes it.
        before: per window and value, the column at the last cut up to the window that has one.
        after: per window and value, the column at the first cut after it that has one.
        between: per window and value, `made` where the column `before` is of an earlier cut.
        remade: per value, whether a second run makes an instance that reads may see.
    """

    def __init__(self, spine: Spine, cuts: list[int]) -> None:
        """Make columns and rows."""
        self.spine = spine
        self.cuts = cuts
        self.ends = [*cuts[1:], len(spine.ops) - 1]
        self.remade = np.array(spine.remade, dtype=bool)
        self._indexed = spine.indexed
        self._nbytes = np.array(spine.indexed.nbytes, dtype=np.int64)
        self._producer = np.array(spine.indexed.producer, dtype=np.int64)
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._rows: list[Row] = []
        self._needed, self.read = self._needed_from_cut()
        self._grid = self._grids()
        self._make_columns()
        for a in range(len(cuts)):
            self._make_window(a)
        self._make_forward_rows()
        self.program = LinearProgram(self._costs, self._uppers, self._rows)
        self._own = [
            [v for v in {*spine.inputs[op], *made} if v not in spine.free]
            for op, made in enumerate(spine.indexed.outputs)
        ]
        pairs = [(op, v) for op, own in enumerate(self._own) for v in own]
        self._own_op, self._own_value = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def _column(self, cost: float, upper: float = 1.0) -> int:
        self._costs.append(cost)
        self._uppers.append(upper)
        return len(self._costs) - 1

    def _needed_from_cut(self) -> tuple[list[set[int]], list[set[int]]]:
        """Per cut the values that may be read after it; per window the ones read."""
        spine = self.spine
        needed: set[int] = set()
        all_needed, all_read = [], []
        for cut, end in zip(reversed(self.cuts), reversed(self.ends), strict=True):
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

    def _grids(self) -> NDArray[np.bool_]:
        """Per cut and operation: whether the program says there what of its outputs is live."""
        count, last = len(self.cuts), self.spine.last_use
        until = [max((last[v] for v in made), default=-1) for made in self._indexed.outputs]
        end = np.searchsorted(np.array(self.cuts), np.array(until), side="left")
        at = np.arange(count + 1)[:, None]
        coarse = (at % SPARSE == 0) | (at == count)
        grid: NDArray[np.bool_] = (at == 0) | coarse | ((at < end + 1) & (at >= end - DENSE))
        return grid

    def _make_live(self, a: int) -> None:
        if a > 0:
            for v in sorted(self._needed[a]):
                if self._grid[a, self._producer[v]]:
                    self.live[a, v] = self._column(0.0)
            return
        at_once = self.spine.reads[0]
        for v in sorted(self._needed[0] | at_once):
            barred = self._indexed.problem.values[v].must_recompute
            self.live[0, v] = column = self._column(0.0, 0.0 if barred else 1.0)
            if v in at_once:
                self._rows.append(({column: 1.0}, 1.0, math.inf))

    def _make_runs(self, a: int) -> None:
        ops = {self._indexed.producer[v] for v in self._needed[a] if self.spine.remade[v]}
        for op in sorted(ops):
            if self._grid[a, op] or self.runs[a - 1, op] < 0:
                self.runs[a, op] = self._column(self._indexed.time_us[op])
            else:
                self.runs[a, op] = self.runs[a - 1, op]

    def _make_columns(self) -> None:
        count, values = len(self.cuts), len(self._nbytes)
        self.live = np.full((count + 1, values), NONE)
        self.runs = np.full((count, len(self._indexed.phase)), NONE)
        for a in range(count):
            self._make_live(a)
            self._make_runs(a)
        grid = self._grid[:, self._producer]
        self._start = np.zeros((count, values), dtype=np.int64)
        end = np.full((count + 1, values), count)
        for a in range(1, count):
            self._start[a] = np.where(grid[a], a, self._start[a - 1])
        for a in reversed(range(count)):
            end[a] = np.where(grid[a + 1], a + 1, end[a + 1])
        every = np.arange(values)
        self.made = np.where(self.remade, self.runs[:, self._producer], NONE)
        self.before, self.after = self.live[self._start, every], self.live[end[:-1], every]
        self.between = np.where(self._start < np.arange(count)[:, None], self.made, NONE)
        self.is_new = np.ones(self.runs.shape, dtype=bool)
        self.is_new[1:] = self.runs[1:] != self.runs[:-1]
        self.is_alone = self.is_new & (self.runs != NONE)
        self.is_alone[:-1] &= self.is_new[1:]

    def _make_window(self, a: int) -> None:
        for v in sorted(self.read[a]):
            self._rows.append((self._sources(a, a + 1, v), 1.0, math.inf))
        for op in np.flatnonzero((self.runs[a] >= 0) & self.is_new[a]).tolist():
            column = int(self.runs[a, op])
            b = a + int((self.runs[a:, op] == column).sum())
            for u in self.spine.inputs[op]:
                self._row_at_most(column, self._sources(a, b, u))
        for v in np.flatnonzero(self.live[a + 1] >= 0).tolist():
            self._row_at_most(
                int(self.live[a + 1, v]), self._sources(int(self._start[a, v]), a + 1, v)
            )

    def _sources(self, a: int, b: int, v: int) -> dict[int, float]:
        """Columns of which one is 1 if v can be read between the cuts a and b."""
        columns = {int(self.before[a, v]), *self.made[self._start[a, v] : b, v].tolist()}
        return {column: 1.0 for column in sorted(columns) if column >= 0}

    def _row_at_most(self, column: int, sources: dict[int, float]) -> None:
        row = dict(sources)
        row[column] = row.get(column, 0.0) - 1.0
        self._rows.append((row, 0.0, math.inf))

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
                if self.live[0, v] >= 0:
                    self._row_at_most(int(self.live[0, v]), {column: 1.0})
            for u in indexed.inputs[op]:
                if indexed.producer[u] in ahead:
                    self._row_at_most(column, {ahead[indexed.producer[u]]: 1.0})
            pieces = sorted({c for c in self.runs[:, op].tolist() if c >= 0})
            if not indexed.problem.ops[op].recomputable:
                self._rows.append((dict.fromkeys([column, *pieces], 1.0), -math.inf, 1.0))
            if op in must_run:
                pieces = pieces or [self._column(indexed.time_us[op])]
                self._rows.append((dict.fromkeys([column, *pieces], 1.0), 1.0, math.inf))

    def _must_run(self) -> set[int]:
        """EITHER operations that run at least once in every plan."""
        indexed = self._indexed
        stack = [indexed.producer[v] for v, pinned in enumerate(indexed.pinned) if pinned]
        stack += [indexed.producer[v] for op in self.spine.ops for v in indexed.inputs[op]]
        found: set[int] = set()
        while stack:
            op = stack.pop()
            if indexed.phase[op] is Phase.EITHER and op not in found:
                found.add(op)
                stack.extend(indexed.producer[v] for v in indexed.inputs[op])
        return found

    def point(self, values: list[float]) -> Point:
        """A point in the shape of cuts and windows."""
        x = np.array([*values, 0.0])  # the last one stands for NONE
        return Point(
            x,
            x[self.live],
            x[self.after],
            x[self.before] + x[self.between],
            x[self.runs],
            x[self.made],
        )

    def loads(self, point: Point) -> list[float]:
        """Lower bound on live bytes per FORWARD operation, then per position, at a point."""
        forward = self.spine.forward
        steps = len(forward.nbytes)
        change = np.zeros(steps + 1)
        np.add.at(change, np.array(forward.counted_until), self._nbytes * point.live[0])
        loads: list[float] = (np.array(forward.nbytes) + np.cumsum(change[:-1])).tolist()
        for a in range(len(self.cuts)):
            loads.extend(self._window_loads(a, point))
        return loads

    def _window_loads(self, a: int, point: Point) -> list[float]:
        """Lower bounds at the positions from cut a to before the next cut."""
        load = self.spine.load_nbytes
        is_last = a + 1 == len(self.cuts)
        last = self.ends[a] + is_last
        needed = np.zeros(len(self._nbytes), dtype=bool)
        needed[list(self._needed[a])] = True
        size = np.where(needed, self._nbytes, 0)
        at_end = np.maximum(0.0, point.after[a] - point.made[a]) * size
        if_read = np.maximum(0.0, 1.0 - point.made[a]) * size
        held = at_end
        if not is_last:
            later = list(self.spine.reads[last])
            held[later] = np.maximum(held, if_read)[later]
        best = np.maximum(at_end, if_read)
        result = []
        for k in range(last - 1, self.cuts[a], -1):
            now = list(self.spine.reads[k])
            result.append(load[k] + float(held.sum()) - float(held[now].sum()))
            held[now] = best[now]
        at_cut = self._start[a] == a
        kept = np.where(at_cut, self._nbytes * point.live[a], np.maximum(at_end, held))
        kept[list(self.spine.reads[self.cuts[a]])] = 0.0
        result.append(load[self.cuts[a]] + float(kept.sum()))
        return result[::-1]

    def load_row(self, slot: int, point: Point) -> Load:
        """The row of a slot of `loads`."""
        forward = self.spine.forward
        steps = len(forward.nbytes)
        nbytes = self._indexed.nbytes
        if slot < steps:
            until = forward.counted_until
            kept = np.flatnonzero(self.live[0] >= 0).tolist()
            terms = [(nbytes[v], int(self.live[0, v]), NONE) for v in kept if until[v] <= slot]
            return Load(forward.nbytes[slot], terms)
        position = slot - steps
        a = bisect_left(self.cuts, position + 1) - 1
        constant = self.spine.load_nbytes[position]
        if self.cuts[a] == position:
            kept = np.flatnonzero(self.live[a] >= 0).tolist()
            now = self.spine.reads[position]
            terms = [(nbytes[v], int(self.live[a, v]), NONE) for v in kept if v not in now]
            skip = now.union(np.flatnonzero(self._start[a] == a).tolist())
            later = self._later(a, position)
            return Load(constant, terms + self._held_terms(a, point, later, skip))
        later = self._later(a, position)
        skip = self.spine.reads[position]
        return Load(constant, self._held_terms(a, point, later, skip))

    def _later(self, a: int, position: int) -> set[int]:
        """What positions of a window read after one of them."""
        return set().union(*self.spine.reads[position + 1 : self.ends[a] + 1])

    def _held_terms(
        self, a: int, point: Point, later: Set[int], skip: Set[int]
    ) -> list[tuple[int, int, int]]:
        """Terms of values that stay live through window a, of those that the point holds there."""
        nbytes, terms = self._indexed.nbytes, []
        for v in sorted(self._needed[a]):
            if v in skip or not nbytes[v]:
                continue
            run = int(self.made[a, v])
            if v in later and point.made[a, v] < 1.0:
                terms.append((nbytes[v], NONE, run))
            elif point.after[a, v] > point.made[a, v]:
                terms.append((nbytes[v], int(self.after[a, v]), run))
        return terms

    def transient_loads(self, a: int, point: Point) -> Vector:
        """Per operation: lower bound on live bytes while it runs again in window a."""
        held = self._held(a, point)
        run = point.runs[a]
        total = self._between(a) + float(held @ self._nbytes)
        ws = np.array(self._indexed.least_extra_nbytes)
        own = np.maximum(0.0, run[self._own_op] - held[self._own_value])
        own = own * self._nbytes[self._own_value]
        loads = total + run * ws
        np.add.at(loads, self._own_op, own)
        alone = self._grid[a] & self._grid[a + 1] & (self.runs[a] >= 0)
        return np.where(alone, loads, 0.0)

    def _held(self, a: int, point: Point) -> Vector:
        """Per value, at least what of it is live all through window a."""
        held: Vector = np.maximum(0.0, point.after[a] - point.made[a])
        if a + 1 < len(self.cuts):
            later = list(self.spine.reads[self.ends[a]])
            held[later] = np.maximum(held, 1.0 - point.made[a])[later]
        return held

    def _between(self, a: int) -> int:
        """What is live in every plan at each moment of window a."""
        spine = self.spine
        between = spine.between_nbytes[self.cuts[a] + 1 : self.ends[a] + 1]
        if a + 1 < len(self.cuts):
            return min(between)
        at_end = sum(self._indexed.nbytes[v] for v in spine.free if self._indexed.pinned[v])
        return min([*between, self._indexed.problem.resident_nbytes + at_end])

    def transient_row(self, a: int, op: int, point: Point) -> Load:
        """The row of an entry of `transient_loads`."""
        held, run = self._held(a, point), point.runs[a, op]
        own = {v for v in self._own[op] if held[v] <= run}
        later = self.spine.reads[self.ends[a]] if a + 1 < len(self.cuts) else frozenset[int]()
        terms = self._held_terms(a, point, later, own)
        nbytes = sum(self._indexed.nbytes[v] for v in own) + self._indexed.least_extra_nbytes[op]
        terms.append((nbytes, int(self.runs[a, op]), NONE))
        return Load(self._between(a), terms)

    def is_tight(self, path: Path, point: Point) -> bool:
        """Whether a point comes close to breaking a path's row."""
        row, least, _ = self.path_row(path)
        return bool(sum(x * point.values[c] for c, x in row.items()) < least + CLOSE)

    def path_row(self, path: Path) -> Row:
        """The row of a path of this program or of one with fewer cuts; empty without columns."""
        a, b = bisect_left(self.cuts, path.after), bisect_left(self.ends, path.until)
        values = list(path.values)
        columns = [self.before[a, values], self.between[a, values]]
        if path.op != NO_OP:
            columns.append(self.runs[a : b + 1, path.op])
        row = {column: 1.0 for column in np.concatenate(columns).tolist() if column != NONE}
        if path.live is None:
            return row, 1.0, math.inf
        begin = bisect_left(self.cuts, path.live)
        column = int(self.live[begin, values[-1]])
        if path.run != NO_OP:
            column = int(self.runs[begin, path.run]) if self.is_alone[begin, path.run] else NONE
        if column == NONE:
            return {}, 0.0, math.inf
        row[column] = row.get(column, 0.0) - 1.0
        return row, 0.0, math.inf
