"""Each tensor that a step finds or makes around its graphs: what the device's allocator is asked.

Enters: a twin of a model where its step would run, a batch, an optimizer. Leaves: `HeldTensors`.
Guarantees: a storage counts once; their sum is what `residents` counts, but for gradients
of what an optimizer steps beside the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoremat.memory.meter import buffers_of, gradients_of, state_of
from autoremat.memory.optimizer_memory import update_of
from autoremat.memory.optimizers import parameters_of
from autoremat.memory.storage_sizes import rounded_nbytes, storage_sizes, tensors_in
from autoremat.reserved.step import Update


@dataclass(frozen=True)
class HeldTensors:
    """Bytes of single tensors.

    Attributes:
        before: those that exist before the first step and stay: parameters, buffers, state.
        batch: those of a batch.
        gradients: those that a step finds and adds to; none where it begins without.
        libraries: what libraries keep.
        update: what the optimizer's step allocates and frees.
    """

    before: tuple[int, ...]
    batch: tuple[int, ...]
    gradients: tuple[int, ...] = ()
    libraries: tuple[int, ...] = ()
    update: Update = field(default_factory=Update)


def held_tensors(
    twin: nn.Module,
    inputs: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    home: torch.device,
) -> HeldTensors:
    """What a step holds where it would run.

    Args:
        twin: holds fake tensors there.
        inputs: the batch, as fake.
        model: what the twin is of.
        optimizer: its tensors may be anywhere: its state goes along, and what it steps that is
            none of the model's parameters.
        home: where the step would run.
    """
    stays = storage_sizes([*twin.parameters(), *buffers_of(twin)], home)
    own = set(map(id, model.parameters()))
    others = [p for p in parameters_of(optimizer) if id(p) not in own]
    # Single numbers, such as counts of steps, are kept on the CPU.
    state = [*(tensor for tensor in state_of([optimizer]) if tensor.dim()), *others]
    batch = storage_sizes(tensors_in(inputs), home)
    return HeldTensors(
        before=(*stays.values(), *_elsewhere(state, home)),
        batch=tuple(nbytes for key, nbytes in batch.items() if key not in stays),
        gradients=tuple(storage_sizes(gradients_of(twin.parameters()), home).values()),
        update=update_of(optimizer, home),
    )


def _elsewhere(tensors: Iterable[torch.Tensor], home: torch.device) -> list[int]:
    """Bytes that they would take there."""
    tensors = list(tensors)
    found: dict[int, int] = {}
    for device in {tensor.device for tensor in tensors}:
        found |= storage_sizes(tensors, device)
    return [rounded_nbytes(nbytes, home) for nbytes in found.values()]
