"""The interval program: what is live at some positions of the spine, what runs again in between.

DOC
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.bounds.spine import Spine
from autoremat_solver.problem import Phase
from autoremat_solver.program.formulation import LinearProgram, Row

Vector = NDArray[np.float64]
Numbers = NDArray[np.int64]
Columns = dict[int, int]
NONE = -1
MOST_PARTS = 24  # of rounded rows
LEAST_OVER = 1e-4
SMALL = 100_000  # a value this often in the budget is left out: it disturbs the arithmetic
SPARSE = 3
DENSE = 24


@dataclass(frozen=True)
class Path:
    """A way from what is read, or live, in a window back to a run, of which each step was kept."""

    after: int
    until: int
    op: int
    values: tuple[int, ...]
    live: int | None


@dataclass(frozen=True)
class Load:
    """Bytes that are live at one moment, as a row.

    Attributes:
        constant: live in every plan.
        terms: (bytes, plus, minus): live if column `plus` is 1 (or NONE: always) and `minus` is not.
    """

    constant: int
    terms: list[tuple[int, int, int]]


class IntervalProgram:
    """One set of cuts."""

    def __init__(self, spine: Spine, cuts: list[int]) -> None:
        """Make columns and rows."""
        self._spine = spine
        self._indexed = spine.indexed
        self.cuts = cuts
        last = len(spine.ops) - 1
        self._ends = [*cuts[1:], last]
        self._costs: list[float] = []
        self._uppers: list[float] = []
        self._rows: list[Row] = []
        self._needed, self._read = self._needed_from_cut()
        count, ops = len(cuts), len(spine.indexed.phase)
        values = len(spine.indexed.nbytes)
        self.live = np.full((count + 1, values), NONE)
        self.runs = np.full((count, ops), NONE)
        self._grid = self._grids()
        self._nbytes = np.array(spine.indexed.nbytes, dtype=np.int64)
        self._producer = np.array(spine.indexed.producer)
        self._remade = np.array(spine.remade, dtype=bool)
        for a in range(count):
            self._make_live(a)
            self._make_runs(a)
        self.made = np.where(self._remade, self.runs[:, self._producer], NONE)
        self._fill()
        for a in range(count):
            self._make_window(a)
        self._make_forward_rows()
        self._own = [
            [v for v in {*spine.inputs[op], *spine.indexed.outputs[op]} if v not in spine.free]
            for op in range(ops)
        ]
        pairs = [(op, v) for op, own in enumerate(self._own) for v in own]
        self._own_op = np.array([op for op, _ in pairs], dtype=np.int64)
        self._own_value = np.array([v for _, v in pairs], dtype=np.int64)
        self.program = LinearProgram(self._costs, self._uppers, self._rows)

    @property
    def column_count(self) -> int:
        """How large the program is."""
        return len(self._costs)

    # ---- columns

    def _column(self, cost: float, upper: float = 1.0) -> int:
        self._costs.append(cost)
        self._uppers.append(upper)
        return len(self._costs) - 1

    def _needed_from_cut(self) -> tuple[list[set[int]], list[set[int]]]:
        """Per cut the values that may be read after it; per window the ones read."""
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

    def _grids(self) -> NDArray[np.bool_]:
        """Per cut and operation: whether the program says there what of its outputs is live."""
        count, last = len(self.cuts), self._spine.last_use
        until = [max((last[v] for v in made), default=-1) for made in self._indexed.outputs]
        end = np.searchsorted(np.array(self.cuts), np.array(until), side="left")
        at = np.arange(count + 1)[:, None]
        coarse = (at % SPARSE == 0) | (at == count)
        return (at == 0) | coarse | ((at < end + 1) & (at >= end - DENSE))

    def _make_live(self, a: int) -> None:
        if a > 0:
            for v in sorted(self._needed[a]):
                if self._grid[a, self._producer[v]]:
                    self.live[a, v] = self._column(0.0)
            return
        at_once = self._spine.reads[0]
        for v in sorted(self._needed[0] | at_once):
            barred = self._indexed.problem.values[v].must_recompute
            self.live[0, v] = column = self._column(0.0, 0.0 if barred else 1.0)
            if v in at_once:
                self._rows.append(({column: 1.0}, 1.0, math.inf))

    def _make_runs(self, a: int) -> None:
        ops = {self._indexed.producer[v] for v in self._needed[a] if self._spine.remade[v]}
        for op in sorted(ops):
            if self._grid[a, op] or self.runs[a - 1, op] < 0:
                self.runs[a, op] = self._column(self._indexed.time_us[op])
            else:
                self.runs[a, op] = self.runs[a - 1, op]

    def _fill(self) -> None:
        """The grid points around each window: `start` at or before its cut, `end` after it."""
        count = len(self.cuts)
        grid = self._grid[:, self._producer]
        self.start = np.empty((count, grid.shape[1]), dtype=np.int64)
        self.end = np.empty((count, grid.shape[1]), dtype=np.int64)
        for a in range(count):
            self.start[a] = np.where(grid[a], a, self.start[a - 1] if a else 0)
        for a in reversed(range(count)):
            self.end[a] = np.where(grid[a + 1], a + 1, self.end[a + 1] if a + 1 < count else count)
        every = np.arange(grid.shape[1])
        self.before = self.live[self.start, every]  # the column of what is live at the start
        self.after = self.live[self.end, every]
        inside = self.start < np.arange(count)[:, None]
        self.between = np.where(inside, self.made, NONE)
        self.is_new = np.ones(self.runs.shape, dtype=bool)
        self.is_new[1:] = self.runs[1:] != self.runs[:-1]

    def _make_window(self, a: int) -> None:
        for v in sorted(self._read[a]):
            self._rows.append((self._sources(a, a + 1, v), 1.0, math.inf))
        for op in np.flatnonzero((self.runs[a] >= 0) & self.is_new[a]).tolist():
            column = int(self.runs[a, op])
            b = a + int((self.runs[a:, op] == column).sum())
            for u in self._spine.inputs[op]:
                self._row_at_most(column, self._sources(a, b, u))
        for v in np.flatnonzero(self.live[a + 1] >= 0).tolist():
            self._row_at_most(int(self.live[a + 1, v]), self._sources(int(self.start[a, v]), a + 1, v))

    def _sources(self, a: int, b: int, v: int) -> dict[int, float]:
        """Columns of which one is 1 if v can be read between the cuts a and b."""
        columns = {int(self.before[a, v]), *self.made[self.start[a, v] : b, v].tolist()}
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
        stack += [indexed.producer[v] for op in self._spine.ops for v in indexed.inputs[op]]
        found: set[int] = set()
        while stack:
            op = stack.pop()
            if indexed.phase[op] is Phase.EITHER and op not in found:
                found.add(op)
                stack.extend(indexed.producer[v] for v in indexed.inputs[op])
        return found

    # ---- loads

    def point(self, values: list[float]) -> Point:
        x = np.array([*values, 0.0])  # the last one stands for NONE
        return Point(
            x, x[self.live], x[self.after], x[self.before] + x[self.between], x[self.runs], x[self.made]
        )

    def loads(self, point: Point) -> list[float]:
        """Lower bound on live bytes per FORWARD operation, then per position, at a point."""
        forward = self._spine.forward
        steps = len(forward.nbytes)
        change = np.zeros(steps + 1)
        np.add.at(change, np.array(forward.counted_until), self._nbytes * point.live[0])
        loads = (np.array(forward.nbytes) + np.cumsum(change[:-1])).tolist()
        for a in range(len(self.cuts)):
            loads.extend(self._window_loads(a, point))
        return loads

    def _window_loads(self, a: int, point: Point) -> list[float]:
        """Lower bounds at the positions from cut a to before the next cut."""
        load = self._spine.load_nbytes
        is_last = a + 1 == len(self.cuts)
        last = self._ends[a] + is_last
        needed = np.zeros(len(self._nbytes), dtype=bool)
        needed[list(self._needed[a])] = True
        size = np.where(needed, self._nbytes, 0)
        at_end = np.maximum(0.0, point.after[a] - point.made[a]) * size
        if_read = np.maximum(0.0, 1.0 - point.made[a]) * size
        held = at_end
        if not is_last:
            later = list(self._spine.reads[last])
            held[later] = np.maximum(held, if_read)[later]
        best = np.maximum(at_end, if_read)
        result = []
        for k in range(last - 1, self.cuts[a], -1):
            now = list(self._spine.reads[k])
            result.append(load[k] + float(held.sum()) - float(held[now].sum()))
            held[now] = best[now]
        at_cut = self.start[a] == a
        kept = np.where(at_cut, self._nbytes * point.live[a], np.maximum(at_end, held))
        kept[list(self._spine.reads[self.cuts[a]])] = 0.0
        result.append(load[self.cuts[a]] + float(kept.sum()))
        return result[::-1]

    def load_row(self, slot: int, point: Point) -> Load:
        """The row of a slot of `loads`."""
        forward = self._spine.forward
        steps = len(forward.nbytes)
        nbytes = self._indexed.nbytes
        if slot < steps:
            until = forward.counted_until
            kept = np.flatnonzero(self.live[0] >= 0).tolist()
            terms = [(nbytes[v], int(self.live[0, v]), NONE) for v in kept if until[v] <= slot]
            return Load(forward.nbytes[slot], terms)
        position = slot - steps
        a = bisect_left(self.cuts, position + 1) - 1
        constant = self._spine.load_nbytes[position]
        if self.cuts[a] == position:
            kept = np.flatnonzero(self.live[a] >= 0).tolist()
            now = self._spine.reads[position]
            terms = [(nbytes[v], int(self.live[a, v]), NONE) for v in kept if v not in now]
            skip = now.union(np.flatnonzero(self.start[a] == a).tolist())
            later = self._later(a, position)
            return Load(constant, terms + self._held_terms(a, point, later, skip))
        later = self._later(a, position)
        skip = self._spine.reads[position]
        return Load(constant, self._held_terms(a, point, later, skip))

    def _later(self, a: int, position: int) -> set[int]:
        """What positions of a window read after one of them."""
        return set().union(*self._spine.reads[position + 1 : self._ends[a] + 1])

    def _held_terms(self, a, point, later, skip):  # type: ignore
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
        ws = np.array(self._indexed.workspace_nbytes)
        own = np.maximum(0.0, run[self._own_op] - held[self._own_value])
        own = own * self._nbytes[self._own_value]
        loads = total + run * ws
        np.add.at(loads, self._own_op, own)
        alone = self._grid[a] & self._grid[a + 1] & (self.runs[a] >= 0)
        return np.where(alone, loads, 0.0)

    def _held(self, a: int, point: Point) -> Vector:
        held = np.maximum(0.0, point.after[a] - point.made[a])
        if a + 1 < len(self.cuts):
            later = list(self._spine.reads[self._ends[a]])
            held[later] = np.maximum(held, 1.0 - point.made[a])[later]
        return held

    def _between(self, a: int) -> int:
        spine = self._spine
        between = spine.between_nbytes[self.cuts[a] + 1 : self._ends[a] + 1]
        if a + 1 < len(self.cuts):
            return min(between)
        pinned = sum(n for v, n in enumerate(self._indexed.nbytes) if self._indexed.pinned[v] and v in spine.free)
        return min([*between, self._indexed.problem.resident_nbytes + pinned])

    def transient_row(self, a: int, op: int, point: Point) -> Load:
        """The row of an entry of `transient_loads`."""
        held, run = self._held(a, point), point.runs[a, op]
        own = {v for v in self._own[op] if held[v] <= run}
        later = self._spine.reads[self._ends[a]] if a + 1 < len(self.cuts) else set()
        terms = self._held_terms(a, point, later, own)
        nbytes = sum(self._indexed.nbytes[v] for v in own) + self._indexed.workspace_nbytes[op]
        terms.append((nbytes, int(self.runs[a, op]), NONE))
        return Load(self._between(a), terms)

    # ---- paths

    def paths(self, point: Point, least: float, most: int) -> list[Path]:
        """Rows `sum >= right side` broken at the point: what is read after a cut was held or made."""
        spine, indexed = self._spine, self._indexed
        count, nv = len(self.cuts), len(indexed.nbytes)
        order = [op for op in reversed(range(len(indexed.phase))) if (self.runs[:, op] >= 0).any()]
        found = []
        for a in range(count - 1):
            need = np.zeros((nv, count - a))
            why = np.full((nv, count - a), -1, dtype=np.int64)  # -1 start: read; -2: live at b; else op
            start = np.full((nv, count - a), -1, dtype=np.int64)
            kept = point.kept[a]
            read: set[int] = set()
            for i in range(count - a):
                if i:
                    need[:, i] = need[:, i - 1]
                    start[:, i] = start[:, i - 1]
                fresh = np.array(sorted(self._read[a + i] - read), dtype=np.int64)
                read |= self._read[a + i]
                better = fresh[1.0 - kept[fresh] >= need[fresh, i]] if len(fresh) else fresh
                need[better, i] = 1.0 - kept[better]
                start[better, i] = 0
                more = point.live[a + i + 1] - kept
                better = np.flatnonzero(more > need[:, i] + 1e-9)
                need[better, i] = more[better]
                start[better, i] = a + i + 1
            fresh_runs = np.where(self.is_new[a:], point.runs[a:], 0.0)
            fresh_runs[0] = point.runs[a]
            made = np.cumsum(fresh_runs, axis=0).T  # ops x ends
            for op in order:
                outs = [v for v in indexed.outputs[op] if self._remade[v]]
                if not outs:
                    continue
                req = need[outs].max(axis=0)
                for u in spine.inputs[op]:
                    new = req - kept[u]
                    better = new > need[u] + 1e-9
                    if better.any():
                        need[u][better] = new[better]
                        why[u][better] = op
                gap = req - made[op]
                i = int(gap.argmax())
                if gap[i] > least:
                    # earliest end with about the same gap
                    i = int(np.argmax(gap >= gap[i] - 1e-9))
                    v = max(outs, key=lambda v: need[v, i])
                    found.append((float(gap[i]), a, i, op, v, need, why, start))
            fixed = np.flatnonzero(~self._remade & (self.before[a] >= 0))
            for v in fixed.tolist():
                i = int(need[v].argmax())
                if need[v, i] > least and why[v, i] >= 0:
                    found.append((float(need[v, i]), a, i, -1, v, need, why, start))
        found.sort(key=lambda f: -f[0])
        return [self._path(*f[1:]) for f in found[:most]]

    def _path(self, a, i, op, v, need, why, start):  # type: ignore
        values = [v]
        while (through := int(why[v, i])) >= 0:
            outs = [w for w in self._indexed.outputs[through] if self._remade[w]]
            v = max(outs, key=lambda w: need[w, i])
            values.append(v)
        at = int(start[v, i])
        return Path(self.cuts[a], self._ends[a + i], op, tuple(values), self.cuts[at] if at else None)

    def is_tight(self, path: Path, point: Point) -> bool:
        """Whether the point comes close to breaking a path's row."""
        row, right = self.path_row(path)
        return sum(x * point.values[c] for c, x in row.items()) < right + 0.05

    def path_row(self, path: Path) -> tuple[dict[int, float], float]:
        """The row of a path of this program or of one with fewer cuts: sum >= right side."""
        a = bisect_left(self.cuts, path.after)
        b = bisect_left(self._ends, path.until)
        row: dict[int, float] = {}
        columns = [self.runs[a : b + 1, path.op]] if path.op >= 0 else []
        values = list(path.values)
        for column in np.concatenate([*columns, self.before[a, values], self.between[a, values]]).tolist():
            if column >= 0:
                row[column] = 1.0
        if path.live is None:
            return row, 1.0
        column = int(self.live[bisect_left(self.cuts, path.live), path.values[-1]])
        if column < 0:
            return {}, 0.0
        row[column] = row.get(column, 0.0) - 1.0
        return row, 0.0


@dataclass(frozen=True)
class Point:
    """A point of the program: per cut the live values, per window the runs and what they make."""

    values: Vector
    live: Vector
    after: Vector
    kept: Vector
    runs: Vector
    made: Vector


def as_row(load: Load, budget: int, parts: int = 0) -> tuple[dict[int, float], float]:
    """The row that keeps a load within the budget: coefficients, and the most their sum may be.

    Args:
        load: what is live.
        budget: bytes.
        parts: 0 for bytes. Else a value counts how often it holds more than one of so many equal
            parts of the room: together these are fewer than the parts, as values are whole.
    """
    row: dict[int, float] = {}
    room = budget - load.constant
    right = parts - 1 if parts else room
    for nbytes, plus, minus in load.terms:
        if nbytes * SMALL < budget:
            continue
        size = _in_parts(nbytes, room, parts) if parts else nbytes
        if plus == NONE:
            right -= size
        elif size:
            row[plus] = row.get(plus, 0) + size
        if minus != NONE and size:
            row[minus] = row.get(minus, 0) - size
    return {c: float(x) for c, x in row.items() if x}, float(right)


def _in_parts(nbytes: int, room: int, parts: int) -> int:
    """How many parts of the room a size exceeds, `parts` at most."""
    if nbytes * parts > room * parts:
        return parts
    return (nbytes * parts - 1) // room if nbytes else 0


def too_large(load: Load, budget: int, values: Vector) -> list[tuple[int, int]]:
    """Columns `plus` and `minus` of values above the room: if one is live, `minus` is 1."""
    room = budget - load.constant
    return [
        (plus, minus)
        for nbytes, plus, minus in load.terms
        if nbytes > room and (1.0 if plus == NONE else values[plus]) - values[minus] > LEAST_OVER
    ]


def most_broken_parts(load: Load, budget: int, values: Vector) -> int:
    """The parts of `as_row` whose row the point breaks most; 0 if it breaks none."""
    room = budget - load.constant
    if room < 0:
        return 0
    size = np.array([term[0] for term in load.terms], dtype=np.int64)
    plus = np.array([term[1] for term in load.terms], dtype=np.int64)
    minus = np.array([term[2] for term in load.terms], dtype=np.int64)
    live = np.where(plus == NONE, 1.0, values[plus]) - values[minus]
    keep = (live > 1e-6) & (size > 0) & (size <= room)
    size, live = size[keep], live[keep]
    parts = np.arange(2, MOST_PARTS + 1)[:, None]
    counted = (size * parts - 1) // max(1, room)
    over = (counted @ live - parts[:, 0] + 1) / parts[:, 0]
    best = int(over.argmax())
    return best + 2 if over[best] > LEAST_OVER else 0
