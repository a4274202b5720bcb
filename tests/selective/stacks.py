"""A small stack of blocks, and what selective checkpoints are to keep of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.selective import SelectivePolicy
from tests.training import same, step

WIDTH, TOKENS, BATCH = 64, 128, 8


class Block(nn.Module):
    """Attention and two linear layers, with dropout if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm(x)).unflatten(-1, (3, 4, WIDTH // 4))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.back(F.gelu(self.wide(self.other_norm(x)))), self.dropout)


class Stack(nn.Module):
    """A small GPT without words."""

    def __init__(self, depth: int = 3, make: Callable[..., nn.Module] = Block, **options: Any):
        super().__init__()
        self.blocks = nn.ModuleList(make(**options) for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def made(kind: Callable[..., nn.Module] = Stack, /, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).train()


def batch() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def measured_peak(model: nn.Module, *inputs: Any, **keywords: Any) -> int:
    """Of one step from no gradients, what is resident included."""
    model.zero_grad(set_to_none=True)

    def run() -> None:
        output = model(*inputs, **keywords)
        (output if isinstance(output, Tensor) else output.loss).backward()

    return resident_nbytes(model, (inputs, keywords)) + measure_peak(run, device="cpu")


def planned(model: nn.Module, budget: str | int, *inputs: Any, **options: Any) -> SelectivePolicy:
    inputs = inputs or (batch(),)
    return autoremat.selective_checkpoints(model, *inputs, budget=budget, **options)


def range_of(model: nn.Module, *inputs: Any, **options: Any) -> tuple[int, int]:
    """The smallest peak, and the one without checkpoints."""
    peaks = [planned(model, budget, *inputs, **options).peak_nbytes for budget in ("min", "1TB")]
    assert peaks[0] < peaks[1]
    return peaks[0], peaks[1]


def keeps(policy: SelectivePolicy, model: nn.Module, *inputs: Any, **keywords: Any) -> None:
    """Fail unless the measured peak is the predicted one, but for 2 %, and within the budget."""
    with policy.apply(model):
        peak = measured_peak(model, *inputs, **keywords)
    assert policy.peak_nbytes <= policy.budget_nbytes
    assert 0.95 * policy.peak_nbytes <= peak <= 1.02 * policy.peak_nbytes
    assert peak <= policy.budget_nbytes


def same_gradients(policy: SelectivePolicy, model: nn.Module) -> None:
    """Fail unless loss and gradients are those of the plain model, to the last bit."""
    expected = step(model, [batch()])
    with policy.apply(model):
        found = step(model, [batch()])
    same(expected, found)


class ByKeyword(Stack):
    """Calls its blocks by keyword, as diffusers does."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.head(x).square().mean()
