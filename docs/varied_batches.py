"""What `varying_sizes.py` trains: models, the ranges of their sizes, and batches as they come.

Enters: the number of a step. Leaves: its batch. Guarantees: steps come in epochs of as many
batches, the last of each with fewer samples; text is padded to the longest of its batch; weights
and batches are the same in each fresh case. Only sizes matter for memory, so tokens are random.

Lengths are those that a published set of instructions has under its prompt and Llama 3's
tokenizer, by their deciles (`AdamCodd/recipe-nlg-alpaca`, its page on Hugging Face, "Token
Distribution Analysis": 164, 192, 209, 228, 249, 274, 302, 337, 386, 467, 3285), cut at 512 tokens
as trainers of instructions usually do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmark_models import models, solver_graphs
from torch import Tensor, nn

from tests.models import Case

DECILES = (164, 192, 209, 228, 249, 274, 302, 337, 386, 467, 3285)
LONGEST, SHORTEST = 512, 64  # tokens
SIDES = (64, 128)  # of images
BATCH, LAST = 4, 2  # samples of a batch, and of an epoch's last
EPOCH = 8  # batches
SEED = 18

Batch = tuple[Tensor, ...]
Size = dict[str, int]  # by the names that sizes have in a report


class Text(nn.Module):
    """A language model on a padded batch, that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """The loss; where there is padding, labels are -100."""
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


@torch.compiler.disable
def tell() -> None:
    """As code that logs a warning: it breaks the graph."""


class Broken(Text):
    """The same, whose loss begins after a graph break."""

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """The loss of each token by those before it."""
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        tell()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Resolutions(nn.Module):
    """A Vision Transformer on images of any resolution, that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return self.model(images, labels=labels, interpolate_pos_encoding=True).loss


def drawn_length(draw: random.Random) -> int:
    """Tokens of a sample."""
    decile, within = divmod(draw.random() * (len(DECILES) - 1), 1.0)
    low, high = DECILES[int(decile)], DECILES[int(decile) + 1]
    return min(LONGEST, round(low + within * (high - low)))


@dataclass(frozen=True)
class Varied:
    """A model whose batches have many sizes.

    Attributes:
        make: the model and an example, in which all sizes are as large as they become.
        wrap: makes a module of the model, which returns its loss.
        over: what varies beside the batch: "sequence" or "side".
        multiple: sizes of it are multiples of this.
        images: the names of inputs that are images.
    """

    make: Callable[[], Case]
    wrap: Callable[[nn.Module], nn.Module]
    over: str
    multiple: int = 1
    images: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """As `optimize` takes them."""
        if self.over == "sequence":
            return {"batch": (1, BATCH), "sequence": (SHORTEST, LONGEST)}
        side = torch.export.Dim("side", min=SIDES[0], max=SIDES[1])
        return {"batch": (1, BATCH)} | {name: {2: side, 3: side} for name in self.images}

    @property
    def largest(self) -> Size:
        """What no batch is larger than."""
        return {"batch": BATCH, self.over: LONGEST if self.over == "sequence" else SIDES[1]}

    def drawn(self, steps: int) -> list[Size]:
        """The sizes of so many steps; the last one has the largest."""
        draw = random.Random(SEED)
        found = [self._drawn(draw, number) for number in range(steps)]
        return [*found[:-1], self.largest]

    def _drawn(self, draw: random.Random, number: int) -> Size:
        count = LAST if number % EPOCH == EPOCH - 1 else BATCH
        if self.over == "sequence":
            return {"batch": count, "sequence": max(drawn_length(draw) for _ in range(count))}
        low, high = (side // self.multiple for side in SIDES)
        return {"batch": count, "side": self.multiple * draw.randint(low, high)}

    @cached_property
    def _example(self) -> Batch:
        return self.make().inputs

    def model(self) -> nn.Module:
        """A fresh one."""
        return self.wrap(self.make().model).train()

    def batch(self, size: Size) -> Batch:
        """Of a size: padded text, or images."""
        if self.over == "sequence":
            return _padded([t[:1] for t in self._example], size["batch"], size["sequence"])
        count, side = size["batch"], size["side"]
        cut = (t[:count, :, :side, :side] if t.dim() == 4 else t[:count] for t in self._example)
        return tuple(t.clone(memory_format=torch.contiguous_format) for t in cut)


def _padded(sample: list[Tensor], count: int, longest: int) -> Batch:
    """The sample so many times: whole in the first row, and ever shorter in those behind it."""
    ids, labels = (t[:, :longest].repeat(count, 1) for t in sample)
    ends = torch.tensor([longest - row * (longest // (2 * count)) for row in range(count)])
    mask = (torch.arange(longest)[None] < ends[:, None]).long()
    return ids, labels.masked_fill(mask == 0, -100), mask


def _text(make: Callable[..., Case], layers: int, wrap: type[Text] = Text) -> Varied:
    return Varied(partial(make, layers=layers, batch=1, tokens=LONGEST), wrap, "sequence")


def _images(
    make: Callable[..., Case],
    wrap: Callable[[nn.Module], nn.Module],
    multiple: int,
    *images: str,
) -> Varied:
    make = partial(make, batch=BATCH, size=SIDES[1])
    return Varied(make, wrap, "side", multiple, images)


CASES: dict[str, Varied] = {
    "gpt2": _text(models.gpt2, 2),
    "gpt2 in two graphs": _text(models.gpt2, 2, Broken),
    "llama": _text(models.llama, 2),
    "bert": _text(models.bert, 2),
    "t5": _text(solver_graphs.t5, 1),
    "vit": _images(partial(solver_graphs.vit, layers=2), Resolutions, 8, "images"),
    "unet": _images(models.unet, models.itself, 16, "images", "targets"),
}
