"""What to save of which block: few steps are tried, and the fastest that fits is taken.

Enters: a `Trial`, the names of the blocks, a limit in bytes. Leaves: the best choice that was
found, and its outcome. Guarantees: each choice that is returned was tried and is within the limit.

In a region of eager mode all that is not saved runs again at once, so each call of an operator is
worth its own time whatever else is saved, and costs its own bytes. So calls are saved in the order
of time per byte, as many as fit; and some of the last blocks may run in no checkpoint at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoremat.selective.policy import OperatorCall
from autoremat.selective.prices import Prices
from autoremat.selective.trial import Choice, Outcome, Region, Trial

SINGLE_TRIES = 4  # of calls that are not next in order, at the end


@dataclass(frozen=True)
class Item:
    """Calls of one block that are saved together.

    Attributes:
        block: its number.
        calls: several where one without the others would change what is drawn at random.
        nbytes: what saving them takes.
        time_us: what it spares.
    """

    block: int
    calls: frozenset[OperatorCall]
    nbytes: int
    time_us: float

    @property
    def order(self) -> tuple[float, int]:
        """What spares most for its bytes comes first; of equal ones that of the last block."""
        return (-self.time_us / max(1, self.nbytes), -self.block)


@dataclass(frozen=True)
class Found:
    """A choice that was tried."""

    choice: Choice
    outcome: Outcome


class Search:
    """Over one step's choices."""

    def __init__(self, trial: Trial, leanest: Choice, time_limit_s: float) -> None:
        """Of a trial whose operators have prices.

        Args:
            trial: runs a choice.
            leanest: what has to be saved, by block, in the order in which they run.
            time_limit_s: after which nothing more is tried, once something fits.
        """
        self._trial, self._blocks = trial, list(leanest)
        self._until = time.monotonic() + time_limit_s
        self.plain = self._tried({})
        self.lean = self._tried(leanest)
        self._but_last = self._tried(self._without_last(1)) if len(leanest) > 1 else self.plain

    @property
    def smallest(self) -> Found:
        """What peaks lowest of what is tried without a search."""
        known = (self.lean, self._but_last, self.plain)
        return min(known, key=lambda found: found.outcome.peak_nbytes)

    def within(self, limit_nbytes: int) -> Found | None:
        """The fastest that was found; None if nothing fits."""
        tried = (self.plain, self.lean, self._but_last)
        known = [found for found in tried if found.outcome.peak_nbytes <= limit_nbytes]
        if self.plain in known or not known:
            return known[0] if known else None
        items = sorted(self._items(), key=lambda item: item.order)
        known += [self._filled(found, items, limit_nbytes) for found in known]
        outside = self._most(self._without_last, len(self._blocks), self.lean, limit_nbytes)
        if outside is not self.lean:
            known.append(self._filled(outside, items, limit_nbytes))
        best = min(known, key=lambda found: found.outcome.extra_us)
        return self._single(best, items, limit_nbytes)

    def _tried(self, choice: Choice) -> Found:
        return Found(choice, self._trial.run(choice))

    def _items(self) -> list[Item]:
        prices = self._trial.prices
        return [
            item
            for number, block in enumerate(self._blocks)
            if block in self.lean.outcome.regions
            for item in items_of(number, self.lean.outcome.regions[block], prices)
        ]

    def _filled(self, base: Found, items: Sequence[Item], limit_nbytes: int) -> Found:
        """The base with as many of the items as fit, in their order."""
        open_items = [item for item in items if self._blocks[item.block] in base.choice]
        make = lambda count: self._with(base.choice, open_items[:count])  # noqa: E731
        return self._most(make, len(open_items), base, limit_nbytes)

    def _without_last(self, count: int) -> Choice:
        """All blocks in checkpoints that save nothing, but for so many of the last."""
        kept = self._blocks[: len(self._blocks) - count]
        return {block: self.lean.choice[block] for block in kept}

    def _with(self, choice: Choice, items: Sequence[Item]) -> Choice:
        more: dict[str, list[frozenset[OperatorCall]]] = {}
        for item in items:
            more.setdefault(self._blocks[item.block], []).append(item.calls)
        return {block: saved.union(*more.get(block, ())) for block, saved in choice.items()}

    def _most(
        self, make: Callable[[int], Choice], most: int, base: Found, limit_nbytes: int
    ) -> Found:
        """The largest number whose choice fits, by halving; the base is that of 0."""
        best, low, high = base, 0, most + 1
        while high - low > 1 and self._has_time:
            middle = (low + high) // 2
            found = self._tried(make(middle))
            if found.outcome.peak_nbytes <= limit_nbytes:
                best, low = found, middle
            else:
                high = middle
        return best

    def _single(self, best: Found, items: Sequence[Item], limit_nbytes: int) -> Found:
        """The best with single calls more, those first that spare most."""
        rest = [
            item
            for item in items
            if self._blocks[item.block] in best.choice
            and not item.calls <= best.choice[self._blocks[item.block]]
        ]
        spare_nbytes = limit_nbytes - best.outcome.peak_nbytes
        rest.sort(key=lambda item: (item.nbytes > spare_nbytes, -item.time_us))
        for item in rest[:SINGLE_TRIES]:
            if not self._has_time:
                break
            found = self._tried(self._with(best.choice, [item]))
            fits = found.outcome.peak_nbytes <= limit_nbytes
            if fits and found.outcome.extra_us < best.outcome.extra_us:
                best = found
        return best

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._until


def items_of(block: int, region: Region, prices: Prices) -> list[Item]:
    """What may be saved of a block, of what runs again if nothing is."""
    written = {seen.call for seen in region.first if seen.is_written}
    drawn = frozenset(seen.call for seen in region.first if prices.draws(seen.key))
    found: dict[frozenset[OperatorCall], list[tuple[int, float]]] = {}
    for seen in region.again:
        calls = drawn if seen.call in drawn else frozenset([seen.call])
        if seen.nbytes and written.isdisjoint(calls):
            found.setdefault(calls, []).append((seen.nbytes, seen.time_us))
    return [
        Item(block, calls, sum(n for n, _ in parts), sum(t for _, t in parts))
        for calls, parts in found.items()
    ]
