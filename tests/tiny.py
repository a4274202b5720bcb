"""Models and batches of a few kilobytes, which several test modules share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
ROWS = 64


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of 64 rows of 32 numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)


def sequences() -> Tensor:
    """A batch of 2 sequences of 16 steps."""
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    """A batch of 4 images of 8 channels."""
    return torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """A stack of linear layers for subclasses to wire."""

    def __init__(self, layers: int = 3, out: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, out) for _ in range(layers))

    @property
    def first(self) -> nn.Module:
        return self.layers[0]

    @property
    def second(self) -> nn.Module:
        return self.layers[1]


class Dropout(Layers):
    """Dropout after each layer, inside a residual sum."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.3)
        return x.square().mean()


class Buffered(Layers):
    """Layers with two buffers for subclasses to write into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(2, WIDTH))


def many_rows(count: int = 256) -> Tensor:
    """A batch of rows of 32 numbers."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


class Chain(nn.Module):
    """Six layers of `tanh(linear)`; 32 KiB per activation, 4 KiB per gradient."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Residual(Layers):
    """`x + tanh(gelu(linear(x)))` three times: recompute pays at small budgets."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(F.gelu(layer(x)))
        return x.float().square().mean()


class Block(nn.Module):
    """A layer with parts; a number is given to each call, a pair comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.kind = "block"

    def forward(self, x: Tensor, scale: Tensor, *, shift: float = 0.0) -> tuple[Tensor, None]:
        return x + scale * torch.tanh(self.inner[1](F.gelu(self.inner[0](x)))) + shift, None


class Blocks(nn.Module):
    """A stem and blocks, called as transformers call theirs."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.stem(x), torch.full((1,), 0.5)
        for block in self.blocks:
            assert block.kind == "block"
            x, _ = block(x, scale, shift=0.1)
        return x.square().mean()
