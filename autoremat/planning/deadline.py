"""One time limit for all that choosing a plan takes: solves, and readings of generated code.

Enters: seconds. Leaves: what is left of them. A solve is given a share of it and keeps to that; a
reading cannot be interrupted, so whoever reads asks `is_over` first.
"""

from __future__ import annotations

import time


class Deadline:
    """When to stop, from the moment at which it is made."""

    def __init__(self, limit_s: float) -> None:
        """Start."""
        self.limit_s = limit_s
        self._ends_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 if it is over."""
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s == 0.0
