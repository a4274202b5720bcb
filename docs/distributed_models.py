"""Small models made of equal blocks, and the ways in which several processes train them.

Enters: a name of `MODELS`, a name of `WAYS`. Leaves: a model that takes tokens and gives the loss,
spread over the processes of the default group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY = 64, 4, 256
BATCH, TOKENS = 4, 128


class Attention(nn.Module):
    """Causal attention; as many heads as its projections are wide."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(found.transpose(1, 2).reshape(batch, tokens, -1))


class GPTBlock(nn.Module):
    """LayerNorm, attention, LayerNorm, an MLP with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(bias=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    """RMSNorm, attention without biases, RMSNorm, a gated MLP with SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention(bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        x = x + self.attention(self.norm1(x))
        found = self.norm2(x)
        return x + self.down(F.silu(self.gate(found)) * self.up(found))


class Decoder(nn.Module):
    """Embeddings, blocks, a norm, a head, and the loss."""

    def __init__(self, block: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt, 8 layers": (GPTBlock, 8),
    "gpt, 24 layers": (GPTBlock, 24),
    "llama, 8 layers": (LlamaBlock, 8),
    "gpt, 2 layers": (GPTBlock, 2),
}


def make(name: str) -> Decoder:
    """A model of this name, the same in each process and each time."""
    torch.manual_seed(0)
    block, layers = MODELS[name]
    return Decoder(block, layers).train()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels: others for each number."""
    generator = torch.Generator().manual_seed(number)
    tokens, labels = (
        torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator) for _ in range(2)
    )
    return tokens, labels


# --- ways --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How processes share a model.

    Attributes:
        sentence: in words.
        spread: spreads it; returns what is called.
        is_data_parallel: whether each process has a batch of its own.
        is_by_block: whether each block is compiled by itself, else the model is optimised.
        repeatable: collectives that the plan may run again, as checkpoints do.
    """

    sentence: str
    spread: Callable[[Decoder], nn.Module]
    is_data_parallel: bool = True
    is_by_block: bool = False
    repeatable: str | None = None


def shard(model: Decoder) -> nn.Module:
    """FSDP2: each block by itself, then the rest."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def replicate(model: Decoder) -> nn.Module:
    """DDP in buckets of 1 MiB, about five blocks."""
    return DistributedDataParallel(model, bucket_cap_mb=1)


def split(model: Decoder) -> nn.Module:
    """Tensor parallelism: projections in by columns, out by rows."""
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.blocks:
        names = [name for name, part in block.named_modules() if isinstance(part, nn.Linear)]
        ends = (".o", "down")
        plan = {n: RowwiseParallel() if n.endswith(ends) else ColwiseParallel() for n in names}
        parallelize_module(block, mesh, plan)
    return model


WAYS = {
    "FSDP2": Way("`fully_shard` on each block and the root, then `optimize`", shard),
    "FSDP2, blocks": Way(
        '`fully_shard` likewise, each block compiled with `backend="autoremat"`',
        shard,
        is_by_block=True,
    ),
    "DDP": Way("`optimize`, then `DistributedDataParallel` in several buckets", replicate),
    "TP": Way("`parallelize_module` on each block, then `optimize`", split, is_data_parallel=False),
    "TP, reduced again": Way(
        "`parallelize_module` likewise, then `optimize` with "
        '`repeatable="_c10d_functional.all_reduce"`',
        split,
        is_data_parallel=False,
        repeatable="_c10d_functional.all_reduce",
    ),
    "blocks": Way(
        'not spread; each block compiled with `backend="autoremat"`',
        lambda model: model,
        is_by_block=True,
    ),
}


class Checkpointed(nn.Module):
    """A block that is run again in the backward, as torch's `checkpoint_wrapper` makes it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's result."""
        found: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found


def with_checkpoints(model: Decoder) -> Decoder:
    """Each block checkpointed, as training scripts do by hand."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block)
    return model
