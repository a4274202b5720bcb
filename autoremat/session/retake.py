"""Whether a call in which memory ran out can be taken again as if it had not been.

Enters: what the call reads, before and after it. Leaves: why not, if so, and the random numbers as
they were. Guarantees: a call that has written to anything of the user's in place is not taken
again, nor one that has communicated, of which other ranks would hear twice, as far as their process
groups count it: NCCL does not count what is sent from one rank to another.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoremat import _torch

_WRITTEN = "written to parameters, buffers or inputs in place"
_COMMUNICATED = "communicated with other ranks, or may have"


class Before:
    """How tensors and random generators were before a call."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Now; the tensors are held until this is gone."""
        self._versions = [(tensor, _torch.version_of(tensor)) for tensor in tensors]
        self._collectives = _collectives()
        self._random = torch.get_rng_state()
        is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda_random = torch.cuda.get_rng_state_all() if is_used else []

    @property
    def obstacle(self) -> str:
        """What was done since that may not be done twice, in words; empty if nothing."""
        if any(_torch.version_of(tensor) != version for tensor, version in self._versions):
            return _WRITTEN
        is_silent = self._collectives is not None and self._collectives == _collectives()
        return "" if is_silent else _COMMUNICATED

    def restore_random(self) -> None:
        """The next random numbers are those that came next before."""
        torch.set_rng_state(self._random)
        if self._cuda_random:
            torch.cuda.set_rng_state_all(self._cuda_random)
            torch.cuda.empty_cache()  # what is in pieces may be too small for another plan


def _collectives() -> dict[str, int] | None:
    """How many there were so far; None where that cannot be known."""
    try:
        return _torch.collectives_so_far()
    except RuntimeError:
        return None
