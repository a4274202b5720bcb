"""Fine-tune a frozen GPT by low-rank adapters, before and after in one table.

    python examples/lora.py [--steps 60] [--share 0.4] [--compiler eager]

The GPT is that of `train_gpt.py`, with random weights that stay as they are; beside each product of
its attention stand two narrow ones that are trained (LoRA). Frozen weights have no gradient and no
optimizer state, so nearly all of the step is activations: what a plan can make smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from side_by_side import Run, arguments, side_by_side
from torch import Tensor, nn
from train_gpt import CONTEXT, GPT, corpus, sample


class Adapted(nn.Module):
    """A frozen linear layer, and beside it two trained ones of a low rank."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first it changes nothing

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return self.frozen(x) + 2.0 * self.up(self.down(x))


def make(layers: int = 12, rank: int = 8) -> GPT:
    """The GPT with adapters in its attention; nothing else is trained."""
    torch.manual_seed(0)
    model = GPT(layers=layers).requires_grad_(False)
    for block in model.blocks:
        attention = block.attention
        attention.query_key_value = Adapted(attention.query_key_value, rank)
        attention.projection = Adapted(attention.projection, rank)
    return model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for what is trained."""
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)


def main(given: Sequence[str] | None = None) -> tuple[Run, Run]:
    """Train twice and print the table."""
    args = arguments(__doc__.splitlines()[0], given, steps=60)
    data = corpus()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return (sample(data, args.batch, generator) for _ in range(args.steps))

    print(f"{args.layers} layers, {args.steps} steps of {args.batch} x {CONTEXT} bytes", flush=True)
    return side_by_side(lambda: make(args.layers), new_optimizer, batches, args)


if __name__ == "__main__":
    main()
