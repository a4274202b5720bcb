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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.chains.blocks import Blocks, Transient
from autoremat_solver.plans.realise import Retention, Window

Costs = NDArray[np.float32]
Slots = NDArray[np.int64]

_NEVER = np.float32(np.inf)
MOST_CELLS = 1 << 20  # of the table's rows that are worked on at once, times cuts and slots


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
        """Fill the table: O(blocks^3 slots), all stretches of one length at once."""
        self.blocks = blocks
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self._spare_nbytes = spare_nbytes
        self._memory = np.arange(slots + 1)
        self._count = len(blocks.cuts)
        self._cut = self._round([*blocks.cut_nbytes, 0])
        self._left_after = np.cumsum([0, *blocks.left_nbytes[::-1]])[::-1][1:]
        self._passed = np.cumsum([0.0, *blocks.nothing.pass_us])
        self._inner = blocks.options[:1] if self._count > 64 else blocks.options
        self._is_idle = np.array([first == end for first, end in blocks.ranges])
        # Without a reader of the cut after a block, letting go of it costs nothing.
        with_next = [*zip(blocks.nothing.again_us, blocks.nothing.backward_nbytes, strict=True)]
        alone = [*zip(blocks.alone.again_us, blocks.alone.backward_nbytes, strict=True)]
        self._reads_next = any(a[0] > b[0] for a, b in zip(alone, with_next, strict=True))
        self._row, self._fresh = _rows_of_stretches(self._kinds())
        self._fill()
        self._fill_top()

    def _round(self, nbytes: Sequence[int]) -> Slots:
        slots: Slots = np.rint(np.array(nbytes) / self.slot_nbytes).astype(np.int64)
        return np.minimum(slots, self.slots + 1)

    def _up(self, nbytes: Slots) -> Slots:
        """Slots that hold the bytes together with the spare ones."""
        slots = np.ceil((nbytes - self._spare_nbytes) / self.slot_nbytes)
        result: Slots = np.clip(slots, 0, self.slots + 1).astype(np.int64)
        return result

    def _shift(self, costs: Costs, by: Slots) -> Costs:
        """Each row of costs as a function of memory with so many slots taken away."""
        source = self._memory - by[:, None]
        shifted = np.take_along_axis(costs, np.maximum(source, 0), axis=-1)
        result: Costs = np.where(source < 0, _NEVER, shifted)
        return result

    def _need(self, backward_nbytes: Sequence[int], blocks: Slots) -> Slots:
        """Slots without which the blocks' backward cannot run."""
        return self._up(np.array(backward_nbytes)[blocks] + self._left_after[blocks])

    def _from(self, needs: Slots, costs: Costs) -> Costs:
        """The costs where the memory is enough."""
        result: Costs = np.where(self._memory < needs[..., None], _NEVER, costs)
        return result

    def _kinds(self) -> list[int]:
        """Per block a number; blocks of one number are alike in all that the table reads."""
        b = self.blocks
        columns = [
            b.cut_nbytes,
            [*b.cut_nbytes[1:], 0],
            b.carried_nbytes,
            self._left_after.tolist(),
        ]
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
        self._choice = np.zeros(shape, dtype=np.int16)
        lengths = self._fresh[:, 1] - self._fresh[:, 0]
        for length in range(self._count):
            rows = np.flatnonzero(lengths == length)
            at_once = max(1, MOST_CELLS // ((length + 1) * (self.slots + 1)))
            for first in range(0, len(rows), at_once):
                self._fill_rows(rows[first : first + at_once])

    def _fill_rows(self, rows: Slots) -> None:
        """Rows of stretches of one length; those of shorter ones are filled."""
        s, t = self._fresh[rows].T
        for e in (0, 1) if self._reads_next else (0,):
            self._costs[e, rows], self._choice[e, rows] = self._stretch_costs(s, t, bool(e))
        if self._reads_next:
            self._costs[1, rows] = self._costs[:, rows].min(axis=0)
        else:
            self._costs[1, rows], self._choice[1, rows] = (
                self._costs[0, rows],
                self._choice[0, rows],
            )
        for e in (0, 1):
            self._costs_cut[e, rows] = self._shift(self._costs[e, rows], self._cut[s])

    def _stretch_costs(self, s: Slots, t: Slots, has_next: bool) -> tuple[Costs, Slots]:
        """Per stretch and memory the cost and what is chosen: a cut to keep, or then an option."""
        if s[0] < t[0]:
            choices = [self._keep_cut(s, t, has_next), *self._save_inside(s, t, has_next)]
            costs, choice = _least(np.concatenate(choices, axis=1))
            shorter = self._costs[0, self._row[s, t - 1]]
        else:
            backward = self.blocks.nothing if has_next else self.blocks.alone
            again = np.array(backward.again_us, dtype=np.float32)[s]
            costs = self._from(self._need(backward.backward_nbytes, s), again[:, None])
            shorter, choice = np.zeros_like(costs), np.zeros(costs.shape, dtype=np.int64)
        return np.where(self._is_idle[t][:, None], shorter, costs), choice

    def _keep_cut(self, s: Slots, t: Slots, has_next: bool) -> Costs:
        """Per stretch, cut j = s+1..t and memory, the cost of the second line of the recurrence."""
        cuts = s[:, None] + np.arange(1, t[0] - s[0] + 1)
        passed = (self._passed[cuts] - self._passed[s][:, None]).astype(np.float32)
        later = self._costs_cut[int(has_next), self._row[cuts, t[:, None]]]
        costs = later + self._costs[1, self._row[s[:, None], cuts - 1]] + passed[..., None]
        beside = self._beside_pass(t, has_next)
        return self._from(self._passing_needs(self.blocks.rerun, cuts, beside), costs)

    def _beside_pass(self, t: Slots, has_next: bool) -> Slots:
        """Bytes that are live beside a pass right before the backward of the blocks t."""
        blocks = self.blocks
        nbytes = np.array(blocks.carried_nbytes)[t] + self._left_after[t] + blocks.outputs_nbytes
        after = np.array([*blocks.cut_nbytes, 0])[t + 1]
        result: Slots = nbytes + (after if has_next else 0)
        return result

    def _passing_needs(self, transient: Transient, cuts: Slots, beside: Slots) -> Slots:
        """Slots without which the blocks before each cut of a row cannot be passed."""
        nbytes = np.array(transient.passed_nbytes)[cuts - 1]
        nbytes[:, 0] = np.array(transient.kept_nbytes)[cuts[:, 0] - 1]
        return self._up(np.maximum.accumulate(nbytes, axis=1) + beside[:, None])

    def _save_inside(self, s: Slots, t: Slots, has_next: bool) -> Iterator[Costs]:
        """For each option, per stretch and memory, the cost of the first line of the recurrence."""
        later = self._costs_cut[int(has_next), self._row[s + 1, t]]
        kept = np.array(self.blocks.rerun.kept_nbytes)[s] + self._beside_pass(t, has_next)
        for option in self._inner:
            us = np.array(option.pass_us)[s] + np.array(option.again_us)[s]
            shifted = self._shift(later, self._round(option.saved_nbytes)[s])
            needs = np.maximum(self._need(option.backward_nbytes, s), self._up(kept))
            yield self._from(needs, shifted + us.astype(np.float32)[:, None])[:, None]

    def _fill_top(self) -> None:
        """The outermost level, from block s to the end, and what is best there."""
        count = self._count
        self._top = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top_choice = np.zeros((count, self.slots + 1), dtype=np.int16)
        self._top_cut = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top[count] = self._top_cut[count] = 0.0
        for block in range(count - 1, -1, -1):
            s = np.array([block])
            self._top[s], self._top_choice[s] = _least(self._top_choices(s)[None])
            self._top_cut[s] = self._shift(self._top[s], self._cut[s])

    def _top_choices(self, s: Slots) -> Costs:
        """Per option, and then per cut to keep, the cost for each memory."""
        first_run, rows = self.blocks.first_run, []
        for option in self.blocks.options:
            shifted = self._shift(self._top_cut[s + 1], self._round(option.saved_nbytes)[s])
            kept = self._up(np.array(first_run.kept_nbytes)[s])
            needs = np.maximum(self._need(option.backward_nbytes, s), kept)
            again = np.array(option.again_us, dtype=np.float32)[s]
            rows.append(self._from(needs, shifted + again[:, None]))
        cuts = np.arange(s[0] + 1, self._count + 1)[None]
        keep = self._top_cut[cuts] + self._costs[1, self._row[s[:, None], cuts - 1]]
        needs = self._passing_needs(first_run, cuts, np.zeros_like(s))
        return np.concatenate([*rows, self._from(needs, keep)[0]])

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
                memory -= int(self._round(chosen.saved_nbytes)[s])
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
                memory -= int(self._cut[s])
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
            if self._is_idle[t]:
                stack.append(_Stretch(s, t - 1, memory, has_next=False))
                continue
            opening = self.blocks.ranges[t][0]
            choice = int(self._choice[int(has_next), self._row[s, t], memory])
            if choice >= t - s:
                chosen = self._inner[choice - (t - s)]
                last = self.blocks.ranges[s][1] - 1
                _open(windows, chosen.saved[s], opening, last)
                _open(windows, self.blocks.cuts[s + 1], opening, last)
                left = memory - self._round(chosen.saved_nbytes)[s] - self._cut[s + 1]
                stack.append(_Stretch(s + 1, t, int(left), has_next))
            else:
                cut = s + 1 + choice
                before = _Stretch(s, cut - 1, memory, has_next=True)
                last = self._last_read(cut, hold=hold and self._holds_next(before))
                _open(windows, self.blocks.cuts[cut], opening, last)
                stack.append(_Stretch(cut, t, memory - int(self._cut[cut]), has_next))
                stack.append(before)


def _least(costs: Costs) -> tuple[Costs, Slots]:
    """The minima along axis 1, and where the first of each stands."""
    choice = costs.argmin(axis=1)
    return np.take_along_axis(costs, choice[:, None], axis=1)[:, 0], choice


def _rows_of_stretches(kinds: list[int]) -> tuple[NDArray[np.int32], Slots]:
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
    return row, np.array(fresh)


def _open(windows: dict[int, list[Window]], values: frozenset[int], first: int, last: int) -> None:
    for v in values:
        windows.setdefault(v, []).append((first, last))
