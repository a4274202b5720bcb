"""How the runs of a step share its budget.

Enters: the graphs of a step, each with `Way`s to run it, and the order of their runs. Leaves: for
each graph a `Share`: one way for all of its runs, or two, the richer one for its last runs.
Guarantees: of what was tried, nothing that fits is left for what does not, nor for what is slower.

What a run keeps until its backward is held beside all runs after it, and beside none before it. So
a richer way costs least in the last runs, and nothing in the very last, whose own backward comes
first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autoremat.planning.nesting import Around, Beside, Crossing, Kept, Region, Returned, beside_each

_ROUNDS = 4  # of giving each graph the best pair of ways
_FINENESS = 1 / 128  # to which the smallest peak of a step is found


@dataclass(frozen=True)
class Way:
    """A plan that a graph could have, in numbers.

    Attributes:
        crossing_nbytes: what it keeps from forward to backward.
        forward_nbytes: peak of its forward, above what is resident and held beside the graph.
        backward_nbytes: peak of its backward, the same.
        time_us: duration of both.
        passed_nbytes: of what it keeps, what it returns and its backward does not need.
        given_away_nbytes: by how much its backward takes less if nobody holds what it returns.
    """

    crossing_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    time_us: float
    passed_nbytes: int = 0
    given_away_nbytes: int = 0

    @property
    def crossing(self) -> Crossing:
        """What it keeps, as others count it."""
        return Crossing(self.crossing_nbytes, self.passed_nbytes)

    def peak_beside(self, found: Beside) -> int:
        """Of both, above what is resident."""
        forward_nbytes = self.forward_nbytes + found.first_nbytes
        return max(forward_nbytes, self.backward_nbytes + found.most_nbytes)


@dataclass(frozen=True)
class Member:
    """A graph of a step.

    Attributes:
        resident_nbytes: live all the time, as far as this graph counts it.
        ways: how it could run, the leanest first.
        kept_by: what a run of it in a region keeps, where it hands so much to its backward.
        in_forward: the peak of a forward that takes so much itself; see `Part.in_forward`.
        has_one_plan: whether all of its runs have to go the same way.
    """

    resident_nbytes: int
    ways: tuple[Way, ...]
    kept_by: Callable[[Region, Crossing], Kept] = Kept.of
    in_forward: Callable[[int], int] = int
    has_one_plan: bool = False


@dataclass(frozen=True)
class Share:
    """How a graph runs.

    Attributes:
        lean: number of its way in all runs but the last ones.
        rich: in these.
        rich_runs: how many these are; none if `rich` is `lean`.
    """

    lean: int
    rich: int = -1
    rich_runs: int = 0


@dataclass(frozen=True)
class Shared:
    """A step: what its peak and its time are, however its runs share the budget.

    Attributes:
        members: its graphs.
        order: the number of each run: of a graph, or beyond those of a layer in eager mode.
        gradients: by run, what its backward returns.
        regions: by run, of which checkpoint it is in.
        around: what it holds beside its graphs.
        existing_nbytes: gradients that exist before it, to which its own are added.
        spare: by run, whether it is one that no step has had: those behind the last ones go lean.
        is_nested: whether the backward of a later run comes first; else all runs of a graph are
            alike, as no run is the last.
    """

    members: Sequence[Member]
    order: Sequence[int]
    gradients: Sequence[Returned]
    regions: Sequence[Region]
    around: Around
    existing_nbytes: int
    spare: Sequence[bool]
    is_nested: bool = True

    def peak_nbytes(self, shares: Sequence[Share]) -> int:
        """The highest of all forwards and backwards, and of code in eager mode."""
        return max(self._peaks(shares))

    def above_nbytes(self, shares: Sequence[Share], budget_nbytes: int) -> int:
        """By how much runs are above a budget, all of them together; 0 if it is kept."""
        return sum(max(0, peak - budget_nbytes) for peak in self._peaks(shares))

    def _peaks(self, shares: Sequence[Share]) -> Iterator[int]:
        """Of each run, and at last of code in eager mode."""
        runs, around = list(self._runs(shares)), self.around
        kept = [
            self.members[number].kept_by(region, way.crossing) if way else Kept.of(region)
            for (number, way), region in zip(runs, self.regions, strict=True)
        ]
        found = beside_each(kept, self.gradients, self.existing_nbytes)
        for (number, way), (held, most) in zip(runs, found, strict=True):
            if way is None:
                continue
            member = self.members[number]
            forward = held + around.passing_nbytes + member.in_forward(way.forward_nbytes)
            backward = most + around.returned_nbytes + way.backward_nbytes
            yield member.resident_nbytes + around.held_nbytes + max(forward, backward)
        resident = max(member.resident_nbytes for member in self.members)
        yield resident + sum(run.known_nbytes for run in kept) + around.eager_nbytes

    def time_us(self, shares: Sequence[Share]) -> float:
        """Of all runs that a step has had."""
        runs = zip(self._runs(shares), self.spare, strict=True)
        return math.fsum(way.time_us for (_, way), spare in runs if way is not None and not spare)

    def runs_of(self, number: int) -> int:
        """How often a graph runs in a step that has been."""
        return sum(n == number and not spare for n, spare in self._numbers)

    def has_spare(self, number: int) -> bool:
        """Whether a graph may run more often."""
        return any(n == number and spare for n, spare in self._numbers)

    def are_alike(self, number: int) -> bool:
        """Whether all runs of a graph go the same way."""
        member = self.members[number]
        return member.has_one_plan or not self.is_nested or self.runs_of(number) < 2

    def _runs(self, shares: Sequence[Share]) -> Iterator[tuple[int, Way | None]]:
        """Each run's number and way, which a layer in eager mode has not."""
        left = Counter(number for number, spare in self._numbers if not spare)
        for number, spare in self._numbers:
            left[number] -= not spare
            if number >= len(self.members):
                yield number, None
                continue
            share, ways = shares[number], self.members[number].ways
            is_rich = not spare and left[number] < share.rich_runs
            yield number, ways[share.rich if is_rich else share.lean]

    @property
    def _numbers(self) -> Iterator[tuple[int, bool]]:
        """Of each run, and whether it is spare."""
        return zip(self.order, self.spare, strict=True)


def divide(shared: Shared, budget_nbytes: int) -> list[Share]:
    """A share for each graph: the fastest found whose peak is within the budget, else the leanest.

    Bytes go first where they save the most time each, one run after the other; then every graph is
    given the best pair of ways beside what the others have, in turn, until nothing changes.
    """
    shares = _divided(shared, budget_nbytes)
    if shared.peak_nbytes(shares) > budget_nbytes:
        shares = min(shares, _leanest(shared), key=shared.peak_nbytes)
    return [share if share.rich != share.lean else Share(share.lean) for share in shares]


def _divided(shared: Shared, budget_nbytes: int) -> list[Share]:
    shares = _by_worth(shared, budget_nbytes)
    for _ in range(_ROUNDS):
        before = shares
        for number in range(len(shared.members)):
            shares = _best_pair(shared, shares, number, budget_nbytes)
        if shares == before:
            break
    return shares


def _leanest(shared: Shared) -> list[Share]:
    """The smallest peak found, whatever the budget: asked for once more, it is kept again."""
    low_nbytes, best = 0, _divided(shared, 0)
    while (high_nbytes := shared.peak_nbytes(best)) - low_nbytes > _FINENESS * high_nbytes:
        middle_nbytes = (low_nbytes + high_nbytes) // 2
        found = _divided(shared, middle_nbytes)
        if shared.peak_nbytes(found) > middle_nbytes:
            low_nbytes = middle_nbytes
        best = min(best, found, key=shared.peak_nbytes)
    return best


def _by_worth(shared: Shared, budget_nbytes: int) -> list[Share]:
    hulls = [_hull(member.ways) for member in shared.members]
    shares = [Share(hull[0], hull[0]) for hull in hulls]
    open_numbers = set(range(len(shares)))
    while open_numbers:
        steps = {n: _richer(shared, shares, n, hulls[n]) for n in sorted(open_numbers)}
        best = max(steps, key=lambda n: steps[n][1])
        share, worth = steps[best]
        tried = [*shares[:best], share, *shares[best + 1 :]]
        if worth > 0 and shared.peak_nbytes(tried) <= budget_nbytes:
            shares = tried
        else:
            open_numbers.remove(best)
    return shares


def _richer(
    shared: Shared, shares: Sequence[Share], number: int, hull: Sequence[int]
) -> tuple[Share, float]:
    """A graph's share with more rich runs, and the time that each byte of them saves."""
    share, ways, runs = shares[number], shared.members[number].ways, shared.runs_of(number)
    if share.rich_runs == runs or share.rich == share.lean:
        further = hull[hull.index(share.rich) + 1 :]
        if not further:
            return share, 0.0
        share = Share(share.rich, further[0], 0)
    saved_us = ways[share.lean].time_us - ways[share.rich].time_us
    more_nbytes = ways[share.rich].crossing_nbytes - ways[share.lean].crossing_nbytes
    rich_runs = runs if shared.are_alike(number) else share.rich_runs + 1
    return replace(share, rich_runs=rich_runs), saved_us / max(1, more_nbytes)


def _best_pair(
    shared: Shared, shares: Sequence[Share], number: int, budget_nbytes: int
) -> list[Share]:
    """The shares, with the best one of a graph."""
    ways, runs = shared.members[number].ways, shared.runs_of(number)

    def rank(share: Share) -> tuple[int, float]:
        tried = [*shares[:number], share, *shares[number + 1 :]]
        return shared.above_nbytes(tried, budget_nbytes), shared.time_us(tried)

    def most_rich_runs(lean: int, rich: int) -> int:
        low, high = 0, runs
        while low < high:
            middle = (low + high + 1) // 2
            fits = rank(Share(lean, rich, middle))[0] == 0
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    alone = [Share(way, way) for way in range(len(ways))]
    if shared.are_alike(number):
        return [*shares[:number], min(alone, key=rank), *shares[number + 1 :]]
    pairs = combinations(range(len(ways)), 2)
    mixed = [Share(lean, rich, most_rich_runs(lean, rich)) for lean, rich in pairs]
    best = min([shares[number], *alone, *mixed], key=rank)
    return [*shares[:number], best, *shares[number + 1 :]]


def _hull(ways: Sequence[Way]) -> list[int]:
    """Numbers of the ways that no mix of two others equals, the leanest first."""
    kept: list[int] = []
    for number in sorted(
        range(len(ways)), key=lambda n: (ways[n].crossing_nbytes, ways[n].time_us)
    ):
        if kept and ways[number].time_us >= ways[kept[-1]].time_us:
            continue
        while len(kept) > 1 and _slope(ways, kept[-2], number) >= _slope(ways, kept[-2], kept[-1]):
            kept.pop()
        kept.append(number)
    return kept


def _slope(ways: Sequence[Way], lean: int, rich: int) -> float:
    """Time saved for each byte more."""
    more_nbytes = ways[rich].crossing_nbytes - ways[lean].crossing_nbytes
    return (ways[lean].time_us - ways[rich].time_us) / max(1, more_nbytes)
