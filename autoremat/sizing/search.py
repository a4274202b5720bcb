"""Which sizes to plan: a search for the largest that fits, and for the fastest.

Enters: a function that plans one size. Leaves: answers by size. Guarantees: nothing is returned
that was not asked at that very size; each size is asked once. Plans of a size that does not fit
are the most expensive ones, since all stages of the solver look for one that does: so the search
goes by the peaks that it has seen, which grow with the size nearly along a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoremat.sizing.model import FitPoint, Refused, rate

Answer = FitPoint | Refused
FIRST_GROWTH = 3.0  # times a size at which the plain step just fits: where nothing else is known
SECOND = 4  # times the first size: two are a line
LINES = 3  # guesses by lines; a plan that is only just found, or missed, may be off any line
LEAP = 4  # times as far as the turn before, once lines are off: mostly they are off by little


@dataclass
class Sizes:
    """The sizes that were asked.

    Attributes:
        ask: plans a size.
        step: all sizes are multiples of it.
        most: no size is larger.
        budget_nbytes: what is to fit.
    """

    ask: Callable[[int], Answer]
    step: int
    most: int | None
    budget_nbytes: int
    answers: dict[int, Answer] = field(default_factory=dict)

    def at(self, size: int) -> Answer:
        """The answer for a size."""
        if size not in self.answers:
            self.answers[size] = self.ask(size)
        return self.answers[size]

    @property
    def points(self) -> list[FitPoint]:
        """Sizes that fit, ascending."""
        found = [one for one in self.answers.values() if isinstance(one, FitPoint)]
        return sorted(found, key=lambda point: point.size)

    @property
    def refused(self) -> list[Refused]:
        """Sizes that do not, ascending."""
        found = [one for one in self.answers.values() if isinstance(one, Refused)]
        return sorted(found, key=lambda one: one.size)

    def rounded(self, size: float) -> int:
        """The next size below that is a multiple, and no larger than the most."""
        size = int(size) if self.most is None else min(int(size), self.most)
        return max(self.step, size // self.step * self.step)


def first_that_fits(sizes: Sizes, least: int) -> FitPoint | None:
    """The least size, or the next where the model does not accept that one, if it fits.

    Batch normalisation refuses a batch of one, and a size of one may be special to a model.
    """
    for size in (least, least + sizes.step):
        if sizes.most is not None and size > sizes.most:
            break
        answer = sizes.at(size)
        if isinstance(answer, FitPoint):
            return answer
        if answer.smallest_peak_nbytes is not None:
            break
    return None


def find_largest(sizes: Sizes, first: FitPoint) -> FitPoint:
    """The largest size that fits, the next one being refused or above the most allowed.

    It ends: each turn a size is asked that was not asked before, between the two or above both.
    """
    low, turns = first, 0
    highest = None if sizes.most is None else sizes.rounded(sizes.most)
    while highest is None or low.size < highest:
        above = [one for one in sizes.refused if one.size > low.size]
        if above and above[0].size - low.size <= sizes.step:
            break
        answer = sizes.at(_guess(sizes, low, above[0] if above else None, turns))
        turns += bool(above)
        if isinstance(answer, FitPoint):
            low = max(low, answer, key=lambda point: point.size)
    return low


def _guess(sizes: Sizes, low: FitPoint, high: Refused | None, turns: int) -> int:
    """The next size to plan, between what fits and what does not.

    Args:
        sizes: that were asked.
        low: the largest that fits.
        high: the smallest above it that does not, if any.
        turns: how often the two have come closer: where lines mislead, none is drawn any more.
    """
    if high is None:
        return max(sizes.rounded(_growth(sizes, low)), low.size + sizes.step)
    line = _line(sizes, high) if turns < LINES else None
    guess = sizes.rounded(_leap(sizes, low.size, high.size) if line is None else line)
    return min(max(guess, low.size + sizes.step), high.size - sizes.step)


def _leap(sizes: Sizes, low: int, high: int) -> float:
    """From the size that was asked last, further than from the one before, to half way at most."""
    middle, last = (low + high) / 2, next(reversed(sizes.answers))
    fits = [point.size for point in sizes.points]
    refused = [one.size for one in sizes.refused if one.size >= high]
    if last == low and len(fits) > 1:
        return min(middle, low + LEAP * (low - fits[-2]))
    if last == high and len(refused) > 1:
        return max(middle, high - LEAP * (refused[1] - high))
    return middle


def _growth(sizes: Sizes, low: FitPoint) -> float:
    """Where nothing was refused yet: some way beyond what fits without a plan."""
    plain = _plain_line(sizes)
    if plain is None:
        return SECOND * low.size
    if low.plan.recompute_share > 0:
        return 2.0 * low.size
    fits = (sizes.budget_nbytes - plain[0]) / plain[1]
    # The largest plain step is a point worth having.
    return fits if low.size < 0.5 * fits else FIRST_GROWTH * low.size


def _line(sizes: Sizes, high: Refused) -> float | None:
    """Where the smallest peak meets the budget, on a line through those that are known."""
    known = [
        (one.size, one.smallest_peak_nbytes)
        for one in sizes.refused
        if one.smallest_peak_nbytes is not None
    ]
    if high.smallest_peak_nbytes is None:
        return None
    plain = _plain_line(sizes)
    if len(known) == 1 and plain is not None:
        known.insert(0, (0, round(plain[0])))  # what is there whatever the size
    line = _through(known[:2])
    return None if line is None else (sizes.budget_nbytes - line[0]) / line[1]


def _plain_line(sizes: Sizes) -> tuple[float, float] | None:
    """What the step takes without a plan: whatever the size, and for each one more."""
    return _through([(point.size, point.plain.peak_nbytes) for point in sizes.points])


def _through(points: list[tuple[int, int]]) -> tuple[float, float] | None:
    """The line through the first and the last: what is fixed, and what each one more takes."""
    (first, low), (last, high) = points[0], points[-1]
    if first == last or high <= low:
        return None
    each = (high - low) / (last - first)
    return low - each * first, each


def find_fastest(sizes: Sizes, largest: FitPoint, most_points: int) -> FitPoint:
    """The size with the most per second: of a row of sizes, and of those beside the best.

    Args:
        sizes: that were asked so far.
        largest: the largest that fits.
        most_points: how many sizes may be planned in all, beside those that were.
    """
    wanted = sizes.points[0].size
    budget = most_points
    for size in (*_plain_end(sizes), *_row(sizes, wanted, largest.size, most_points)):
        if budget and size not in sizes.answers:
            sizes.at(size)
            budget -= 1
    while budget:
        beside = _beside(sizes, best_of(sizes.points))
        if not beside:
            break
        for size in beside[:budget]:
            sizes.at(size)
            budget -= 1
    return best_of(sizes.points)


def _plain_end(sizes: Sizes) -> Iterable[int]:
    """The largest size that fits without a plan, by the line of those peaks."""
    line = _plain_line(sizes)
    if line is not None:
        size = sizes.rounded((sizes.budget_nbytes - line[0]) / line[1])
        if sizes.points[0].size < size < sizes.points[-1].size:
            yield size


def _row(sizes: Sizes, least: int, largest: int, count: int) -> Iterable[int]:
    """From the largest down, each 0.7 of the one before: what is recomputed changes with ratios."""
    size = float(largest)
    for _ in range(count // 2):
        size /= 2**0.5
        found = sizes.rounded(size)
        if found <= least:
            return
        yield found


def _beside(sizes: Sizes, best: FitPoint) -> list[int]:
    """Half way from the best to the next sizes that were asked, on both sides."""
    asked = sorted(sizes.answers)
    place = asked.index(best.size)
    ends = [asked[place - 1]] if place else []
    ends += [asked[place + 1]] if place + 1 < len(asked) else []
    middles = [sizes.rounded((best.size + end + sizes.step) / 2) for end in ends]
    return [middle for middle in middles if middle not in sizes.answers]


def best_of(points: list[FitPoint]) -> FitPoint:
    """The one with the most per second; of equals the smaller."""
    return max(points, key=lambda point: (rate(point.size, point.plan), -point.size))
