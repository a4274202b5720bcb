"""A model whose parameters are divided among GPUs, as one of them holds it.

Enters: a model on the meta device, a copy of our own. Leaves: the same model, each parameter a
shard that is gathered where it is read. Guarantees: modules keep their paths; parameters that are
shared stay shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autoremat.graph.gathering import gather


def shard(model: nn.Module, shards: int, dtype: torch.dtype | None) -> None:
    """Divide each parameter among so many GPUs, as FSDP2 does: by its first dimension.

    Args:
        model: changed in place.
        shards: how many.
        dtype: that parameters are cast to before they are gathered; None for none.

    Raises:
        ValueError: if a layer would keep its whole weights.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"shards={shards} cannot be planned for {name or 'the model'}, of type "
                f"{type(module).__name__}: recurrent layers keep their weights in a form of their "
                "own. Leave shards out."
            )
    made: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for module in list(model.modules()):
        for name, whole in list(module._parameters.items()):
            if whole is None:
                continue
            if id(whole) not in made:
                part = nn.Parameter(
                    whole.new_empty(_share(whole, shards)), requires_grad=whole.requires_grad
                )
                made[id(whole)] = part, whole  # an identity is one as long as its owner lives
            module._parameters[name] = made[id(whole)][0]
            gathered: Any = _Gathered(list(whole.shape), dtype)
            parametrize.register_parametrization(module, name, gathered, unsafe=True)


def _share(whole: Tensor, shards: int) -> int:
    """Elements of the first GPU's share, which is the largest: rows are not divided."""
    rows = whole.shape[0] if whole.dim() else 1
    return -(-rows // shards) * (whole.numel() // max(1, rows))


class _Gathered(nn.Module):
    """Makes a parameter of its shard, each time that it is read."""

    def __init__(self, size: list[int], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.size, self.dtype = size, dtype

    def forward(self, part: Tensor) -> Tensor:
        return gather(part if self.dtype is None else part.to(self.dtype), self.size)
