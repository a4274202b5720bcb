"""Dropout in eager mode by the masks of a step that was executed.

Enters: a Dynamo graph, and what the step's forward saved. Leaves: the graph, whose dropouts find
their masks there. Guarantees: each mask is what Philox says for its dropout's seed, written out
here (4x32, ten rounds; Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011).

Inductor draws one seed for each dropout, in their order, and numbers elements as they lie. Element
n has the first word of block n (`tl.rand`), or, in kernels over one dimension, word n % 4 of block
n // 4 (`triton_helpers.rand4x` of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

_MULTIPLIERS, _KEYS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)

SEED = 0  # of the generator from which a step draws its seeds


def drop_by(module: fx.GraphModule, saved: Sequence[Tensor]) -> None:
    """Let each dropout of a graph find its mask in what was saved."""
    dropouts = [node for node in module.graph.nodes if node.target is F.dropout]
    seeds = torch.empty(len(dropouts), dtype=torch.int64)
    torch.manual_seed(SEED)
    torch.ops.aten.randint.low_out(-(2**63), 2**63 - 1, [len(dropouts)], out=seeds)
    for node, seed in zip(dropouts, seeds.tolist(), strict=True):
        node.target = _dropout_by(seed, saved)
    module.recompile()


def _dropout_by(seed: int, saved: Sequence[Tensor]) -> Callable[..., Tensor]:
    def dropout(x: Tensor, p: float = 0.5) -> Tensor:
        words = philox(seed, x.numel())
        streams = [_uniform(words[0]), _uniform(np.stack(words, 1).ravel()[: x.numel()])]
        masks = [
            stream > p
            for stream in streams
            if any(_is_same(kept, stream) or _is_same(kept, stream > p) for kept in saved)
        ]
        assert len(masks) == 1, "what was saved are not the numbers of this seed"
        return masks[0].view(x.shape) * x * (1 / (1 - p))

    return dropout


def _is_same(kept: Tensor, values: Tensor) -> bool:
    return kept.dtype == values.dtype and torch.equal(kept.flatten(), values)


def _uniform(words: np.ndarray) -> Tensor:
    """Numbers from 0 up to 1."""
    signed = words.astype(np.uint32).view(np.int32)
    folded = np.where(signed < 0, ~signed, signed).astype(np.float32)
    return torch.from_numpy(folded * np.float32(4.6566127342e-10))


def philox(seed: int, count: int) -> list[np.ndarray]:
    """The four words of so many blocks, counted from 0."""
    keys = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    words = [np.arange(count, dtype=np.uint64), *(np.zeros(count, np.uint64) for _ in range(3))]
    for _ in range(10):
        first, second = (np.uint64(_MULTIPLIERS[i]) * words[2 * i] for i in (0, 1))
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ keys[0],
            second & _WORD,
            (first >> np.uint64(32)) ^ words[3] ^ keys[1],
            first & _WORD,
        ]
        keys = [(key + np.uint64(step)) & _WORD for key, step in zip(keys, _KEYS, strict=True)]
    return words
