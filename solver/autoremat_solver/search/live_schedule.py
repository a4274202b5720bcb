"""A schedule under edit, with its live bytes: what a change does to them is known beforehand.

Enters: a schedule of a graph without phases, and a budget. Leaves: for a run put elsewhere, reruns
put in, or a run taken out, an edit that tells by how much the excess over the budget and the time
change; `apply` makes it. Only the steps between which a value's life changes are looked at, in
place of a whole simulation. `simulate` stays the definition of live bytes (a test compares).

A run is one occurrence of an operation. A boundary is a place between steps: that before the step
of the same number, and one past the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.fast_measure import EXACT_NBYTES
from autoremat_solver.simulate import measure

Span = tuple[int, int, int]  # first step, last step, bytes more
Rebinding = tuple[int, int, int, list[int]]  # place in a chain, value, run read so far, who reads


@dataclass(slots=True)
class Edit:
    """A change that is not made yet.

    Attributes:
        excess: by how much the excess of the schedule changes.
        time_us: by how much its time changes.
        spans: steps, as they are numbered now, at which more bytes (or fewer) are live.
        width: steps looked at.
    """

    excess: int
    time_us: float
    spans: list[Span]
    width: int


@dataclass(slots=True)
class Shift(Edit):
    """A run put at another boundary, where the level is its live bytes over the budget."""

    run: int
    boundary: int
    level: int


@dataclass(slots=True)
class Insertion(Edit):
    """Operations run again, one after the other at a boundary, and who reads them then.

    Runs that nobody reads any more are taken out: their time is counted, their excess is not.
    """

    ops: list[int]
    boundary: int
    levels: list[int]
    rebindings: list[Rebinding]
    unread: list[int]


@dataclass(slots=True)
class Removal(Edit):
    """A run taken out; what read it reads the run before it."""

    run: int


class LiveSchedule:
    """A schedule, and per step how many bytes it is over a budget.

    Attributes:
        seq: runs in their order.
        op: per run its operation.
        pos: per run its step.
        runs_of: per operation its runs in their order.
        readers: per run and value that it makes, the runs that read it.
        source: per run and value that it reads, the run that made it.
        excess: bytes over the budget, summed over the steps, and `toll` for each step over it.
        time_us: of all runs.
    """

    def __init__(self, indexed: Indexed, steps: list[int], budget_nbytes: int, toll: int) -> None:
        """Bind reads to runs; KeyError if one finds none."""
        self._indexed, self._toll = indexed, toll
        self._nbytes, self._pinned = indexed.nbytes, indexed.pinned
        self._made = [sum(indexed.nbytes[v] for v in values) for values in indexed.outputs]
        self._peak = [a + b for a, b in zip(self._made, indexed.workspace_nbytes, strict=True)]
        self.op, self.seq, self.pos = list(steps), list(range(len(steps))), list(range(len(steps)))
        self.runs_of: list[list[int]] = [[] for _ in indexed.inputs]
        self.readers: list[dict[int, list[int]]] = []
        self.source: list[dict[int, int]] = []
        self._unused: list[int] = []
        live = list(measure(indexed, steps).live_nbytes)
        at_end = sum(n for n, pinned in zip(indexed.nbytes, indexed.pinned, strict=True) if pinned)
        live.append(indexed.problem.resident_nbytes + at_end)
        largest = indexed.total_nbytes + max(budget_nbytes, max(live))
        kind: Any = np.int64 if largest < EXACT_NBYTES else object
        self._over: NDArray[Any] = np.array([n - budget_nbytes for n in live], dtype=kind)
        for run, op in enumerate(self.op):
            self.source.append({})
            self.readers.append({v: [] for v in indexed.outputs[op]})
            self._bind(run, run)
            self.runs_of[op].append(run)
        self.excess = self._weigh(self.over)
        self.time_us = math.fsum(indexed.time_us[op] for op in steps)

    @property
    def over(self) -> NDArray[Any]:
        """Per step, its live bytes less the budget."""
        return self._over[:-1]

    @property
    def steps(self) -> list[int]:
        """The schedule."""
        return [self.op[run] for run in self.seq]

    def latest(self, op: int, boundary: int) -> int | None:
        """The last run of an operation before a boundary."""
        found = None
        for run in self.runs_of[op]:
            if self.pos[run] >= boundary:
                break
            found = run
        return found

    def death(self, run: int, value: int, but: int = -1) -> int:
        """The last step at which what a run made is live, if one of its readers were not there."""
        pos = self.pos
        last = pos[run]
        if self._pinned[value]:
            return len(self.seq) if self.runs_of[self.op[run]][0] == run else last
        for reader in self.readers[run][value]:
            if reader != but and pos[reader] > last:
                last = pos[reader]
        return last

    def boundaries(self, run: int) -> tuple[int, int]:
        """The first and last boundary at which a run could stand, every read bound as it is."""
        pos, pinned = self.pos, self._pinned
        low, high = -1, len(self.seq)
        for value, maker in self.source[run].items():
            low = max(low, pos[maker])
            others = self.runs_of[self.op[maker]]
            if len(others) > 1 and not pinned[value]:
                high = min(high, *(p for r in others if (p := pos[r]) > pos[maker]), high)
        for readers in self.readers[run].values():
            for reader in readers:
                high = min(high, pos[reader])
        same = self.runs_of[self.op[run]]
        if len(same) > 1:
            place = same.index(run)
            if place + 1 < len(same):
                high = min(high, pos[same[place + 1]])
            if place > 0:
                before = same[place - 1]
                reads = (pos[r] for found in self.readers[before].values() for r in found)
                low = max(low, pos[before], *(p for p in reads if p < pos[run]), low)
        return low + 1, high

    def shift(self, run: int, boundary: int) -> Shift:
        """A run put at a boundary within its `boundaries`."""
        here, nbytes, op = self.pos[run], self._nbytes, self.op[run]
        kept = sum(nbytes[v] for v in self.readers[run] if self._outlives(run, v))
        level = self._crossing(boundary) + self._peak[op]
        spans: list[Span] = []
        later = boundary > here
        if later:
            level -= kept
            spans.append((here + 1, boundary - 1, -kept))
        else:
            spans.append((boundary, here - 1, kept))
        for v, maker in self.source[run].items():
            if self._pinned[v]:
                continue
            death = self.death(maker, v, but=-1 if later else run)
            if later and death < boundary:
                spans.append((death + 1, boundary - 1, nbytes[v]))
                level += nbytes[v]
            elif not later and death < here:
                spans.append((max(death + 1, boundary), here - 1, -nbytes[v]))
        change, width = self._change(spans)
        change += self._toll_of(level) - self._toll_of(int(self._over[here]))
        return Shift(change, 0.0, spans, width, run, boundary, level)

    def insertion(self, ops: list[int], boundary: int) -> Insertion | None:
        """Operations run again at a boundary, in an order in which each finds its inputs.

        None if one of them did not run before it, or reads what was not made.
        """
        spans: list[Span] = []
        last_use = {v: k for k, op in enumerate(ops) for v in self._indexed.inputs[op]}
        freed = [0] * len(ops)
        level = self._crossing(boundary)
        inside = {v for op in ops for v in self._indexed.outputs[op]}
        for v, k in last_use.items():
            if v in inside or self._pinned[v]:
                continue
            maker = self.latest(self._indexed.producer[v], boundary)
            if maker is None:
                return None
            death = self.death(maker, v)
            if death < boundary:
                spans.append((death + 1, boundary - 1, self._nbytes[v]))
                level += self._nbytes[v]
                freed[k] += self._nbytes[v]
        rebindings = self._rebindings(ops, boundary)
        if rebindings is None:
            return None
        lasting = set()
        for _, v, before, _ in rebindings:
            lasting.add(v)
            reads = (p for r in self.readers[before][v] if (p := self.pos[r]) < boundary)
            death = max(reads, default=self.pos[before])
            spans.append((death + 1, boundary - 1, -self._nbytes[v]))
            level -= self._nbytes[v]
        for k, op in enumerate(ops):
            for v in self._indexed.outputs[op]:
                if v not in lasting:
                    freed[k if self._pinned[v] else last_use.get(v, k)] += self._nbytes[v]
        levels = []
        for k, op in enumerate(ops):
            levels.append(level + self._peak[op])
            level += self._made[op] - freed[k]
        change, width = self._change(spans)
        change += sum(self._toll_of(level) for level in levels)
        unread = self._unread(ops, boundary)
        time_us = math.fsum(self._indexed.time_us[op] for op in ops)
        time_us -= math.fsum(self._indexed.time_us[self.op[run]] for run in unread)
        return Insertion(change, time_us, spans, width, ops, boundary, levels, rebindings, unread)

    def removal(self, run: int) -> Removal | None:
        """A run taken out; None if it is the first and read, or the only one."""
        here, op = self.pos[run], self.op[run]
        same = self.runs_of[op]
        place = same.index(run)
        spans: list[Span] = []
        if place == 0:
            needed = any(self._pinned[v] or found for v, found in self.readers[run].items())
            if len(same) == 1 or needed:
                return None
        for v, readers in self.readers[run].items():
            if readers and not self._pinned[v]:
                spans.append((self.death(same[place - 1], v) + 1, here - 1, self._nbytes[v]))
        for v, maker in self.source[run].items():
            if not self._pinned[v]:
                death = self.death(maker, v, but=run)
                spans.append((death + 1, here - 1, -self._nbytes[v]))
        change, width = self._change(spans)
        change -= self._toll_of(int(self._over[here]))
        return Removal(change, -self._indexed.time_us[op], spans, width, run)

    def apply(self, edit: Shift | Insertion | Removal) -> None:
        """Make a change that was worked out on the schedule as it is now."""
        self._make(edit)
        self.time_us += edit.time_us
        for run in edit.unread if isinstance(edit, Insertion) else ():
            removal = self.removal(run)
            assert removal is not None, "nobody reads it"
            self._make(removal)

    def _make(self, edit: Shift | Insertion | Removal) -> None:
        for first, last, nbytes in edit.spans:
            if first <= last:
                self._over[first : last + 1] += nbytes
        if isinstance(edit, Shift):
            self._shift(edit)
        elif isinstance(edit, Insertion):
            self._insert(edit)
        else:
            self._remove(edit)
        self.excess += edit.excess

    def _shift(self, edit: Shift) -> None:
        here, over = self.pos[edit.run], self._over
        there = edit.boundary - 1 if edit.boundary > here else edit.boundary
        if there > here:
            over[here:there] = over[here + 1 : there + 1].copy()
        else:
            over[there + 1 : here + 1] = over[there:here].copy()
        over[there] = edit.level
        del self.seq[here]
        self.seq.insert(there, edit.run)
        self._number(min(here, there), max(here, there) + 1)

    def _insert(self, edit: Insertion) -> None:
        at, ops = edit.boundary, edit.ops
        levels = np.array(edit.levels, dtype=self._over.dtype)
        self._over = np.concatenate([self._over[:at], levels, self._over[at:]])
        new = [self._new_run(op) for op in ops]
        self.seq[at:at] = new
        self._number(at, len(self.seq))
        for run, op in zip(new, ops, strict=True):
            self._bind(run, self.pos[run])
            same = self.runs_of[op]
            same.append(run)
            same.sort(key=self.pos.__getitem__)
        for k, v, before, later in edit.rebindings:
            for reader in later:
                self.readers[before][v].remove(reader)
                self.readers[new[k]][v].append(reader)
                self.source[reader][v] = new[k]

    def _remove(self, edit: Removal) -> None:
        run, here = edit.run, self.pos[edit.run]
        self._over = np.delete(self._over, here)
        same = self.runs_of[self.op[run]]
        before = same[same.index(run) - 1]
        for v, readers in self.readers[run].items():
            if not self._pinned[v]:
                for reader in readers:
                    self.source[reader][v] = before
                self.readers[before][v] += readers
        for v, maker in self.source[run].items():
            self.readers[maker][v].remove(run)
        same.remove(run)
        self.readers[run], self.source[run] = {}, {}
        del self.seq[here]
        self._number(here, len(self.seq))
        self._unused.append(run)

    def _new_run(self, op: int) -> int:
        if self._unused:
            run = self._unused.pop()
            self.op[run] = op
        else:
            run = len(self.op)
            self.op.append(op)
            self.pos.append(0)
            self.source.append({})
            self.readers.append({})
        self.readers[run] = {v: [] for v in self._indexed.outputs[op]}
        return run

    def _bind(self, run: int, step: int) -> None:
        """Note whom a run at a step reads."""
        for v in self._indexed.inputs[self.op[run]]:
            producer = self._indexed.producer[v]
            maker = self.latest(producer, step)
            if maker is None:
                raise KeyError(self._indexed.problem.values[v].name)
            if self._pinned[v]:
                maker = self.runs_of[producer][0]
            self.source[run][v] = maker
            self.readers[maker][v].append(run)

    def _rebindings(self, ops: list[int], boundary: int) -> list[Rebinding] | None:
        """What is read from reruns at a boundary by later runs."""
        found = []
        for k, op in enumerate(ops):
            before = self.latest(op, boundary)
            if before is None:
                return None
            for v in self._indexed.outputs[op]:
                readers = () if self._pinned[v] else self.readers[before][v]
                later = [reader for reader in readers if self.pos[reader] >= boundary]
                if later:
                    found.append((k, v, before, later))
        return found

    def _unread(self, ops: list[int], boundary: int) -> list[int]:
        """Runs that nobody reads once operations run again at a boundary, readers first."""
        unread: list[int] = []
        for op in reversed(ops):
            run = self.latest(op, boundary)
            if run is None or any(self._pinned[v] for v in self._indexed.outputs[op]):
                continue
            readers = (reader for found in self.readers[run].values() for reader in found)
            if all(self.pos[reader] >= boundary or reader in unread for reader in readers):
                unread.append(run)
        return unread

    def _number(self, first: int, end: int) -> None:
        pos, seq = self.pos, self.seq
        for step in range(first, end):
            pos[seq[step]] = step

    def _outlives(self, run: int, value: int) -> bool:
        """Whether what a run makes is live after its step."""
        if self._pinned[value]:
            return self.runs_of[self.op[run]][0] == run
        return bool(self.readers[run][value])

    def _crossing(self, boundary: int) -> int:
        """Bytes over the budget that are live at a boundary, no run's own among them."""
        over = int(self._over[boundary])
        return over - self._peak[self.op[self.seq[boundary]]] if boundary < len(self.seq) else over

    def _change(self, spans: Iterable[Span]) -> tuple[int, int]:
        """By how much spans change the excess, and how many steps they stand on."""
        spans = [span for span in spans if span[0] <= span[1]]
        if not spans:
            return 0, 0
        low, high = min(span[0] for span in spans), max(span[1] for span in spans) + 1
        old = self._over[low:high]
        new = old.copy()
        for first, last, nbytes in spans:
            new[first - low : last + 1 - low] += nbytes
        return self._weigh(new) - self._weigh(old), high - low

    def _weigh(self, over: NDArray[Any]) -> int:
        above = over[over > 0]
        return int(above.sum()) + self._toll * len(above)

    def _toll_of(self, level: int) -> int:
        return level + self._toll if level > 0 else 0
