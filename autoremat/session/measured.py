"""Steps as CUDA's allocator counts them.

Enters: the beginnings of one session's steps, and the ends of their backwards. Leaves: the most
that was allocated between: of the first step in which nothing was compiled, and then ever more
rarely; others cost nothing. As such a step begins, the allocator's peak statistics are reset, which
the user may read as well. Guarantees: what comes after a backward is no part of its step; a step is
measured whole or not at all.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from autoremat.memory.meter import compiles_begun, peaks_are_taken

COUNTED = frozenset({"cuda"})  # kinds of devices whose allocator keeps a peak

_open: dict[torch.device, weakref.ref[Measured]] = {}  # whose step is measured there


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
        self._is_open = self._is_off = False
        self._peak_nbytes: int | None = None  # of the step that is over, and was not asked for
        self._compiles = 0  # so many there were before the first of the steps
        self._of_anybody = 0  # and so many of all sessions, as the step began
        self._first, self._next = 1, 2  # number of the first step, and of the one to measure
        self._after = 1  # so many after the first was the one that was measured before

    def begin(self) -> None:
        """A step begins."""
        steps = self._steps
        self._is_open, self._peak_nbytes = False, None
        if self._is_off or not (steps.is_planned and is_counted(steps.device)):
            return
        if len(steps.compiled_in) > self._compiles:  # by a graph, a size or a plan that is new
            self._compiles = len(steps.compiled_in)
            self._first, self._next, self._after = steps.number - 1, steps.number, 1
        if steps.number < self._next or peaks_are_taken():
            return
        other = _open.get(steps.device, lambda: None)()
        if other is not None:
            other._is_open = False
        try:
            torch.cuda.reset_peak_memory_stats(steps.device)
        except RuntimeError:  # a pluggable allocator keeps none
            self._is_off = True
            return
        self._is_open, self._of_anybody = True, compiles_begun()
        _open[steps.device] = weakref.ref(self)

    def end(self) -> None:
        """The backward of the step is over."""
        steps = self._steps
        if not self._is_open:
            return
        self._is_open = False
        has_compiled = len(steps.compiled_in) > self._compiles
        if has_compiled or compiles_begun() > self._of_anybody or peaks_are_taken():
            return
        self._peak_nbytes = torch.cuda.max_memory_allocated(steps.device)
        # Fibonacci's numbers, and no powers of two: of steps that accumulate gradients over four
        # batches those would see the first alone.
        after = steps.number - self._first
        self._next, self._after = steps.number + self._after, after

    def again(self) -> None:
        """What the latest step has shown may have been of that step alone."""
        self._next = self._steps.number + 1

    def taken_nbytes(self) -> int | None:
        """The peak of a step that is over, if it was measured and nobody has asked yet."""
        peak_nbytes, self._peak_nbytes = self._peak_nbytes, None
        return peak_nbytes
