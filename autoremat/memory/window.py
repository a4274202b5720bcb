"""What one device holds whole of a model whose parameters are divided among several.

Enters: a model whose parameters are whole. Leaves: a `Window`. Guarantees: nothing is divided, and
nothing is allocated: sizes are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Window:
    """Bytes beside a device's shares, as FSDP2 holds them while a block goes backward.

    Attributes:
        block_nbytes: parameters of the largest block, gathered.
        ahead_nbytes: those of the next one, gathered ahead of it; 0 where there is one block.
        gradients_nbytes: the most that gradients of one block take until they are reduced.
    """

    block_nbytes: int
    ahead_nbytes: int
    gradients_nbytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.block_nbytes + self.ahead_nbytes + self.gradients_nbytes


def window_of(model: nn.Module, dtype: torch.dtype | None = None) -> Window:
    """What is held whole if each block gathers its parameters and reduces its gradients.

    A block is a child of an outermost `nn.ModuleList`, or of an `nn.Sequential` of one class;
    without one, the model itself.

    Args:
        model: before its parameters are divided.
        dtype: that they are gathered in; None for their own.
    """
    blocks = _blocks(model)

    def largest_nbytes(*, trained: bool) -> int:
        return max(sum(_sizes(block, dtype, trained=trained)) for block in blocks or [model])

    block_nbytes = largest_nbytes(trained=False)
    ahead_nbytes = block_nbytes if len(blocks) > 1 else 0
    return Window(block_nbytes, ahead_nbytes, largest_nbytes(trained=True))


def _sizes(block: nn.Module, dtype: torch.dtype | None, *, trained: bool) -> Iterator[int]:
    for parameter in block.parameters():
        if parameter.requires_grad or not trained:
            yield parameter.numel() * (dtype or parameter.dtype).itemsize


def _blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList):
        return list(model)
    if isinstance(model, nn.Sequential) and len(model) > 1 and len(set(map(type, model))) == 1:
        return list(model)
    return [block for child in model.children() for block in _blocks(child)]
