"""What tracing reads beside the module: switches of the process and of this thread.

Enters: nothing. Leaves: them as they are now, in words, and a context in which they are so again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Ambient"]

_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}

_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class Ambient:
    """At one moment.

    Attributes:
        switches: their values, by name.
        autocast: for each kind of device, whether it is on, and to which type it casts.
    """

    switches: tuple[tuple[str, Any], ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Ambient:
        """As they are."""
        return cls(
            tuple((name, get()) for name, (get, _) in _SWITCHES.items()),
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST
            ),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """All of them as they were, and afterwards as they are."""
        before = Ambient.now()
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        for name, value in self.switches:
            get, put = _SWITCHES[name]
            if get() != value:
                put(value)
        for device, is_on, dtype in self.autocast:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
