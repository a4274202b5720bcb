"""Where a step would run and what was asked for, before anything is traced.

Enters: a model, a device by name, options as the user wrote them. Leaves: a `Place`, `Options`.
Guarantees: what no plan can be made of is refused here, in seconds, not after a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoremat.ask.budget import Budget
from autoremat.ask.options import Options
from autoremat.cost.card import spec_named
from autoremat.cost.device_specs import DeviceSpec
from autoremat.elsewhere.present import DEVICE
from autoremat.graph.devices import device_nbytes
from autoremat.memory.optimizers import require_optimizer_of


@dataclass(frozen=True)
class Place:
    """What is planned for.

    Attributes:
        home: where the twin of the model seems to live.
        spec: the data sheet of a device that is not here; None for one that is.
    """

    home: torch.device
    spec: DeviceSpec | None = None

    @property
    def runs_on(self) -> torch.device:
        """Where the step would run: a GPU that is not here is one, too."""
        return self.home if self.spec is None else DEVICE

    @property
    def memory_nbytes(self) -> int:
        """Of the device."""
        return device_nbytes(self.home) if self.spec is None else self.spec.memory_nbytes


def asked(
    model: nn.Module,
    device: str | torch.device | None,
    optimizer: torch.optim.Optimizer | None,
    **options: Any,
) -> tuple[torch.device, Options]:
    """Where the twin of a model seems to live, and what was asked for.

    Args:
        model: as for `plan`.
        device: the same.
        optimizer: the same.
        options: of `Options.parse`, but for the data sheet.

    Raises:
        ValueError: as of `plan`, of what is known before anything is traced.
    """
    require_trainable(model)
    place = place_of(model, device)
    return place.home, options_for(model, place, optimizer, **options)


def options_for(
    model: nn.Module, place: Place, optimizer: torch.optim.Optimizer | None, **options: Any
) -> Options:
    """What was asked for, of a model in a place that is known.

    Raises:
        ValueError: as of `plan`, of what is known before anything is traced.
    """
    require_trainable(model)
    require_optimizer_of(model, optimizer)
    return Options.parse(spec=place.spec, **options).of(model)


def place_of(model: nn.Module, device: str | torch.device | None) -> Place:
    """What is planned for: the device that was named, or that of the model.

    Raises:
        ValueError: if there is no such device, or the model is nowhere and none was named.
    """
    if device is None:
        first = next(model.parameters()).device
        if first.type == "meta":
            raise ValueError(
                'The model is on the meta device: say what to plan for, device="cpu", "cuda", or '
                'a name such as "H100".'
            )
        return Place(first)
    try:
        home = torch.device(device)
    except RuntimeError:
        # Without a GPU the graph is traced as on the CPU; its sizes are the same.
        return Place(torch.device("cpu"), spec_named(str(device)))
    if home.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here. Name the GPU to plan for by its data sheet: "
            'device="H100", "A100 40GB", ...'
        )
    if home.type not in ("cpu", "cuda"):
        raise ValueError(f'device is "cpu", "cuda" or the name of a GPU, not {str(device)!r}.')
    return Place(home)


def reserved_limit(budget: Budget | None, place: Place) -> int | None:
    """Bytes that a plan may reserve; None where the budget is of what is allocated.

    Raises:
        ValueError: if the device has no allocator that reserves.
    """
    if budget is None or not budget.of_reserved:
        return None
    if place.spec is None and place.home.type != "cuda":
        raise ValueError(
            f"Budget {budget.given!r} is of what CUDA's allocator reserves, and the step is "
            "planned for the CPU, whose allocator keeps nothing in reserve. Name a GPU, "
            'device="H100", or leave "reserved" out.'
        )
    return budget.nbytes(place.memory_nbytes)


def require_trainable(model: nn.Module) -> None:
    """Refuse what has no backward to plan.

    Raises:
        TypeError: if it is no module.
        ValueError: if it is in eval mode, or no parameter needs a gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, not {type(model).__name__}.")
    if not model.training:
        raise ValueError(
            "The model is in eval mode, where nothing is planned: call model.train() first."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of the model needs a gradient, so there is no backward to plan: call "
            "requires_grad_() on what is to be trained."
        )
