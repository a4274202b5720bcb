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

from autoremat_solver.heuristics import backward_boundaries, live_across, segment_ends
from autoremat_solver.indexed import Indexed
from autoremat_solver.problem import Phase
from autoremat_solver.realise import Retention, realise
from autoremat_solver.simulate import measure, saved_of


@dataclass(frozen=True)
class Option:
    """One way to save inside blocks; all lists are per block.

    Attributes:
        saved: values saved inside the block, cuts not counted.
        saved_nbytes: their size.
        again_us: recompute time in the block's backward.
        pass_us: time to run the block again up to its end, making `saved` on the way.
        backward_nbytes: peak of the block's backward above what was stored before the block.
    """

    saved: list[frozenset[int]]
    saved_nbytes: list[int]
    again_us: list[float]
    pass_us: list[float]
    backward_nbytes: list[int]


@dataclass(frozen=True)
class Blocks:
    """A chain of blocks.

    Attributes:
        cuts: per block, the values that cross into it (none into the first).
        cut_nbytes: their size.
        ranges: per block, first backward position and one past the last.
        segment_end: per backward position, the last position of its block.
        left_nbytes: per block, bytes of outputs that its backward makes.
        ambient: values saved beside the chain because they cross many cuts.
        nothing: the option that saves nothing inside blocks.
        options: the other options.
        ceiling_nbytes: memory with which the DP need not recompute.
    """

    cuts: list[frozenset[int]]
    cut_nbytes: list[int]
    ranges: list[tuple[int, int]]
    segment_end: list[int]
    left_nbytes: list[int]
    ambient: frozenset[int]
    nothing: Option
    options: list[Option]
    ceiling_nbytes: int


def narrow_places(indexed: Indexed, ambient: Collection[int], limit: int) -> list[int]:
    """Places in the forward order where little crosses: at most `limit`, ascending.

    Local minima of the crossing bytes; the neighbourhood grows until few enough remain, and what
    still remains (a plain chain is narrow everywhere) is thinned evenly.
    """
    across = [frozenset(cut).difference(ambient) for cut in live_across(indexed)]
    width = [sum(indexed.nbytes[v] for v in cut) for cut in across]
    places: list[int] = []
    for reach in (1, 2, 4, 8, 16, 32, 64, 128):
        places = _local_minima(across, width, reach)
        if len(places) <= limit:
            return places
    keep = [round(i * (len(places) - 1) / (limit - 1)) for i in range(limit)]
    return sorted({places[i] for i in keep})


def _local_minima(across: list[frozenset[int]], width: list[int], reach: int) -> list[int]:
    places: list[int] = []
    for place in range(1, len(width)):
        near = width[max(1, place - reach) : place + reach + 1]
        is_new = not places or across[place] != across[places[-1]]
        if width[place] == min(near) and is_new and width[place] > 0:
            places.append(place)
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
    starts = [len(indexed.backward_ops), *backward_boundaries(indexed, places), 0]
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
        ambient=ambient,
        nothing=nothing,
        options=options,
        ceiling_nbytes=sum(size) + most + transient + sum(measured.left_nbytes),
    )


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
        self.retention = Retention(segment_end=segment_ends(indexed, places))
        self._block_of_place = [0] * len(indexed.forward_order)
        for b, place in enumerate(places, start=1):
            for p in range(place, len(indexed.forward_order)):
                self._block_of_place[p] = b
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
        timeline = measure(indexed, steps)
        beside = self._all_cuts | self.ambient
        inside: list[set[int]] = [set() for _ in self.cuts]
        for v in saved_of(indexed, steps):
            if v not in beside and not indexed.pinned[v]:
                inside[self._block(v)].add(v)
        size = [sum(indexed.nbytes[v] for v in values) for values in inside]
        again, peaks = self._per_block(steps, list(timeline.live_nbytes))
        stored = self._stored_before(size)
        return Option(
            saved=[frozenset(values) for values in inside],
            saved_nbytes=size,
            again_us=again,
            pass_us=[self._pass_us(b, inside[b]) for b in range(len(self.cuts))],
            backward_nbytes=[max(0, a - b) for a, b in zip(peaks, stored, strict=True)],
        )

    def _block(self, v: int) -> int:
        return self._block_of_place[self.indexed.rank[self.indexed.producer[v]]]

    def _per_block(self, steps: list[int], live: list[int]) -> tuple[list[float], list[int]]:
        """Recompute time and peak while each block's backward operations run."""
        indexed, count = self.indexed, len(self.cuts)
        block_at = [0] * (len(indexed.backward_ops) + 1)
        for b, (first, end) in enumerate(self.ranges):
            block_at[first:end] = [b] * (end - first)
        again, peaks = [0.0] * count, [0] * count
        position, begun = 0, False
        pending = (0.0, 0)
        for op, nbytes in zip(steps, live, strict=True):
            begun = begun or indexed.is_backward[op]
            if not begun:
                continue
            extra = 0.0 if indexed.is_backward[op] else indexed.time_us[op]
            pending = (pending[0] + extra, max(pending[1], nbytes))
            if indexed.is_backward[op]:
                b = block_at[position]
                again[b] += pending[0]
                peaks[b] = max(peaks[b], pending[1])
                pending = (0.0, 0)
                position += 1
        return again, peaks

    def _stored_before(self, size: list[int]) -> list[int]:
        """Per block: bytes that are live during its backward but belong to others."""
        indexed = self.indexed
        beside = indexed.problem.resident_nbytes
        beside += sum(indexed.nbytes[v] for v in self.ambient)
        result = []
        later = sum(self.left_nbytes)
        union: set[int] = set()
        before = 0
        for b, cut in enumerate(self.cuts):
            union |= cut
            later -= self.left_nbytes[b]
            cuts = sum(indexed.nbytes[v] for v in union)
            result.append(beside + cuts + before + later)
            before += size[b]
        return result

    def _pass_us(self, b: int, inside: Collection[int]) -> float:
        """Time of the operations that make the next cut and `inside` from this block's cut."""
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
        return math.fsum(indexed.time_us[op] for op in ops)
