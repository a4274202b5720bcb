"""Language models with low-rank adapters, without weights: what `published_peaks.py` plans.

Enters: sizes. Leaves: modules on the meta device. What they make and keep is what LitGPT's made at
commit 8641822, of which the peaks were published: adapters on queries and values, positions turned
in float32, logits in parts of 128 tokens, cast to float32 and held until the step is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_RANK, _DROPOUT = 8, 0.05
_TOKENS_OF_LOGITS = 128


@dataclass(frozen=True)
class Sizes:
    """Of a model.

    Attributes:
        width: of the residual stream.
        heads: of attention, each with its own keys and values.
        hidden: width inside the MLP.
        vocabulary: rows of the head.
        rotary: share of each head that positions turn.
        llama: RMS norms and a gated MLP, no biases; else layer norms and GELU, with biases.
        parallel: whether attention and MLP are both of the layer's input.
        one_norm: whether one norm does for both; of parallel ones only.
        head_bias: of the head.
    """

    width: int
    heads: int
    hidden: int
    vocabulary: int
    rotary: float = 1.0
    llama: bool = False
    parallel: bool = False
    one_norm: bool = False
    head_bias: bool = False

    @property
    def turned(self) -> int:
        """Elements of each head that positions turn."""
        return int(self.rotary * (self.width // self.heads))


class _RmsNorm(nn.Module):
    """In the type of its input, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5))


class _AdaptedQkv(nn.Module):
    """A frozen projection, and low-rank ones of queries and values beside it."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, 3 * width, bias=bias)
        self.down = nn.Parameter(torch.empty(2 * _RANK, width))
        self.up = nn.Parameter(torch.empty(2 * width, _RANK))
        where = torch.cat((torch.arange(width), torch.arange(2 * width, 3 * width)))
        self.register_buffer("where", where)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.dropout(x, _DROPOUT), self.down).transpose(1, 2)
        both = F.conv1d(low, self.up.unsqueeze(-1), groups=2).transpose(1, 2)
        beside = x.new_zeros(*x.shape[:-1], 3 * x.shape[-1]).index_copy(-1, self.where, both)
        return self.frozen(x) + beside * 2.0


def _turned(x: Tensor, cosines: Tensor) -> Tensor:
    """Rotary positions; those are in half precision, so what is between is in float32."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cosines
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.turned = sizes.heads, sizes.turned
        self.qkv = _AdaptedQkv(sizes.width, bias=not sizes.llama)
        self.out = nn.Linear(sizes.width, sizes.width, bias=not sizes.llama)

    def forward(self, x: Tensor, cosines: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).view(batch, tokens, self.heads, 3, width // self.heads)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        q, k = (
            torch.cat((_turned(one[..., : self.turned], cosines), one[..., self.turned :]), dim=-1)
            for one in (q, k)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class _Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        bias = not sizes.llama
        self.first = nn.Linear(sizes.width, sizes.hidden, bias=bias)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=bias) if sizes.llama else None
        self.last = nn.Linear(sizes.hidden, sizes.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.last(F.gelu(self.first(x)))
        return self.last(F.silu(self.first(x)) * self.gate(x))


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        norm = _RmsNorm if sizes.llama else nn.LayerNorm
        self.is_parallel = sizes.parallel
        self.norm1 = norm(sizes.width)
        self.norm2 = None if sizes.one_norm else norm(sizes.width)
        self.attention, self.mlp = _Attention(sizes), _Mlp(sizes)

    def forward(self, x: Tensor, cosines: Tensor) -> Tensor:
        normed = self.norm1(x)
        mixed = self.attention(normed, cosines)
        if self.norm2 is None:
            return x + mixed + self.mlp(normed)
        if self.is_parallel:
            return x + mixed + self.mlp(self.norm2(x))
        x = x + mixed
        return x + self.mlp(self.norm2(x))


class AdaptedModel(nn.Module):
    """Frozen but for its adapters, in bfloat16."""

    def __init__(self, layers: int, tokens: int, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(layers))
        self.norm = (_RmsNorm if sizes.llama else nn.LayerNorm)(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=sizes.head_bias)
        self.bfloat16()
        self.register_buffer("cosines", torch.empty(2, tokens, sizes.turned, dtype=torch.half))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """The loss, for (batch, tokens) of ids and (batch, tokens - 1) of targets, and logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cosines)
        parts = [self.head(part).float() for part in self.norm(x).split(_TOKENS_OF_LOGITS, dim=1)]
        parts[-1] = parts[-1][:, :-1]
        losses = [
            F.cross_entropy(part.flatten(0, 1), target.flatten(), reduction="none")
            for part, target in zip(parts, targets.split(_TOKENS_OF_LOGITS, dim=1), strict=True)
        ]
        return torch.cat(losses).mean(), *(part.detach() for part in parts)
