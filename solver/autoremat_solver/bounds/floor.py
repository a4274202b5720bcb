"""The peak that no plan gets below.

Enters: a `Spine`. Leaves: bytes. Whatever runs again, a position needs its reads, and what later
ones read and no second run can make (`Spine.kept`). Beyond that, these values were made or kept:
this module goes back in time from each position. Just before position k a set X of values is live.
Looking back from there, the first of these events that happened is one of

    a run of p between positions k-1 and k that made some of X: at that moment X and all that p
        reads and makes are live; before it, X without its outputs, and its inputs
    position k-1: at that moment X is live beside all that it reads; before it, X (without what
        that position makes first) and its reads
    the end of the forward: X was kept from where the forward made it

as an instance that is read later is live from the run that made it to that read. Each plan is one
way back; the least, over all ways, of the largest load on the way is proven. The search takes the
cheapest way first and may stop at any time: the cheapest way so far is proven as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from autoremat_solver.bounds.spine import Spine
from autoremat_solver.problem import Phase

WAYS_PER_POSITION = 40
WAYS = 20_000

Held = frozenset[int]


def floor_nbytes(spine: Spine, *, ways_per_position: int = WAYS_PER_POSITION) -> int:
    """No plan that `check` accepts has a smaller peak.

    Args:
        spine: the problem.
        ways_per_position: how many events to look back from each position.
    """
    if all(phase is Phase.EITHER for phase in spine.indexed.phase):
        return 0  # the empty plan may be one
    resident = spine.indexed.problem.resident_nbytes
    size = spine.indexed.nbytes
    loads = [
        fixed + sum(size[v] for v in read | kept)
        for fixed, read, kept in zip(spine.fixed_nbytes, spine.reads, spine.kept, strict=True)
    ]
    floor = max([resident, *spine.forward.nbytes, *loads, *_footprints(spine)])
    count = max(1, min(ways_per_position, WAYS // max(1, len(loads))))
    for position in sorted(range(len(loads)), key=lambda k: (-loads[k], k)):
        floor = _way_back(spine, position, floor, count)
    return floor


def _footprints(spine: Spine) -> Iterator[int]:
    """What operations without a phase take while they run, whatever the order."""
    indexed = spine.indexed
    for op, phase in enumerate(indexed.phase):
        if phase is Phase.ANY:
            own = {*indexed.inputs[op], *indexed.outputs[op]}
            nbytes = sum(indexed.nbytes[v] for v in own) + indexed.least_extra_nbytes[op]
            yield indexed.problem.resident_nbytes + nbytes


def _way_back(spine: Spine, position: int, floor: int, count: int) -> int:
    """The floor, raised by what lies before one position."""
    start = spine.reads[position] | spine.kept[position]
    queue: list[tuple[int, int, int, Held]] = [(floor, 0, position, start)]
    seen: set[tuple[int, Held]] = set()
    number = 0
    for _ in range(count):
        if not queue:
            break
        load, _, at, held = heapq.heappop(queue)
        if at < 0 or not held:
            return load
        if (at, held) in seen:
            continue
        seen.add((at, held))
        for more, before, kept in _events(spine, at, held):
            number += 1
            heapq.heappush(queue, (max(load, more), -number, before, kept))
    return queue[0][0] if queue else floor


def _events(spine: Spine, at: int, held: Held) -> Iterator[tuple[int, int, Held]]:
    """What may have happened last before a position, as (live bytes then, position, held)."""
    indexed = spine.indexed
    size = indexed.nbytes
    if at == 0:
        if not any(spine.born[v] >= 0 or indexed.problem.values[v].must_recompute for v in held):
            yield _forward_peak(spine, held), -1, held
        return
    kept = frozenset(v for v in held if spine.born[v] != at - 1) | spine.reads[at - 1]
    yield spine.fixed_nbytes[at - 1] + sum(size[v] for v in kept), at - 1, kept
    for op in sorted({indexed.producer[v] for v in held if spine.remade[v]}):
        made = [v for v in indexed.outputs[op] if v not in spine.free]
        live = held.union(made, spine.inputs[op])
        load = spine.between_nbytes[at] + sum(size[v] for v in live)
        before = held.difference(v for v in made if spine.remade[v]).union(spine.inputs[op])
        yield load + indexed.least_extra_nbytes[op], at, before


def _forward_peak(spine: Spine, held: Held) -> int:
    forward, size = spine.forward, spine.indexed.nbytes
    change = [0] * (len(forward.nbytes) + 1)
    for v in held:
        change[forward.counted_until[v]] += size[v]
    peak, kept = 0, 0
    for fixed, more in zip(forward.nbytes, change, strict=False):
        kept += more
        peak = max(peak, fixed + kept)
    return peak
