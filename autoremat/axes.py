"""Axes of pictures: values to pixels, and round values for the lines of a grid.

Enters: the values that are shown, and from where to where. Leaves: an `Axis`. Guarantees: every
value lies on it, and its grid has about five lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values to pixels, and where the lines of the grid are."""

    low: float
    high: float
    start: float
    end: float

    def pixel(self, value: float) -> float:
        """Where a value is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, text: Callable[[float], str]) -> list[tuple[float, str]]:
        """Pixels and labels of about five round values."""
        step = _round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        values = [i * step for i in range(first, math.floor(self.high / step) + 1)]
        return [(self.pixel(value), text(value).replace(".0 ", " ")) for value in values]


def axis_of(values: list[float], start: float, end: float) -> Axis:
    """From zero if that leaves the dots room, else from somewhat below the lowest."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.12 * (high - low) or 0.1 * high
    return Axis(0.0 if low < 0.5 * high else low - room, high + room, start, end)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not smaller."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
