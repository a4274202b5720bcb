"""A model whose parameters are divided among GPUs, as one of them holds it.

Enters: a model on the meta device, a copy of our own. Leaves: the same model, each parameter a
shard that is gathered where it is read; and the bytes that FSDP holds beside. Guarantees: modules
keep their paths; parameters that are shared stay shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autoremat.graph.gathering import gather


def block_nbytes(model: nn.Module, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes of the parameters of the largest block, and of those of its gradients.

    A block is a child of an outermost `nn.ModuleList`; without one, the model itself.

    Args:
        model: before its parameters are divided.
        dtype: that they are gathered in; None for their own.
    """
    blocks = _blocks(model) or [model]

    def nbytes(block: nn.Module, *, trained: bool) -> int:
        found = {id(p): p for p in block.parameters() if p.requires_grad or not trained}
        return sum(p.numel() * (dtype or p.dtype).itemsize for p in found.values())

    whole = [(nbytes(block, trained=False), nbytes(block, trained=True)) for block in blocks]
    return max(whole)


def _blocks(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in _blocks(child)]


def shard(model: nn.Module, shards: int, dtype: torch.dtype | None) -> None:
    """Divide each parameter among so many GPUs.

    Args:
        model: changed in place.
        shards: how many.
        dtype: that parameters are cast to before they are gathered; None for none.
    """
    made: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for module in list(model.modules()):
        for name, whole in list(module._parameters.items()):
            if whole is None:
                continue
            if id(whole) not in made:
                part = nn.Parameter(
                    whole.new_empty(-(-whole.numel() // shards)), requires_grad=whole.requires_grad
                )
                made[id(whole)] = part, whole  # an identity is one as long as its owner lives
            module._parameters[name] = made[id(whole)][0]
            gathered: Any = _Gathered(list(whole.shape), dtype)
            parametrize.register_parametrization(module, name, gathered, unsafe=True)


class _Gathered(nn.Module):
    """Makes a parameter of its shard, each time that it is read."""

    def __init__(self, size: list[int], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, part: Tensor) -> Tensor:
        return gather(part if self.dtype is None else part.to(self.dtype), self.size)
