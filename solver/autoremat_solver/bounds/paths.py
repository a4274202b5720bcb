"""Ways back from what is read to a run: rows of the interval program where a point breaks them.

Enters: an `IntervalProgram` and a point of it. Leaves: `Path`s. For a value v that a position in
(a, b] reads, and operations p(v), p(u), ... of which each reads the next value: v was live at cut
a, or made in between, and then so was u, and so on. Hence for each way v, u, ..., w back from v

    y_v^a + y_u^a + ... + y_w^a + sum of z_p(w) over the windows in (a, b] >= 1

and with y_v^b at the right side for a v that is live at b, or z_o of a window in between for an o
that reads v. Without these rows a point makes a value
in small parts, in many windows, and pays for the way to it only once. There are too many to state;
of those with one start and one last run, the one that a point breaks most is found by going back
through the operations once, for all b together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autoremat_solver.bounds.intervals import IntervalProgram, Point

NO_OP = -1
EQUAL = 1e-9


@dataclass(frozen=True)
class Path:
    """One row, in words that hold for every set of cuts with these positions among them.

    Attributes:
        after: position of cut a.
        until: last position of the window that ends at b.
        op: the last run of the way; `NO_OP` if its last value cannot be made again.
        values: each may have been live at cut a.
        live: the position at which the first value of the way is live; None if it is read.
        run: the operation that reads the first value in the window that begins at `live`; `NO_OP`
            if it is live there, or read.
    """

    after: int
    until: int
    op: int
    values: tuple[int, ...]
    live: int | None
    run: int = NO_OP


def broken_paths(program: IntervalProgram, point: Point, least: float, most: int) -> list[Path]:
    """Paths whose rows a point breaks by more than `least`, the worst first."""
    spine = program.spine
    order = np.flatnonzero((program.runs >= 0).any(axis=0))[::-1].tolist()
    made_by = [[v for v in made if spine.remade[v]] for made in spine.indexed.outputs]
    found: list[tuple[float, int, Path]] = []
    for a in range(len(program.cuts) - 1):
        start = _Start(program, point, a, made_by)
        for broken, path in start.broken(order, least):
            found.append((-broken, len(found), path))
    return [path for _, _, path in sorted(found)[:most]]


class _Start:
    """The ways back to one cut. Arrays are [values, ends], the end of window a first."""

    def __init__(
        self, program: IntervalProgram, point: Point, a: int, made_by: list[list[int]]
    ) -> None:
        """Note what is read, or live, at each end."""
        self._program, self._point, self._a, self._made_by = program, point, a, made_by
        ends = len(program.cuts) - a
        self._kept = point.kept[a]
        shape = (len(self._kept), ends)
        self._need = np.zeros(shape)  # how much of a value must have been made since the cut
        self._reader = np.full(shape, NO_OP)  # the operation of the way that reads it
        self._live = np.zeros(shape, dtype=np.int64)  # the cut at which the way begins; 0: a read
        self._window: dict[int, NDArray[np.int64]] = {}  # by operation, where its way begins, or -1
        self._most, self._last = self._runs_alone()
        read = np.zeros(shape[0], dtype=bool)
        for i in range(ends):
            self._begin(i, read)
        is_needed: NDArray[np.bool_] = np.any(self._need > 0.0, axis=1)
        self._wanted: list[bool] = is_needed.tolist()  # by value

    def _begin(self, i: int, read: NDArray[np.bool_]) -> None:
        """Ways that begin in window a + i, or before it."""
        need, live = self._need, self._live
        if i:
            need[:, i], live[:, i] = need[:, i - 1], live[:, i - 1]
        read[list(self._program.read[self._a + i])] = True
        now = read & (1.0 - self._kept >= need[:, i])
        need[now, i], live[now, i] = 1.0 - self._kept[now], 0
        cut = self._a + i + 1
        at_end = self._point.live[cut] - self._kept
        now = at_end > need[:, i] + EQUAL
        need[now, i], live[now, i] = at_end[now], cut

    def broken(self, order: list[int], least: float) -> list[tuple[float, Path]]:
        """Per operation, readers first, the way that ends with it and is broken most."""
        runs = np.where(self._program.is_new[self._a :], self._point.runs[self._a :], 0.0)
        runs[0] = self._point.runs[self._a]
        made = np.ascontiguousarray(runs.cumsum(axis=0).T)
        runs_alone = (self._most[:, -1] > EQUAL).tolist()
        found = []
        for op in order:
            values = self._made_by[op]
            if not values or not (runs_alone[op] or any(map(self._wanted.__getitem__, values))):
                continue  # nothing is read of it, nor asked of what it reads
            alone = len(values) == 1
            need = self._need[values[0]] if alone else self._need[values].max(axis=0)
            self._go_back(op, self._with_runs(op, need))
            gap = need - made[op]
            most = np.maximum.reduce(gap)
            if most > least:
                i = int(np.argmax(gap >= most - EQUAL))
                found.append((float(gap[i]), self._path(op, self._most_needed(op, i), i)))
        return found + self._broken_fixed(least)

    def _with_runs(self, op: int, need: NDArray[np.float64]) -> NDArray[np.float64]:
        """How much of the inputs is needed: as much as of the results, or as one window runs."""
        most = self._most[op]
        more = most > need + EQUAL
        self._window[op] = np.where(more, self._last[op], -1)
        return np.where(more, most, need)

    def _runs_alone(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Per operation and end, the most that one window up to it runs, and the last such one."""
        alone = self._program.is_alone[self._a :]
        runs = np.where(alone, self._point.runs[self._a :], 0.0).T
        most = np.maximum.accumulate(runs, axis=1)
        last = np.maximum.accumulate(np.where(runs >= most, np.arange(runs.shape[1]), 0), axis=1)
        return most, last

    def _go_back(self, op: int, need: NDArray[np.float64]) -> None:
        most = float(np.maximum.reduce(need)) - EQUAL
        for u in self._program.spine.inputs[op]:
            if self._kept[u] >= most:
                continue
            more = need - self._kept[u]
            now = more > self._need[u] + EQUAL
            self._need[u, now], self._reader[u, now] = more[now], op
            self._wanted[u] = True

    def _broken_fixed(self, least: float) -> list[tuple[float, Path]]:
        """Ways that end with a value that no second run can make."""
        fixed = np.flatnonzero(~self._program.remade & (self._program.before[self._a] >= 0))
        found = []
        for v in fixed.tolist():
            i = int(self._need[v].argmax())
            if self._need[v, i] > least and self._reader[v, i] != NO_OP:
                found.append((float(self._need[v, i]), self._path(NO_OP, v, i)))
        return found

    def _most_needed(self, op: int, i: int) -> int:
        return max(self._made_by[op], key=lambda v: float(self._need[v, i]))

    def _path(self, op: int, v: int, i: int) -> Path:
        values = [v]
        while (reader := int(self._reader[values[-1], i])) != NO_OP:
            window = int(self._window[reader][i])
            if window >= 0:
                return self._ended(op, values, i, self._a + window, reader)
            values.append(self._most_needed(reader, i))
        return self._ended(op, values, i, int(self._live[values[-1], i]) or None, NO_OP)

    def _ended(self, op: int, values: list[int], i: int, cut: int | None, run: int) -> Path:
        cuts, until = self._program.cuts, self._program.ends[self._a + i]
        live = None if cut is None else cuts[cut]
        return Path(cuts[self._a], until, op, tuple(values), live, run)
