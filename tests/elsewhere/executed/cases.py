"""Models of a few kilobytes, each a loss of its own, and the GPUs that they are planned for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, TOKENS, WORDS = 32, 2, 16, 48
SIZE = WIDTH // HEADS
Batch = tuple[Tensor, ...]


class MLP(nn.Module):
    """Embedded tokens, layers with GELU in residual sums, a norm, cross-entropy."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class GPTBlock(nn.Module):
    """Causal attention and an MLP, each behind a LayerNorm and in a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    """Causal attention of rotated queries that share a key, SwiGLU; each behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.kv = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, 2 * SIZE))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, 1, SIZE)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor) -> Tensor:
    """Each token's pairs of numbers, turned by angles of its position."""
    rates = 10_000.0 ** -(torch.arange(SIZE // 2, device=x.device) / (SIZE // 2))
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    left, right = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).type_as(x)


class Decoder(nn.Module):
    """Embedded tokens, two blocks, cross-entropy; perhaps under autocast."""

    def __init__(self, block: type[nn.Module], *, narrow: bool = False) -> None:
        super().__init__()
        self.narrow = narrow
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(block(), block())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            x = self.head(self.blocks(self.table(tokens)))
        return F.cross_entropy(x.float().flatten(0, 1), labels.flatten())


class BERT(nn.Module):
    """Two layers: attention with its products written out, an MLP; dropout as BERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.table(tokens), 0.1)
        for i, (qkv, up) in enumerate(zip(self.qkv, self.up, strict=True)):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
            found = F.dropout((q @ k.mT / SIZE**0.5).softmax(-1), 0.1) @ v
            x = self.norms[2 * i](x + F.dropout(found.transpose(1, 2).flatten(2), 0.1))
            x = self.norms[2 * i + 1](x + F.dropout(F.gelu(up(x)), 0.1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class CNN(nn.Module):
    """Convolutions with BatchNorm in train mode, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((3, 8), (8, 8), (8, 16))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (8, 8, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class UNet(nn.Module):
    """Two levels down and up, a skip connection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skip = F.silu(self.norm1(self.down(x)))
        x = F.silu(self.norm2(self.deep(F.max_pool2d(skip, 2))))
        x = F.silu(self.up(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)))
        return F.mse_loss(self.head(x), target)


@dataclass(frozen=True)
class Case:
    """A model and what its step is held to.

    Attributes:
        model: makes it.
        batch: makes a batch.
        device: the GPU that it is planned for.
        tolerance: of gradients against eager's, relative to the largest.
        rounding: how far plans' gradients may be from each other, relative to the largest.
        operators: the library calls, beside products, that its code makes.
        drops: whether it has dropout.
        attention: the only kernel of attention that is switched on; None for all.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    device: str = "A100 80GB"
    tolerance: float = 2e-6
    rounding: float = 0.0
    operators: frozenset[str] = frozenset()
    drops: bool = False
    attention: SDPBackend | None = None

    def surrounding(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model is planned and run."""
        if self.attention is None:
            return contextlib.nullcontext()
        return sdpa_kernel([self.attention])


def _words() -> Batch:
    return torch.randint(WORDS, (2, TOKENS)), torch.randint(WORDS, (2, TOKENS))


def _images() -> Batch:
    return torch.randn(2, 3, 8, 8), torch.randint(10, (2,))


def _pairs() -> Batch:
    return torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)


_CONVOLUTION = frozenset({"convolution", "convolution_backward"})
_NARROW = 3e-2  # bfloat16 has eight bits

CASES = {
    "MLP": Case(MLP, _words, "H100"),
    "GPT, attention by products": Case(
        lambda: Decoder(GPTBlock), _words, attention=SDPBackend.MATH
    ),
    "Llama, grouped queries": Case(lambda: Decoder(LlamaBlock), _words),
    "CNN, BatchNorm": Case(CNN, _images, operators=_CONVOLUTION),
    "BERT, dropout": Case(BERT, _words, drops=True),
    "UNet": Case(UNet, _pairs, operators=_CONVOLUTION),
    "GPT, attention by products, autocast": Case(
        lambda: Decoder(GPTBlock, narrow=True),
        _words,
        tolerance=_NARROW,
        rounding=_NARROW,
        attention=SDPBackend.MATH,
    ),
}
