"""What `sizes.py` varies: models, what the size is of, budgets, depths and optimizers.

Enters: a `Sized`. Leaves: batches of any size, and a fresh model with its optimizer whose steps are
measured. Guarantees: a step is forward, backward and, where there is an optimizer, its step; before
it there are no gradients. Weights are random, and the same in each fresh model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmark_models import loss_alone, models, solver_graphs
from torch import Tensor, nn

import autoremat
from tests.models import Case

DIMENSION = {"batch": 0, "sequence": 1, "height": 2}  # of each input that has it
TOKENS = 32  # of a sample, where the batch varies
LONGEST = 256  # tokens that there are positions for, where the sequence varies
STEPS_BEFORE = 2  # the one that is measured: an optimizer makes its state in the first

Batch = tuple[Tensor, ...]

MAKERS: dict[str, Callable[..., Case]] = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "bert": models.bert,
    "t5": solver_graphs.t5,
    "vit": solver_graphs.vit,
    "unet": models.unet,
}


@dataclass(frozen=True)
class Sized:
    """A model, and the sizes that are asked for.

    Attributes:
        model: its name.
        free: the budget holds the step without a plan of so many times `step`.
        over: what the size is.
        step: sizes are multiples of it.
        layers: of the model; T5 has so many in encoder and decoder each, the UNet has its own.
        adam: whether AdamW trains it; else there is no optimizer.
    """

    model: str
    free: int = 2
    over: str = "batch"
    step: int = 1
    layers: int = 1
    adam: bool = False

    @property
    def key(self) -> str:
        """Names it, by what is not usual in it."""
        words = [self.model, "" if self.over == "batch" else f"over {self.over}"]
        words += ["" if self.layers == 1 else f"{self.layers} layers", "AdamW" * self.adam]
        return ", ".join(filter(None, (*words, "" if self.free == 2 else f"free {self.free}")))

    @property
    def has_layers(self) -> bool:
        """Whether there can be more or fewer of them."""
        return self.model != "unet"

    @functools.cached_property
    def case(self) -> Case:
        """The model and one sample."""
        make = partial(loss_alone, MAKERS[self.model], self.model, batch=1)
        if not self.has_layers:
            return make(size=32)
        if self.model == "vit":
            return make(layers=self.layers, size=64)
        return make(layers=self.layers, tokens=TOKENS if self.over == "batch" else LONGEST)

    def batch(self, size: int) -> Batch:
        """Of a size: the sample again and again along what varies."""
        dimension = DIMENSION[self.over]
        return tuple(
            t.index_select(dimension, torch.arange(size) % t.shape[dimension])
            for t in self.case.inputs
        )

    def plain_nbytes(self, size: int) -> int:
        """What a step of a size takes without a plan, once the optimizer has its state."""
        training, batch = self.training(), self.batch(size)
        for _ in range(STEPS_BEFORE):
            training.step(batch)
        return training.measured_nbytes(batch)

    def training(self) -> Training:
        """A fresh model and optimizer."""
        model = copy.deepcopy(self.case.model)
        return Training(model, torch.optim.AdamW(model.parameters()) if self.adam else None)


@dataclass(frozen=True)
class Training:
    """A model in training, and its optimizer, if any."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def step(self, batch: Batch) -> None:
        """One step, as a training loop has it."""
        self.model(*batch).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def measured_nbytes(self, batch: Batch) -> int:
        """What a step takes, with all that is there before."""
        return self.held_nbytes(batch) + autoremat.measure_peak(
            lambda: self.step(batch), device="cpu"
        )

    def held_nbytes(self, batch: Batch) -> int:
        """What is there before a step."""
        return autoremat.resident_nbytes(self.model, batch, self.optimizer)


def of_model(model: str, step: int = 32, over: str = "sequence") -> list[Sized]:
    """Two budgets, another size than the batch, and AdamW."""
    return [
        Sized(model),
        Sized(model, free=3),
        Sized(model, over=over, step=step),
        Sized(model, adam=True),
    ]


CASES: dict[str, Sized] = {
    one.key: one
    for one in (
        *of_model("gpt2"),
        *of_model("llama"),
        *of_model("bert"),
        *of_model("t5"),
        *(Sized("vit"), Sized("vit", free=3)),
        *(Sized("vit", layers=2), Sized("vit", adam=True)),
        *of_model("unet", 16, "height"),
    )
}
