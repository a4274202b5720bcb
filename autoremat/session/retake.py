"""Whether a call in which memory ran out can be taken again as if it had not been.

Enters: what the call reads, before and after it. Leaves: yes or no, and the random numbers as they
were. Guarantees: a call that has written to anything of the user's in place is not taken again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoremat import _torch


class Before:
    """How tensors and random generators were before a call."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Now; the tensors are held until this is gone."""
        self._versions = [(tensor, _torch.version_of(tensor)) for tensor in tensors]
        self._random = torch.get_rng_state()
        is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda_random = torch.cuda.get_rng_state_all() if is_used else []

    @property
    def is_now(self) -> bool:
        """Whether nothing was written to since."""
        return all(_torch.version_of(tensor) == version for tensor, version in self._versions)

    def restore_random(self) -> None:
        """The next random numbers are those that came next before."""
        torch.set_rng_state(self._random)
        if self._cuda_random:
            torch.cuda.set_rng_state_all(self._cuda_random)
            torch.cuda.empty_cache()  # what is in pieces may be too small for another plan
