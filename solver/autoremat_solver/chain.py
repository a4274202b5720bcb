"""Multi-level recompute: the optimal-checkpointing dynamic program over blocks.

Enters: `Blocks`. Leaves: recipes (save set and retention) for memory sizes; `realise` makes them
schedules and the simulator says what they really take. The recurrence is that of heterogeneous
chains ([Beaumont2019], rotor), which contains Revolve ([Griewank2000]): the cost of the blocks
s..t, of which the input is stored and whose first run is to come, in memory m, is the least of

    save option o of s:   pass_s,o + C(s+1, t, m - cut_{s+1} - saved_o) + again_s,o
    keep cut j, s<j<=t:   pass_s..j-1 + C(j, t, m - cut_j) + C(s, j-1, m - left_j..t)

In the outermost level the forward runs anyway: passing is free. Memory is counted with the
outputs that later blocks leave behind, so both terms of the second line are read at fixed
offsets and the minimum over j is one vector operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.blocks import Blocks, Option
from autoremat_solver.realise import Retention, Window

Costs = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """What `realise` needs."""

    saved: frozenset[int]
    retention: Retention


class ChainTable:
    """The dynamic program's table for one chain.

    Args:
        blocks: the chain.
        ceiling_nbytes: the largest memory of interest.
        slots: into how many parts it is cut.
    """

    def __init__(self, blocks: Blocks, ceiling_nbytes: int, slots: int) -> None:
        """Fill the table: O(blocks^3 slots), vectorised over two of the three and the slots."""
        self.blocks = blocks
        self.slots = slots
        self.slot_nbytes = max(1.0, ceiling_nbytes / slots)
        self._count = len(blocks.cuts)
        self._cut = [self._round(n) for n in blocks.cut_nbytes]
        later = np.cumsum([0, *blocks.left_nbytes[::-1]])[::-1]
        self._left_after = [int(n) for n in later[1:]]
        passing = np.cumsum([0.0, *blocks.nothing.pass_us])
        self._passed = passing.astype(np.float32)
        few = self._count > 64
        self._inner = blocks.options[:1] if few else blocks.options
        self._fill()
        self._fill_top()

    def _round(self, nbytes: float) -> int:
        return min(self.slots + 1, round(nbytes / self.slot_nbytes))

    def _shift(self, costs: Costs, by: int) -> Costs:
        """Costs as a function of memory with `by` slots taken away."""
        if by == 0:
            return costs
        result = np.full_like(costs, np.inf)
        if by <= self.slots:
            result[by:] = costs[: self.slots + 1 - by]
        return result

    def _need(self, option: Option, block: int) -> int:
        """Slots without which the block's backward cannot run."""
        nbytes = option.backward_nbytes[block] + self._left_after[block]
        return min(self.slots + 1, int(-(-nbytes // self.slot_nbytes)))

    def _fill(self) -> None:
        """Tables of the inner levels: by first block, and by last block with the cut taken off."""
        count, width = self._count, self.slots + 1
        self._by_first = np.full((count, count, width), np.inf, dtype=np.float32)
        self._by_last = np.full((count, count, width), np.inf, dtype=np.float32)
        nothing = self.blocks.nothing
        for t in range(count):
            for s in range(t, -1, -1):
                if s == t:
                    costs: Costs = np.full(width, np.inf, dtype=np.float32)
                    costs[self._need(nothing, s) :] = nothing.again_us[s]
                else:
                    costs = np.minimum(
                        self._keep_cut(s, t).min(axis=0), self._save_inside(s, t).min(axis=0)
                    )
                self._by_first[s, t] = costs
                self._by_last[t, s] = self._shift(costs, self._cut[s])

    def _keep_cut(self, s: int, t: int) -> Costs:
        """Per cut j = s+1..t and memory, the cost of the second line of the recurrence."""
        passed = (self._passed[s + 1 : t + 1] - self._passed[s])[:, None]
        result: Costs = self._by_last[t, s + 1 : t + 1] + self._by_first[s, s:t] + passed
        return result

    def _save_inside(self, s: int, t: int) -> Costs:
        """Per option and memory, the cost of the first line of the recurrence."""
        rows = [np.full(self.slots + 1, np.inf, dtype=np.float32)]
        for option in self._inner:
            row = self._shift(self._by_last[t, s + 1], self._round(option.saved_nbytes[s]))
            row = row + np.float32(option.pass_us[s] + option.again_us[s])
            row[: self._need(option, s)] = np.inf
            rows.append(row)
        return np.stack(rows)

    def _fill_top(self) -> None:
        """The outermost level, from block s to the end."""
        count = self._count
        self._top = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top_cut = np.full((count + 1, self.slots + 1), np.inf, dtype=np.float32)
        self._top[count] = self._top_cut[count] = 0.0
        for s in range(count - 1, -1, -1):
            inside, keep = self._top_choices(s)
            self._top[s] = np.minimum(inside.min(axis=0), keep.min(axis=0))
            self._top_cut[s] = self._shift(self._top[s], self._cut[s])

    def _top_choices(self, s: int) -> tuple[Costs, Costs]:
        rows = [np.full(self.slots + 1, np.inf, dtype=np.float32)]
        for option in self.blocks.options:
            row = self._shift(self._top_cut[s + 1], self._round(option.saved_nbytes[s]))
            row = row + np.float32(option.again_us[s])
            row[: self._need(option, s)] = np.inf
            rows.append(row)
        keep: Costs = self._top_cut[s + 1 :] + self._by_first[s, s:]
        return np.stack(rows), keep

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
            hold: keep a cut until the block that made it is done (it may read its own output);
                otherwise only for the block that starts from it, which takes less memory.
        """
        saved: set[int] = set(self.blocks.ambient)
        windows: dict[int, list[Window]] = {}
        s = 0
        while s < self._count:
            inside, keep = self._top_choices(s)
            option, j = int(inside[:, memory].argmin()), int(keep[:, memory].argmin())
            if inside[option, memory] <= keep[j, memory]:
                chosen = self.blocks.options[option - 1]
                saved |= chosen.saved[s]
                memory -= self._round(chosen.saved_nbytes[s])
                s += 1
            else:
                self._inner_windows((s, s + j, memory), windows, hold)
                s += j + 1
            if s < self._count:
                saved |= self.blocks.cuts[s]
                memory -= self._cut[s]
        retention = Retention(segment_end=self.blocks.segment_end, windows=windows)
        return Recipe(frozenset(saved), retention)

    def _inner_windows(
        self, node: tuple[int, int, int], windows: dict[int, list[Window]], hold: bool
    ) -> None:
        """Add until when the cuts and savings of the best inner plan of s..t may be read."""
        stack = [node]
        while stack:
            s, t, memory = stack.pop()
            if s == t:
                continue
            opening = self.blocks.ranges[t][0]
            keep, inside = self._keep_cut(s, t), self._save_inside(s, t)
            j, option = int(keep[:, memory].argmin()), int(inside[:, memory].argmin())
            if inside[option, memory] < keep[j, memory]:
                chosen = self._inner[option - 1]
                _open(windows, chosen.saved[s], opening, self.blocks.ranges[s][1] - 1)
                _open(windows, self.blocks.cuts[s + 1], opening, self.blocks.ranges[s][1] - 1)
                left = memory - self._round(chosen.saved_nbytes[s]) - self._cut[s + 1]
                stack.append((s + 1, t, left))
            else:
                cut = s + 1 + j
                # The block before the cut comes next and may read the cut, its own output.
                last = self.blocks.ranges[cut - 1 if hold else cut][1] - 1
                _open(windows, self.blocks.cuts[cut], opening, last)
                stack.append((cut, t, memory - self._cut[cut]))
                stack.append((s, cut - 1, memory))


def _open(windows: dict[int, list[Window]], values: frozenset[int], first: int, last: int) -> None:
    for v in values:
        windows.setdefault(v, []).append((first, last))
