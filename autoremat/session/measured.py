"""Steps as CUDA's allocator counts them.

Enters: the beginnings and ends of one session's steps. Leaves: the peak of whole steps, at the
second, fourth, eighth step under a plan, and so on; others cost nothing. For these steps the
allocator's peak statistics are reset, which the user may read as well: what is left to read is of
at least one whole step. Guarantees: a step in which something was compiled is not measured.
"""

from __future__ import annotations

from typing import Protocol

import torch

COUNTED = frozenset({"cuda"})  # kinds of devices whose allocator keeps a peak


def is_counted(device: torch.device) -> bool:
    """Whether the device's allocator keeps a peak."""
    return device.type in COUNTED


class Counted(Protocol):
    """A session's steps."""

    device: torch.device
    number: int
    compiled_in: list[int]

    @property
    def is_planned(self) -> bool:
        """Whether any graph was planned."""


class Measured:
    """Those of one session."""

    def __init__(self, steps: Counted) -> None:
        """None yet."""
        self._steps = steps
        self._is_open = False
        self._peak_nbytes: int | None = None  # of the step that is over, and was not asked for
        self._first = 1  # number of the first step under the plans that are there
        self._next = 1  # so many steps after it one is measured

    def planned(self) -> None:
        """There are other plans from the next step on."""
        self._is_open, self._peak_nbytes = False, None
        self._first, self._next = self._steps.number + 1, 1

    def begin(self) -> None:
        """A step begins."""
        steps = self._steps
        self._is_open, self._peak_nbytes = False, None
        if not (steps.is_planned and is_counted(steps.device)):
            return
        if steps.number - self._first >= self._next:
            torch.cuda.reset_peak_memory_stats(steps.device)
            self._is_open = True

    def end(self) -> None:
        """What comes now is no part of the step."""
        steps = self._steps
        if self._is_open and steps.compiled_in[-1:] != [steps.number]:
            self._next = 2 * (steps.number - self._first)
            self._peak_nbytes = torch.cuda.max_memory_allocated(steps.device)
        self._is_open = False

    def taken_nbytes(self) -> int | None:
        """The peak of a step that is over, if it was measured and nobody has asked yet."""
        self.end()
        peak_nbytes, self._peak_nbytes = self._peak_nbytes, None
        return peak_nbytes
