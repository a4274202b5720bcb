"""The models of the benchmarks: those of the tests, and language models with real vocabularies.

Enters: a name. Leaves: a `Case`. With a vocabulary of thousands the logits are larger than all that
a small model saves besides, so those models return their loss alone, as they do for those who have
read what their report says of logits. Weights are random, widths small, and depth is real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import solver_graphs
from torch import Tensor, nn

from tests import models
from tests.models import CASES, Case

WIDTH = 256  # of models with a real vocabulary


class Loss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = case.model
        self._forward, self._loss_of = case.forward, case.loss_of

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss."""
        return self._loss_of(self._forward(self.model, inputs))


def loss_alone(
    make: Callable[..., Case], name: str, *, dropout: bool = False, **settings: Any
) -> Case:
    """A case whose model computes the loss and returns nothing else."""
    case = replace(make(**settings), dropout=dropout)
    layers = tuple(f"model.{path}" for path in case.layers)
    model, forward, loss_of = Loss(case).train(), models.call, models.itself
    return replace(case, name=name, model=model, forward=forward, loss_of=loss_of, layers=layers)


def with_vocabulary(make: Callable[..., Case], layers: int, vocabulary: int) -> Callable[[], Case]:
    """A language model of which the logits are most of the memory."""
    name = f"{make.__name__}_{vocabulary // 1000}k"
    settings = {"layers": layers, "vocabulary": vocabulary, "width": WIDTH}
    return partial(loss_alone, make, name, **settings)


MODELS: dict[str, Callable[..., Case]] = {
    **CASES,
    "llama_8k": with_vocabulary(models.llama, 8, 8192),
    "gpt2_8k": with_vocabulary(models.gpt2, 12, 8192),
    "llama_50k": with_vocabulary(models.llama, 8, 50257),
    "gpt2_50k": with_vocabulary(models.gpt2, 12, 50257),
    "t5": partial(loss_alone, solver_graphs.t5, "t5", dropout=True),
    "vit": partial(loss_alone, solver_graphs.vit, "vit"),
    "mixtral": partial(loss_alone, solver_graphs.mixtral, "mixtral"),
}
