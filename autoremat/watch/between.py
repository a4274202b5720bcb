"""What code in eager mode takes while runs of planned graphs wait for their backward.

Enters: the end of a graph's forward, and what is live then. Leaves: the most that has been live
until the next event of a planned model: a forward, a backward, a call without gradients.
Guarantees: sees every operator of this thread that compiled code does not run; where a mode of the
user's is on, nothing. It is on from one event to the next, which no block of code contains: never
below a mode that it would end.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from autoremat import _torch
from autoremat.memory.live_storages import LiveStorages


@dataclass
class Between:
    """Of one session's steps.

    Attributes:
        peak_nbytes: the most that was live between two events of the step; 0 if none was watched.
    """

    peak_nbytes: int = 0

    def begin(self, live_nbytes: int, device: torch.device) -> None:
        """A graph has run, code in eager mode goes on."""
        close()
        if not _torch.dispatch_modes():  # which would end this one in its own place
            _thread.window = _Window(device, ignores_given=True, steps=self, before=live_nbytes)
            _thread.window.__enter__()

    def taken(self) -> int:
        """The peak of a step whose forward is over."""
        found, self.peak_nbytes = self.peak_nbytes, 0
        return found


@dataclass(eq=False)
class _Window(LiveStorages):
    """From one event to the next.

    Attributes:
        steps: whose peak it finds.
        before: bytes that were live as it began.
    """

    steps: Between = field(default_factory=Between)
    before: int = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether code is compiled and runs under it as it would without."""
        return True


class _Thread(threading.local):
    window: _Window | None = None


_thread = _Thread()


def close() -> None:
    """An event of a planned model begins on this thread."""
    window = _thread.window
    if window is None:
        return
    steps = window.steps
    if window.counts:
        window.counts = False
        steps.peak_nbytes = max(steps.peak_nbytes, window.before + window.peak_nbytes)
    if _torch.dispatch_modes()[-1:] == [window]:  # else the user's mode ends first
        _thread.window = None
        window.__exit__(None, None, None)
