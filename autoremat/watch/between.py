"""What code in eager mode takes while runs of planned graphs wait for their backward.

Enters: the end of a graph's forward, and what is live then. Leaves: the most that has been live
until the next event of a planned model: a forward, a backward, a call without gradients; and what
of it somebody still holds, as the graph of another loss does.
Guarantees: sees every operator of this thread that compiled code does not run; where a mode of the
user's is on, nothing. It is on from one event to the next, which no block of code contains: never
below a mode that it would end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat import _torch
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.storage_sizes import same_device, storage_identities

# What kernels of losses take for themselves while they run, beside their result: so many times the
# largest that they are given. No result shows it.
_INSIDE = {
    "binary_cross_entropy_with_logits": 2,
    "huber_loss": 1,
    "logsumexp": 1,
    "mse_loss": 1,
    "smooth_l1_loss": 1,
}


@dataclass
class Between:
    """Of one session's steps.

    Attributes:
        peak_nbytes: the most that was live between two events of the step; 0 if none was watched.
        number: how often code in eager mode went on in the step.
    """

    peak_nbytes: int = 0
    number: int = 0
    _windows: list[_Window] = field(default_factory=list)  # of the step, which are over

    def step_begins(self) -> None:
        """What code in eager mode holds of another step counts as nothing new."""
        self._windows.clear()

    def held(self) -> dict[int, int]:
        """Bytes of what such code has made in the step and somebody holds, by storage."""
        return {key: n for window in self._windows for key, n in window.live.copy().items()}

    def ended(self, window: _Window) -> None:
        """An event has come."""
        self.peak_nbytes = max(self.peak_nbytes, window.before + window.peak_nbytes)
        self._windows.append(window)

    def begin(self, live_nbytes: int, device: torch.device, run: object) -> None:
        """Code in eager mode goes on, while this run waits; what may begin was asked before."""
        _torch.let_modes_outlast_compiled_calls()
        _thread.window = _Window(device, ignores_given=True, steps=self, before=live_nbytes)
        _thread.window.__enter__()
        weakref.finalize(run, _is_in_vain, _thread.window).atexit = False

    def taken(self) -> int:
        """The peak of a step whose forward is over."""
        found, self.peak_nbytes, self.number = self.peak_nbytes, 0, 0
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator, and note what it makes and has taken for itself."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        count = _INSIDE.get(getattr(func, "__name__", "").partition(".")[0], 0)
        if count and self.counts:
            given = _torch.tensor_leaves((args, kwargs))
            here = (one.nbytes for one in given if same_device(one.device, self.device))
            most_nbytes = max(here, default=0)
            self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + count * most_nbytes)
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":  # of a fake tensor's
            super()._track(storage)


class _Thread(threading.local):
    window: _Window | None = None


_thread = _Thread()


def may_begin() -> bool:
    """Whether no mode is on that would end this one in its own place."""
    return _thread.window is None and not _torch.dispatch_modes()


def close(given: Sequence[torch.Tensor | None] = ()) -> None:
    """An event of a planned model begins on this thread: that is given these, which count there."""
    window = _thread.window
    if window is None:
        return
    if window.counts:
        for tensor in given:
            with suppress(NotImplementedError, RuntimeError):  # some wrappers have no storage
                for identity in storage_identities([] if tensor is None else [tensor]):
                    window.live.pop(identity, None)
        window.steps.ended(window)
    _leave(window)


def _leave(window: _Window) -> None:
    window.counts = False
    if _torch.dispatch_modes()[-1:] == [window]:  # else the user's mode ends first
        _thread.window = None
        window.__exit__(None, None, None)


def _is_in_vain(window: _Window) -> None:
    """The run is gone without a backward."""
    if window is _thread.window:
        _leave(window)
