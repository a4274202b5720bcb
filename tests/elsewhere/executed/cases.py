"""A model of a few kilobytes that is its own loss, and a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 32, 50


class MLP(nn.Module):
    """Embedded tokens, layers with GELU in residual sums, a norm, cross-entropy."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(self.norm(x)), labels)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and their labels."""
    return torch.randint(WORDS, (64,)), torch.randint(WORDS, (64,))
