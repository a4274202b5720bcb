"""Steps of trainers, measured one by one.

Enters: a trainer's class, or a step. Leaves: what each step took, with what was there before it.
A step is a forward and its backward. The first one of the optimizer is not among them: what it
finds, the optimizer's state among it, the next ones are planned with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoremat.memory.meter import measure_peak, resident_nbytes


@dataclass
class Meter:
    """Measures what steps take.

    Attributes:
        others: modules that are there beside the one that is trained.
        peaks: of the steps so far, in bytes.
    """

    others: Sequence[nn.Module] = ()
    peaks: list[int] = field(default_factory=list)

    def step(self, take: Callable[[], Any], model: nn.Module, batch: Any, optimizer: Any) -> Any:
        """Take a step, and note what it takes."""
        held = resident_nbytes(nn.ModuleList([model, *self.others]), batch, optimizer)
        results: list[Any] = []
        self.peaks.append(held + measure_peak(lambda: results.append(take()), device="cpu"))
        return results[0]


def metered(trainer: type, meter: Meter) -> type:
    """A trainer of transformers, or one made of it, whose steps are measured from the second on."""

    class Metered(trainer):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
            take = partial(super().training_step, model, inputs, *rest)
            if not self.state.global_step:
                return take()
            return meter.step(take, self.model, inputs, self.optimizer)

    return Metered


def between(unplanned: Meter, model: nn.Module, share: float = 0.5) -> int:
    """A budget in bytes, that share above what has to be there.

    Args:
        unplanned: which has measured the model's steps without a plan.
        model: whose parameters, gradients and the two moments of AdamW have to be there.
        share: of what its steps hold above that.
    """
    beside = sum(p.nbytes for other in unplanned.others for p in other.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    floor = beside + sum(p.nbytes for p in model.parameters()) + 3 * trained
    return int(floor + share * (max(unplanned.peaks) - floor))


def weights(model: nn.Module) -> Tensor:
    """All that is trained."""
    trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(trained)
