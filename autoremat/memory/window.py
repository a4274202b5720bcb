"""What one device holds whole of a model whose parameters are divided among several.

Enters: a model whose parameters are whole. Leaves: a `Window`. Guarantees: nothing is divided, and
nothing is allocated: sizes are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Window:
    """Bytes beside a device's shares, as FSDP2 holds them while a unit goes backward.

    Attributes:
        unit_nbytes: parameters of the largest unit, gathered.
        ahead_nbytes: those of another one, gathered ahead of it; 0 where there is one unit.
        gradients_nbytes: the most that gradients of one unit take until they are reduced.
    """

    unit_nbytes: int
    ahead_nbytes: int
    gradients_nbytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.unit_nbytes + self.ahead_nbytes + self.gradients_nbytes


def window_of(model: nn.Module, dtype: torch.dtype | None = None) -> Window:
    """What is held whole if each unit gathers its parameters and reduces its gradients.

    A unit is a block, a child of an outermost `nn.ModuleList` or of an `nn.Sequential` of one
    class; and each module beside them that has parameters, as an embedding. Without blocks it is
    the model itself.

    Args:
        model: before its parameters are divided.
        dtype: that they are gathered in; None for their own.
    """
    units = _units(model)
    sizes = sorted(sum(_sizes(unit, dtype, trained=False)) for unit in units)
    return Window(
        sizes[-1],
        sizes[-2] if len(sizes) > 1 else 0,
        max(sum(_sizes(unit, dtype, trained=True)) for unit in units),
    )


def _sizes(
    unit: Iterable[nn.Parameter], dtype: torch.dtype | None, *, trained: bool
) -> Iterator[int]:
    for parameter in unit:
        if parameter.requires_grad or not trained:
            yield parameter.numel() * (dtype or parameter.dtype).itemsize


def _units(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each."""
    blocks = [list(block.parameters()) for block in _blocks(model)]
    if not blocks:
        return [list(model.parameters())]
    counted = {id(parameter) for block in blocks for parameter in block}
    units = blocks
    for module in model.modules():  # one that is tied is of the first that has it
        own = [p for p in module.parameters(recurse=False) if id(p) not in counted]
        counted.update(map(id, own))
        units = [*units, own] if own else units
    return units


def _blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList):
        return list(model)
    if isinstance(model, nn.Sequential) and len(model) > 1 and len(set(map(type, model))) == 1:
        return list(model)
    return [block for child in model.children() for block in _blocks(child)]
