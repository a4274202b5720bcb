"""Multi-level recompute: the optimal-checkpointing dynamic program over blocks.

Enters: `Blocks`. Leaves: recipes (save set and retention) for memory sizes; `realise` makes them
schedules and the simulator says what they really take. The recurrence is that of heterogeneous
chains ([Beaumont2019], rotor), which contains Revolve ([Griewank2000]). C_e(s, t, m) is the least
time of the backward of the blocks s..t in memory m; the cut into s is stored beside m. e says
whether the cut after t is still there, in m. It is the least of

    save option o of s:   pass_s,o + C_e(s+1, t, m - cut_{s+1} - saved_o) + again_s,o
    keep cut j, s<j<=t:   pass_s..j-1 + C_e(j, t, m - cut_j) + C_1(s, j-1, m)
    let go of the cut:    C_0(s, t, m)                                          for e = 1

where the passing itself must fit in m. In the outermost level the forward runs anyway: passing is
free. Memory is counted with the outputs that later blocks leave behind, so both terms of the
second line are read at fixed offsets and the minimum over j is one vector operation. Equal
stretches of blocks have equal rows and are computed once, as identical blocks are in [Zhao2023]: a
chain of n equal blocks takes O(n) rows in place of O(n^2).

Memory is counted in slots. The table is exact for the memory of `slots` full slots plus
`spare_nbytes` if every stored size is a multiple of the slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.chains.blocks import Blocks, Transient
from autoremat_solver.plans.realise import Retention, Window

Costs = NDArray[np.float32]
Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """What `realise` needs.

    Attributes:
        saved: values of which the backward reads the forward's instance.
        retention: for how long instances may be read.
        time_us: what the table takes the plan's extra time to be.
    """

    saved: frozenset[int]
    retention: Retention
    time_us: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Blocks first..last, the cut into the first one stored beside `memory` slots.

    Attributes:
        has_next: whether the cut after the last one is there, within the memory.
    """

    first: int
    last: int
    memory: int
    has_next: bool


class ChainTable:
    """The dynamic program's table for one chain.

    Args:
        blocks: the chain.
        slot_nbytes: bytes of a slot.
        slots: the most memory of interest.
        spare_nbytes: bytes beside the slots, less than one slot.
    """

    def __init__(
        self, blocks: Blocks, slot_nbytes: float, slots: int, spare_nbytes: float = 0.0
    ) -> None:
        """Fill the table: O(blocks^3 slots), vectorised over two of the three and the slots."""
        self.blocks = blocks
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self._spare_nbytes = spare_nbytes
        self._memory = np.arange(slots + 1)
        self._count = len(blocks.cuts)
        self._cut = [self._round(n) for n in (*blocks.cut_nbytes, 0)]
        later = np.cumsum([0, *blocks.left_nbytes[::-1]])[::-1]
        self._left_after = [int(n) for n in later[1:]]
        self._passed = np.cumsum([0.0, *blocks.nothing.pass_us])
        self._inner = blocks.options[:1] if self._count > 64 else blocks.options
        # Without a reader of the cut after a block, letting go of it costs nothing.
        with_next = [*zip(blocks.nothing.again_us, blocks.nothing.backward_nbytes, strict=True)]
        alone = [*zip(blocks.alone.again_us, blocks.alone.backward_nbytes, strict=True)]
        self._reads_next = any(a[0] > b[0] for a, b in zip(alone, with_next, strict=True))
        self._row, self._fresh = _rows_of_stretches(self._kinds())
        self._fill()
        self._fill_top()

    def _round(self, nbytes: float) -> int:
        return min(self.slots + 1, round(nbytes / self.slot_nbytes))

    def _up(self, nbytes: float) -> int:
        """Slots that hold the bytes together with the spare ones."""
        return min(
            self.slots + 1, max(0, int(-(-(nbytes - self._spare_nbytes) // self.slot_nbytes)))
        )

    def _shift(self, costs: Costs, by: int) -> Costs:
        """Costs as a function of memory with `by` slots taken away."""
        if by == 0:
            return costs
        result = np.full_like(costs, np.inf)
        if by <= self.slots:
            result[by:] = costs[: self.slots + 1 - by]
        return result

    def _need(self, backward_nbytes: int, block: int) -> int:
        """Slots without which the block's backward cannot run."""
        return self._up(backward_nbytes + self._left_after[block])

    def _kinds(self) -> list[int]:
        """Per block a number; blocks of one number are alike in all that the table reads."""
        b = self.blocks
        columns = [b.cut_nbytes, [*b.cut_nbytes[1:], 0], self._left_after, b.carried_nbytes]
        columns += [[end - first for first, end in b.ranges]]
        columns += [b.rerun.kept_nbytes, b.rerun.passed_nbytes, b.alone.backward_nbytes]
        times = [b.alone.again_us]
        for option in (b.nothing, *self._inner):
            columns += [option.saved_nbytes, option.backward_nbytes]
            times += [option.again_us, option.pass_us]
        number: dict[tuple[float, ...], int] = {}
        rows = zip(*columns, *times, strict=True)
        return [number.setdefault(row, len(number)) for row in rows]

    def _fill(self) -> None:
        """Rows of the inner levels: as they are, and with the cut into the stretch taken off."""
        shape = (2, len(self._fresh), self.slots + 1)
        self._costs = np.full(shape, np.inf, dtype=np.float32)
        self._costs_cut = np.full(shape, np.inf, dtype=np.float32)
        for row, (s, t) in enumerate(self._fresh):
            for has_next in (False, True) if self._reads_next else (False,):
                costs = self._stretch_costs(s, t, has_next)
                if has_next:
                    costs = np.minimum(costs, self._costs[0, row])
                self._costs[int(has_next), row] = costs
            if not self._reads_next:
                self._costs[1, row] = self._costs[0, row]
            for e in (0, 1):
                self._costs_cut[e, row] = self._shift(self._costs[e, row], self._cut[s])

    def _stretch_costs(self, s: int, t: int, has_next: bool) -> Costs:
        if self._is_idle(t):
            if s < t:
                shorter: Costs = self._costs[0, self._row[s, t - 1]]
                return shorter
            return np.zeros(self.slots + 1, dtype=np.float32)
        if s < t:
            keep = self._keep_cut(s, t, has_next).min(axis=0)
            costs: Costs = np.minimum(keep, self._save_inside(s, t, has_next).min(axis=0))
            return costs
        blocks = self.blocks
        backward = blocks.nothing if has_next else blocks.alone
        costs = np.full(self.slots + 1, np.inf, dtype=np.float32)
        costs[self._need(backward.backward_nbytes[s], s) :] = backward.again_us[s]
        return costs

    def _is_idle(self, block: int) -> bool:
        """Whether no backward operation belongs to the block."""
        first, end = self.blocks.ranges[block]
        return first == end

    def _keep_cut(self, s: int, t: int, has_next: bool) -> Costs:
        """Per cut j = s+1..t and memory, the cost of the second line of the recurrence."""
        passed = (self._passed[s + 1 : t + 1] - self._passed[s]).astype(np.float32)
        later = self._costs_cut[int(has_next), self._row[s + 1 : t + 1, t]]
        costs: Costs = later + self._costs[1, self._row[s, s:t]] + passed[:, None]
        needs = self._passing_needs(self.blocks.rerun, s, t, self._beside_pass(t, has_next))
        costs[self._memory[None, :] < needs[:, None]] = np.inf
        return costs

    def _beside_pass(self, t: int, has_next: bool) -> int:
        """Bytes that are live beside a pass right before the backward of block t."""
        blocks = self.blocks
        nbytes = blocks.carried_nbytes[t] + self._left_after[t] + blocks.outputs_nbytes
        return nbytes + (blocks.cut_nbytes[t + 1] if has_next and t + 1 < self._count else 0)

    def _passing_needs(self, transient: Transient, s: int, end: int, beside: int) -> Slots:
        """Slots without which the blocks s..j-1 cannot be passed, per j = s+1..end."""
        nbytes = np.array(transient.passed_nbytes[s:end], dtype=np.int64)
        nbytes[0] = transient.kept_nbytes[s]
        nbytes = np.maximum.accumulate(nbytes) + beside
        slots = np.ceil((nbytes - self._spare_nbytes) / self.slot_nbytes)
        result: Slots = np.clip(slots, 0, self.slots + 1).astype(np.int64)
        return result

    def _save_inside(self, s: int, t: int, has_next: bool) -> Costs:
        """Per option and memory, the cost of the first line of the recurrence."""
        rows = [np.full(self.slots + 1, np.inf, dtype=np.float32)]
        later = self._costs_cut[int(has_next), self._row[s + 1, t]]
        beside = self._beside_pass(t, has_next)
        for option in self._inner:
            row = self._shift(later, self._round(option.saved_nbytes[s]))
            row = row + np.float32(option.pass_us[s] + option.again_us[s])
            row[: self._need(option.backward_nbytes[s], s)] = np.inf
            row[: self._up(self.blocks.rerun.kept_nbytes[s] + beside)] = np.inf
            rows.append(row)
        return np.stack(rows)

    def _fill_top(self) -> None:
        """The outermost level, from block s to the end, and what is best there."""
        count = self._count
        self._top = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top_choice = np.zeros((count, self.slots + 1), dtype=np.int32)
        self._top_cut = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top[count] = self._top_cut[count] = 0.0
        for s in range(count - 1, -1, -1):
            choices = self._top_choices(s)
            self._top_choice[s] = choices.argmin(axis=0)
            self._top[s] = choices.min(axis=0)
            self._top_cut[s] = self._shift(self._top[s], self._cut[s])

    def _top_choices(self, s: int) -> Costs:
        """Per option, and then per cut to keep, the cost for each memory."""
        rows = []
        first_run = self.blocks.first_run
        for option in self.blocks.options:
            row = self._shift(self._top_cut[s + 1], self._round(option.saved_nbytes[s]))
            row = row + np.float32(option.again_us[s])
            row[: self._need(option.backward_nbytes[s], s)] = np.inf
            row[: self._up(first_run.kept_nbytes[s])] = np.inf
            rows.append(row)
        keep: Costs = self._top_cut[s + 1 :] + self._costs[1, self._row[s, s:]]
        needs = self._passing_needs(first_run, s, self._count, 0)
        keep[self._memory[None, :] < needs[:, None]] = np.inf
        return np.concatenate([np.array(rows).reshape(-1, self.slots + 1), keep])

    def smallest_slot(self) -> int:
        """The least memory for which the table has a plan, in slots; `slots` + 1 if none."""
        finite = np.flatnonzero(np.isfinite(self._top[0]))
        return int(finite[0]) if len(finite) else self.slots + 1

    def distinct_slots(self) -> list[int]:
        """Memory sizes, in slots, at which the plan changes."""
        first = self.smallest_slot()
        if first > self.slots:
            return []
        costs = self._top[0]
        return [m for m in range(first, self.slots + 1) if m == first or costs[m] < costs[m - 1]]

    def recipe(self, memory: int, *, hold: bool = True) -> Recipe:
        """The plan of the table for a memory size in slots at which it has one.

        Args:
            memory: in slots.
            hold: keep a cut until the block that made it is done if that costs less time; otherwise
                only for the block that starts from it, which takes less memory.
        """
        time_us = float(self._top[0, memory])
        saved: set[int] = set(self.blocks.ambient)
        windows: dict[int, list[Window]] = {}
        release: dict[int, int] = {}
        s = 0
        while s < self._count:
            choice = int(self._top_choice[s, memory])
            if choice < len(self.blocks.options):
                chosen = self.blocks.options[choice]
                saved |= chosen.saved[s]
                memory -= self._round(chosen.saved_nbytes[s])
                s += 1
            else:
                j = choice - len(self.blocks.options)
                stretch = _Stretch(s, s + j, memory, has_next=True)
                if not (hold and self._holds_next(stretch)) and s + j + 1 < self._count:
                    last = self._last_read(s + j + 1, hold=False)
                    release |= dict.fromkeys(self.blocks.cuts[s + j + 1], last)
                self._inner_windows(stretch, windows, hold)
                s += j + 1
            if s < self._count:
                saved |= self.blocks.cuts[s]
                memory -= self._cut[s]
        retention = Retention(segment_end=self.blocks.segment_end, windows=windows, release=release)
        return Recipe(frozenset(saved), retention, time_us)

    def _holds_next(self, at: _Stretch) -> bool:
        """Whether it pays to keep the cut after the stretch for the stretch's own backward."""
        row = self._row[at.first, at.last]
        return bool(self._costs[1, row, at.memory] < self._costs[0, row, at.memory])

    def _last_read(self, cut: int, *, hold: bool) -> int:
        """The last backward position that reads a cut: of the block before it if it is held."""
        return self.blocks.ranges[cut - 1 if hold else cut][1] - 1

    def _inner_windows(self, node: _Stretch, windows: dict[int, list[Window]], hold: bool) -> None:
        """Add until when the cuts and savings of the best inner plan of s..t may be read."""
        stack = [node]
        while stack:
            at = stack.pop()
            s, t, memory = at.first, at.last, at.memory
            has_next = at.has_next and self._holds_next(at)
            if s == t:
                continue
            if self._is_idle(t):
                stack.append(_Stretch(s, t - 1, memory, has_next=False))
                continue
            opening = self.blocks.ranges[t][0]
            keep, inside = self._keep_cut(s, t, has_next), self._save_inside(s, t, has_next)
            j, option = int(keep[:, memory].argmin()), int(inside[:, memory].argmin())
            if inside[option, memory] < keep[j, memory]:
                chosen = self._inner[option - 1]
                last = self.blocks.ranges[s][1] - 1
                _open(windows, chosen.saved[s], opening, last)
                _open(windows, self.blocks.cuts[s + 1], opening, last)
                left = memory - self._round(chosen.saved_nbytes[s]) - self._cut[s + 1]
                stack.append(_Stretch(s + 1, t, left, has_next))
            else:
                cut = s + 1 + j
                before = _Stretch(s, cut - 1, memory, has_next=True)
                last = self._last_read(cut, hold=hold and self._holds_next(before))
                _open(windows, self.blocks.cuts[cut], opening, last)
                stack.append(_Stretch(cut, t, memory - self._cut[cut], has_next))
                stack.append(before)


def _rows_of_stretches(kinds: list[int]) -> tuple[NDArray[np.int32], list[tuple[int, int]]]:
    """Per first and last block the number of a row, equal for equal stretches of kinds.

    Also, per row, the first stretch that it stands for; parts of a stretch have lower rows.
    """
    count = len(kinds)
    row = np.full((count, count), -1, dtype=np.int32)
    fresh: list[tuple[int, int]] = []
    number: dict[tuple[int, int], int] = {}
    shorter = [-1] * count
    for length in range(count):
        for s in range(count - length):
            key = (shorter[s], kinds[s + length])
            known = number.get(key)
            if known is None:
                known = number[key] = len(fresh)
                fresh.append((s, s + length))
            shorter[s] = known
        row[np.arange(count - length), np.arange(length, count)] = shorter[: count - length]
    return row, fresh


def _open(windows: dict[int, list[Window]], values: frozenset[int], first: int, last: int) -> None:
    for v in values:
        windows.setdefault(v, []).append((first, last))
