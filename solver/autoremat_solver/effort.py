"""How much a stage may still search, counted in what it does, never in seconds.

Enters: counts. Leaves: the answer whether any of them is left. A search that counts finds the same
plan on any machine, under any load; a clock only decides whether the next stage begins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

SIMULATION = 300  # operations that calling the simulator costs, however short the schedule


@dataclass
class Effort:
    """What one stage may still spend.

    Attributes:
        operations: that may still be simulated; a simulation of n of them costs n and a little.
    """

    operations: int

    def simulated(self, operations: int) -> None:
        """Note a simulation of so many operations."""
        self.operations -= operations + SIMULATION

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.operations <= 0

    def part(self, share: float) -> Effort:
        """A share of what is left, as an effort of its own; this one is less by what it spends."""
        return _Part(int(share * max(0, self.operations)), self)


@dataclass
class _Part(Effort):
    """A share of another effort."""

    of: Effort

    def simulated(self, operations: int) -> None:
        super().simulated(operations)
        self.of.simulated(operations)


class CutOff:
    """The moment from which on no further stage begins.

    Args:
        limit_s: seconds from now on.
    """

    def __init__(self, limit_s: float) -> None:
        """Start the clock: a monotonic one, which no change of the time of day moves."""
        self._until_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 if it has passed."""
        return max(0.0, self._until_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the moment has passed."""
        return self.left_s == 0.0
