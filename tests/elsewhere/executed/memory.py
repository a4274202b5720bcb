"""Memory that stands for a GPU's: on the CPU, each block counted from its making to its end.

Enters: sizes, strides and types. Leaves: tensors, and the events of an allocator. Guarantees: a
block ends when the last tensor in it does, which is what torch's allocator is told as well; what
nobody has written reads as NaN, or -1.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

ROUNDING = 512  # of torch's allocator for CUDA


class Memory:
    """What was asked of it.

    Attributes:
        events: pairs of a block and its bytes, 0 where it is freed.
        live_nbytes: of all blocks.
        peak_nbytes: the most that they were.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.live_nbytes = self.peak_nbytes = self._blocks = 0

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor in a block of its own, which holds nothing yet."""
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = 0 if 0 in size else (last + 1) * dtype.itemsize
        given_nbytes = -(-nbytes // ROUNDING) * ROUNDING
        array = np.full(max(given_nbytes, 1), 0xFF, dtype=np.uint8)
        if given_nbytes:
            block, self._blocks = self._blocks, self._blocks + 1
            self._note(block, given_nbytes)
            weakref.finalize(array, self._free, block, given_nbytes)
        with _disable_current_modes():
            flat = torch.from_numpy(array)[: max(nbytes, 0)].view(dtype)
            return flat.as_strided(tuple(size), tuple(stride))

    def _free(self, block: int, nbytes: int) -> None:
        self.live_nbytes -= nbytes
        self.events.append((block, 0))

    def _note(self, block: int, nbytes: int) -> None:
        self.live_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        self.events.append((block, nbytes))


def in_order_of_making(events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same events, blocks numbered as they are made."""
    numbers: dict[int, int] = {}
    for block, nbytes in events:
        if nbytes:
            numbers[block] = len(numbers)
    return [(numbers[block], nbytes) for block, nbytes in events]
