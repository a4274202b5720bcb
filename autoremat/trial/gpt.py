"""The step that a device is tried with: a GPT in bfloat16 autocast, as large as it has room for.

Enters: bytes that are free. Leaves: sizes; a model and its batch. Guarantees: equal sizes give
equal weights and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SEED = 0
_USED = 0.6  # of what is free: eager mode, and what libraries take, need room as well
# About, of the step without a plan: the loss's part, and for each layer what it keeps.
_FIXED_NBYTES = 1 << 30
_NBYTES_PER_TOKEN = 700_000
_MOST_BATCH = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and its batch.

    Attributes:
        layers: how many blocks.
        width: of the residual stream.
        heads: of attention.
        vocabulary: how many tokens there are.
        tokens: of a sequence.
        batch: sequences.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 8192
    tokens: int = 1024
    batch: int = 1


def sizes_for(free_nbytes: int) -> Sizes:
    """Twelve layers with the batch that so much memory has room for.

    Raises:
        ValueError: if there is too little for one sequence.
    """
    sizes = Sizes()
    room_nbytes = int(_USED * free_nbytes) - _FIXED_NBYTES
    batch = min(_MOST_BATCH, room_nbytes // (_NBYTES_PER_TOKEN * sizes.tokens))
    if batch < 1:
        needed = (_FIXED_NBYTES + _NBYTES_PER_TOKEN * sizes.tokens) / _USED
        raise ValueError(
            f"The device has {free_nbytes / 1e9:.1f} GB free, and the trial needs "
            f"{needed / 1e9:.1f} GB. End what else runs on it."
        )
    return Sizes(batch=batch)


class Block(nn.Module):
    """Causal attention, then an MLP, both on the normalised residual stream."""

    def __init__(self, sizes: Sizes) -> None:
        """Random weights."""
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.taken = nn.Linear(width, 3 * width)
        self.given = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        split = self.taken(self.norms[0](x)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.given(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """A language model whose forward, under autocast, returns its loss."""

    def __init__(self, sizes: Sizes) -> None:
        """Random weights."""
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.tokens, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of each token of (batch, tokens) given those before it."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = self.blocks(self.embedding(tokens) + self.positions)
            logits = self.head(self.norm(x))[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made(sizes: Sizes, device: torch.device) -> tuple[Gpt, Tensor]:
    """The model in train mode, and its batch, on a device."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(_SEED)
        model = Gpt(sizes).train()
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens))
    return model.to(device), tokens.to(device)
