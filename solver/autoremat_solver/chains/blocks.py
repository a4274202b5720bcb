"""Cuts the forward into blocks where little crosses, and measures what each block needs.

Enters: a problem and save sets to choose from. Leaves: `Blocks`, the heterogeneous chain of
[Beaumont2019]: per block the bytes that cross into it, the bytes and times of its save options,
and the bytes that its backward leaves behind. All numbers come from the exact simulator, run once
per option on the plan that saves every cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.fast_measure import (
    Bools,
    Ints,
    Spans,
    fast_measure,
    fast_saved,
    fast_spans,
)
from autoremat_solver.plans.heuristics import live_across
from autoremat_solver.plans.realise import Retention, realise
from autoremat_solver.problem import Phase

NEVER_US = 1e12
MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Option:
    """One way to save inside blocks; all lists are per block.

    Attributes:
        saved: values saved inside the block, cuts not counted.
        saved_nbytes: their size.
        again_us: recompute time in the block's backward.
        pass_us: time to run the block again up to its end, making `saved` on the way; `NEVER_US`
            if it must not run again.
        backward_nbytes: peak of the block's backward above what was stored before the block.
            The next cut is live when it begins, and counts if the block's backward reads it.
    """

    saved: list[frozenset[int]]
    saved_nbytes: list[int]
    again_us: list[float]
    pass_us: list[float]
    backward_nbytes: list[int]


@dataclass(frozen=True)
class Alone:
    """A block's backward without the next cut, which it makes again if it reads it; per block.

    Attributes:
        again_us: recompute time.
        backward_nbytes: peak above what was stored before the block.
    """

    again_us: list[float]
    backward_nbytes: list[int]


@dataclass(frozen=True)
class Transient:
    """What running a block without its backward takes above what is stored; per block.

    Attributes:
        kept_nbytes: peak while the cut into the block is stored.
        passed_nbytes: peak while that cut is not stored: it is live until its last read.
    """

    kept_nbytes: list[int]
    passed_nbytes: list[int]


@dataclass(frozen=True)
class Blocks:
    """A chain of blocks.

    Attributes:
        cuts: per block, the values that cross into it (none into the first).
        cut_nbytes: their size.
        ranges: per block, first backward position and one past the last.
        segment_end: per backward position, the last position of its block.
        left_nbytes: per block, bytes of outputs that its backward makes.
        carried_nbytes: per block, bytes that the backward hands over to it, outputs not counted.
        ambient: values saved beside the chain because they cross many cuts.
        nothing: the option that saves nothing inside blocks.
        alone: the same without the next cut.
        options: the other options.
        first_run: what the blocks take in the forward.
        rerun: what they take when they are run again to make the next cut.
        beside_nbytes: resident bytes and `ambient`.
        outputs_nbytes: outputs that the forward makes.
        ceiling_nbytes: memory with which the DP need not recompute.
    """

    cuts: list[frozenset[int]]
    cut_nbytes: list[int]
    ranges: list[tuple[int, int]]
    segment_end: list[int]
    left_nbytes: list[int]
    carried_nbytes: list[int]
    ambient: frozenset[int]
    nothing: Option
    alone: Alone
    options: list[Option]
    first_run: Transient
    rerun: Transient
    beside_nbytes: int
    outputs_nbytes: int
    ceiling_nbytes: int


def narrow_places(indexed: Indexed, ambient: Collection[int], limit: int) -> list[int]:
    """Places in the forward order where little crosses: at most `limit`, ascending.

    Local minima of the crossing bytes; the neighbourhood grows until few enough remain, and what
    still remains (a plain chain is narrow everywhere) is thinned evenly.
    """
    across = [frozenset(cut).difference(ambient) for cut in live_across(indexed)]
    width = np.array([sum(indexed.nbytes[v] for v in cut) for cut in across], dtype=np.int64)
    places: list[int] = []
    for reach in (1, 2, 4, 8, 16, 32, 64, 128):
        places = _local_minima(across, width, reach)
        if len(places) <= limit:
            return places
    keep = [round(i * (len(places) - 1) / (limit - 1)) for i in range(limit)]
    return sorted({places[i] for i in keep})


def _local_minima(across: list[frozenset[int]], width: Ints, reach: int) -> list[int]:
    places: list[int] = []
    if len(width) < 2:
        return places
    some = np.pad(np.where(width[1:] > 0, width[1:], MOST), reach, constant_values=MOST)
    lowest = np.lib.stride_tricks.sliding_window_view(some, 2 * reach + 1).min(axis=1)
    for place in np.flatnonzero((width[1:] > 0) & (width[1:] == lowest)) + 1:
        if not places or across[place] != across[places[-1]]:
            places.append(int(place))
    return places


def far_reaching(indexed: Indexed, share: float) -> frozenset[int]:
    """Values that stay live over more than `share` of the forward: masks, tables, long skips."""
    across = live_across(indexed)
    places: dict[int, int] = {}
    for cut in across:
        for v in cut:
            places[v] = places.get(v, 0) + 1
    return frozenset(v for v, count in places.items() if count > share * len(across))


def blocks_at(
    indexed: Indexed,
    places: list[int],
    ambient: frozenset[int],
    save_sets: Iterable[frozenset[int]],
) -> Blocks:
    """Measure the chain that the cuts at `places` make.

    Args:
        indexed: the step.
        places: ascending places in the forward order.
        ambient: values to save beside the chain.
        save_sets: what options save (restricted to each block).
    """
    across = live_across(indexed)
    cuts = [frozenset[int]()] + [frozenset(across[p]).difference(ambient) for p in places]
    starts = [len(indexed.backward_ops), *_boundaries(indexed, places, cuts[1:]), 0]
    ranges = [(starts[b + 1], starts[b]) for b in range(len(cuts))]
    measured = _Measure(indexed, places, cuts, ranges, ambient)
    nothing = measured.option(frozenset())
    options = []
    for save_set in dict.fromkeys(save_sets):
        option = measured.option(save_set)
        if option.saved_nbytes != nothing.saved_nbytes:
            options.append(option)
    size = [sum(indexed.nbytes[v] for v in cut) for cut in cuts]
    most = max((sum(o.saved_nbytes) for o in options), default=0)
    transient = max(max(o.backward_nbytes) for o in [nothing, *options])
    return Blocks(
        cuts=cuts,
        cut_nbytes=size,
        ranges=ranges,
        segment_end=measured.retention.segment_end or [],
        left_nbytes=measured.left_nbytes,
        carried_nbytes=_carried(indexed, ranges),
        ambient=ambient,
        nothing=nothing,
        alone=measured.alone(nothing),
        options=options,
        first_run=measured.first_run(across),
        rerun=measured.rerun(),
        beside_nbytes=measured.beside_nbytes,
        outputs_nbytes=sum(
            nbytes
            for v, nbytes in enumerate(indexed.nbytes)
            if indexed.pinned[v] and not indexed.is_backward[indexed.producer[v]]
        ),
        ceiling_nbytes=sum(size) + most + transient + sum(measured.left_nbytes),
    )


def _boundaries(indexed: Indexed, places: list[int], cuts: list[frozenset[int]]) -> list[int]:
    """Per cut, the backward position at which the part before the cut begins; falling.

    What reads nothing before the cut but the cut itself belongs to the part after it: so a cut
    need not outlive the block that starts from it only because it is also an output to read.
    """
    position = np.array([k for k, values in enumerate(indexed.demands) for _ in values], np.int64)
    value = np.array([v for values in indexed.demands for v in values], np.int64)
    rank = np.array(indexed.rank)[np.array(indexed.producer)[value]] if len(value) else value
    count = len(indexed.demands)
    result: list[int] = []
    for place, cut in zip(places, cuts, strict=True):
        early = (rank < place) & ~np.isin(value, list(cut))
        has_early = np.bincount(position[early], minlength=count) > 0
        start = _fewest_wrong(np.bincount(position, minlength=count) > 0, has_early)
        result.append(min(start, result[-1]) if result else start)
    return result


def _fewest_wrong(has_reads: Bools, early: Bools) -> int:
    """The position from which on to call all early, with the fewest readers that are not so."""
    wrong = np.where(has_reads, np.where(early, -1, 1), 0)[::-1].cumsum()
    fewest = int(wrong.argmin()) if len(wrong) else 0
    return len(early) - 1 - fewest if len(wrong) and wrong[fewest] < 0 else len(early)


def _carried(indexed: Indexed, ranges: list[tuple[int, int]]) -> list[int]:
    """Per block, bytes of backward values that are live when its backward begins."""
    positions = {op: k for k, op in enumerate(indexed.backward_ops)}
    last: dict[int, int] = {}
    for k, op in enumerate(indexed.backward_ops):
        for v in indexed.inputs[op]:
            last[v] = k
    spans = [
        (positions[indexed.producer[v]], k, indexed.nbytes[v])
        for v, k in last.items()
        if indexed.producer[v] in positions and not indexed.pinned[v]
    ]
    change = [0] * (len(positions) + 2)
    for born, end, nbytes in spans:
        change[born + 1] += nbytes
        change[end + 1] -= nbytes
    live = list(accumulate(change))
    return [live[first] for first, _ in ranges]


class _Measure:
    """Exact numbers per block from one simulation per option."""

    def __init__(
        self,
        indexed: Indexed,
        places: list[int],
        cuts: list[frozenset[int]],
        ranges: list[tuple[int, int]],
        ambient: frozenset[int],
    ) -> None:
        self.indexed, self.cuts, self.ranges, self.ambient = indexed, cuts, ranges, ambient
        self.places = places
        self.retention = Retention(segment_end=_segment_end(ranges, len(indexed.backward_ops)))
        self.beside_nbytes = indexed.problem.resident_nbytes
        self.beside_nbytes += sum(indexed.nbytes[v] for v in ambient)
        bounds = [0, *places, len(indexed.forward_order)]
        self._block_of_place = [b for b, n in enumerate(_gaps(bounds)) for _ in range(n)]
        self.left_nbytes = [
            sum(
                indexed.nbytes[v]
                for op in indexed.backward_ops[first:end]
                for v in indexed.outputs[op]
                if indexed.pinned[v]
            )
            for first, end in ranges
        ]
        self._all_cuts = frozenset().union(*cuts)

    def option(self, save_set: frozenset[int]) -> Option:
        """What saving `save_set` besides the cuts means for each block."""
        indexed = self.indexed
        steps = realise(indexed, self._all_cuts | self.ambient | save_set, self.retention)
        timeline, spans = fast_measure(indexed, steps), fast_spans(indexed, steps)
        beside = self._all_cuts | self.ambient
        inside: list[set[int]] = [set() for _ in self.cuts]
        for v in fast_saved(indexed, steps, spans):
            if v not in beside and not indexed.pinned[v]:
                inside[self._block(v)].add(v)
        size = [sum(indexed.nbytes[v] for v in values) for values in inside]
        again, peaks = self._per_block(steps, list(timeline.live_nbytes))
        stored = self._stored_before(steps, spans, self.cuts, size)
        return Option(
            saved=[frozenset(values) for values in inside],
            saved_nbytes=size,
            again_us=again,
            pass_us=[self._pass_us(b, inside[b]) for b in range(len(self.cuts))],
            backward_nbytes=[max(0, a - b) for a, b in zip(peaks, stored, strict=True)],
        )

    def alone(self, nothing: Option) -> Alone:
        """What each block's backward takes if the next cut is not there.

        Measured on two plans that save every other cut.
        """
        again, peaks = list(nothing.again_us), list(nothing.backward_nbytes)
        none: frozenset[int] = frozenset()
        for parity in (0, 1):
            cuts = [cut if b % 2 == parity else none for b, cut in enumerate(self.cuts)]
            saved = self.ambient.union(*cuts)
            steps = realise(self.indexed, saved, self.retention)
            live = list(fast_measure(self.indexed, steps).live_nbytes)
            their_again, their_peaks = self._per_block(steps, live)
            spans = fast_spans(self.indexed, steps)
            stored = self._stored_before(steps, spans, cuts, [0] * len(cuts))
            for b in range(parity, len(cuts) - 1, 2):
                again[b], peaks[b] = their_again[b], max(0, their_peaks[b] - stored[b])
        return Alone(again, peaks)

    def first_run(self, across: list[list[int]]) -> Transient:
        """What the blocks take in the forward; outputs of the step are counted elsewhere."""
        indexed = self.indexed
        kept, passed = [0] * len(self.cuts), [0] * len(self.cuts)
        for place, op in enumerate(indexed.forward_order):
            if indexed.phase[op] is not Phase.FORWARD:
                continue
            b = self._block_of_place[place]
            live = {v for v in (*across[place], *indexed.outputs[op]) if not indexed.pinned[v]}
            live -= self.ambient
            nbytes = sum(indexed.nbytes[v] for v in live) + indexed.least_extra_nbytes[op]
            of_cut = sum(indexed.nbytes[v] for v in live & self.cuts[b])
            passed[b] = max(passed[b], nbytes)
            kept[b] = max(kept[b], nbytes - of_cut)
        return Transient(kept, passed)

    def rerun(self) -> Transient:
        """What the blocks take when they run again to make the next cut."""
        both = [self._rerun(b) for b in range(len(self.cuts))]
        return Transient([kept for kept, _ in both], [passed for _, passed in both])

    def _rerun(self, b: int) -> tuple[int, int]:
        indexed, cut = self.indexed, self.cuts[b]
        after = self.cuts[b + 1] if b + 1 < len(self.cuts) else frozenset()
        ops = sorted(self._pass_ops(b, ()), key=indexed.rank.__getitem__)
        last = {v: step for step, op in enumerate(ops) for v in indexed.inputs[op]}
        last |= {v: len(ops) for v in after}
        own: set[int] = set()
        kept = passed = 0
        for step, op in enumerate(ops):
            own.update(indexed.outputs[op])
            nbytes = sum(indexed.nbytes[v] for v in own) + indexed.least_extra_nbytes[op]
            of_cut = sum(indexed.nbytes[v] for v in cut if last.get(v, -1) >= step)
            kept, passed = max(kept, nbytes), max(passed, nbytes + of_cut)
            own = {v for v in own if last.get(v, -1) > step}
        return kept, passed

    def _block(self, v: int) -> int:
        return self._block_of_place[self.indexed.rank[self.indexed.producer[v]]]

    def _per_block(self, steps: list[int], live: list[int]) -> tuple[list[float], list[int]]:
        """Recompute time and peak while each block's backward operations run."""
        count = len(self.indexed.backward_ops)
        backward = np.array(self.indexed.is_backward)[steps]
        position = np.cumsum(backward) - backward
        within = (position < count) & np.logical_or.accumulate(backward)
        us = np.where(backward, 0.0, np.array(self.indexed.time_us)[steps])[within]
        position, block = position[within], self._block_of_position()
        again = np.bincount(position, weights=us, minlength=count)
        peaks = np.zeros(len(self.cuts), dtype=np.int64)
        np.maximum.at(peaks, block[position], np.array(live, dtype=np.int64)[within])
        return np.bincount(block, weights=again, minlength=len(peaks)).tolist(), peaks.tolist()

    def _block_of_position(self) -> Ints:
        ranges = reversed([*enumerate(self.ranges)])
        return np.array([b for b, (first, end) in ranges for _ in range(first, end)], np.int64)

    def _stored_before(
        self, steps: list[int], spans: Spans, cuts: list[frozenset[int]], size: list[int]
    ) -> list[int]:
        """Per block: bytes that are live during its backward but belong to others, and its cut.

        Of what is saved beside the cut only that counts which the rest of the plan still reads.

        Args:
            steps: the plan.
            spans: its instances.
            cuts: what it saves before the blocks.
            size: per block what it saves inside.
        """
        count = len(cuts)
        change = [0] * (count + 1)
        last_block = self._last_block(steps, spans)
        ends: dict[int, tuple[int, int]] = {}
        for b, cut in enumerate(cuts):
            for v in cut:
                ends[v] = (ends.get(v, (b, b))[0], b)
        for v, (first, last) in ends.items():
            change[first] += self.indexed.nbytes[v]
            change[last + 1] -= self.indexed.nbytes[v]
            # Beyond its own blocks it counts if it is still to be read.
            later = max(last + 1, last_block.get(v, count))
            change[min(later, count)] += self.indexed.nbytes[v]
        for v in self.ambient.difference(ends):
            change[last_block.get(v, count)] += self.indexed.nbytes[v]
        stored = list(accumulate(change[:-1]))
        before = list(accumulate(size, initial=0))
        later_left = sum(self.left_nbytes)
        for b, left in enumerate(self.left_nbytes):
            later_left -= left
            stored[b] += self.indexed.problem.resident_nbytes + before[b] + later_left
        return stored

    def _last_block(self, steps: list[int], spans: Spans) -> dict[int, int]:
        """Per value made in the forward, the block whose backward reads that instance last."""
        backward = np.array(self.indexed.is_backward, dtype=np.int64)[steps]
        position = np.cumsum(backward) - backward
        start = int(backward.argmax()) if backward.any() else len(steps)
        crossing = (spans.born < start) & (spans.last >= start)
        block = self._block_of_position()
        read_in = block[np.minimum(position[spans.last[crossing]], len(block) - 1)]
        return dict(zip(spans.value[crossing].tolist(), read_in.tolist(), strict=True))

    def _pass_us(self, b: int, inside: Collection[int]) -> float:
        """Time of the operations that make the next cut and `inside` from this block's cut."""
        ops = self._pass_ops(b, inside)
        if not all(self.indexed.rerunnable[op] for op in ops):
            return NEVER_US
        return math.fsum(self.indexed.time_us[op] for op in ops)

    def _pass_ops(self, b: int, inside: Collection[int]) -> set[int]:
        indexed = self.indexed
        have = self.cuts[b] | self.ambient
        targets = set(inside)
        if b + 1 < len(self.cuts):
            targets |= self.cuts[b + 1]
        ops: set[int] = set()
        stack = [v for v in targets if v not in have]
        while stack:
            v = stack.pop()
            op = indexed.producer[v]
            outside = indexed.phase[op] is Phase.FORWARD and self._block(v) < b
            if op in ops or outside:
                continue
            ops.add(op)
            stack.extend(u for u in indexed.inputs[op] if u not in have)
        return ops


def _segment_end(ranges: list[tuple[int, int]], count: int) -> list[int]:
    """Per backward position, the last position of its block."""
    result = [0] * count
    for first, end in ranges:
        result[first:end] = [end - 1] * (end - first)
    return result


def _gaps(bounds: list[int]) -> list[int]:
    return [b - a for a, b in pairwise(bounds)]
