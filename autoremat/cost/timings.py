"""How many rounds tell a time, and which are not to be believed: something else used the machine.

Enters: the times of a few rounds of each operator call. Leaves: the calls to be measured again.
Guarantees: a time that comes again and again is believed, however odd; nothing runs here.

How calls compare decides plans, not how fast the machine was. Of two or three rounds, the quietest
of a call was off by up to 30 % beside those of others; of five by up to 8 %.
(`docs/timing_rounds.md`)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROUNDS = 5  # over all calls, one after the other: load comes in bursts
_FEWEST_ROUNDS = 2
_ENOUGH_US = 200_000.0  # of one call, after which further rounds would cost more than they tell
_AGREEMENT = 3.0  # two times that differ by more are not of one thing; load has made 14 of it
_LIKE = 2.0  # calls are of like size if one is expected to take at most so much longer
_ROUNDS_ALONE = 2  # that have to agree where nothing contradicts them
_MORE_AGAINST_LIKE = 2  # that have to agree as well where a call of like size is much faster


def is_settled(rounds_us: Sequence[float]) -> bool:
    """Whether a further round would tell nothing new."""
    return len(rounds_us) >= _rounds_of(min(rounds_us))


def _rounds_of(quietest_us: float) -> int:
    """How many rounds a call gets; by its quietest one, as load must not end them early."""
    if ROUNDS * quietest_us <= _ENOUGH_US:
        return ROUNDS
    return max(_FEWEST_ROUNDS, math.ceil(_ENOUGH_US / quietest_us))


@dataclass(frozen=True, slots=True)
class Timing:
    """What the rounds over one operator call took.

    Attributes:
        rounds_us: the time of each round.
        operator: equal for calls that can be compared.
        expected_us: by bytes and FLOPs, on any device: it tells how calls compare.
    """

    rounds_us: tuple[float, ...]
    operator: str
    expected_us: float

    @property
    def time_us(self) -> float:
        """Of the quietest round: load only ever adds."""
        return min(self.rounds_us)

    def agrees(self, rounds: int) -> bool:
        """Whether so many of the rounds took about the same, the quietest among them."""
        taken = sorted(self.rounds_us)[:rounds]
        return len(taken) == rounds and taken[-1] <= _AGREEMENT * taken[0]


def implausible(timings: Mapping[str, Timing]) -> set[str]:
    """The calls whose rounds contradict each other, or a faster call of like size."""
    like: defaultdict[str, list[Timing]] = defaultdict(list)
    for timing in timings.values():
        like[timing.operator].append(timing)
    return {key for key, timing in timings.items() if not _is_sound(timing, like[timing.operator])}


def _is_sound(timing: Timing, like: list[Timing]) -> bool:
    if not any(_is_far_slower(timing, other) for other in like):
        return timing.agrees(_ROUNDS_ALONE)
    # The first rounds may lie within one burst: those behind a pause have to agree with them.
    return timing.agrees(_rounds_of(timing.time_us) + _MORE_AGAINST_LIKE)


def _is_far_slower(one: Timing, other: Timing) -> bool:
    """By more than their sizes tell, if these are about the same."""
    size = one.expected_us / other.expected_us
    is_like = 1 / _LIKE <= size <= _LIKE
    return is_like and one.time_us > _AGREEMENT * size * other.time_us
