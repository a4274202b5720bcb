"""A model of equal residual blocks, and how FSDP2 shards it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Block(nn.Module):
    """`x + down(gelu(up(x)))`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class ResidualBlocks(nn.Module):
    """A linear layer, equal blocks, and a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each block by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model)
