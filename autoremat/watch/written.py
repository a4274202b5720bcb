"""What a training's own code writes to, step by step: a moving average of the weights, a queue.

Enters: tensors, at each look at what the code of a step can name. Leaves: those that have been
written to since they were seen first, though no optimizer steps them and they have no gradient.
Guarantees: holds no tensor.

Data are only read, and what is trained has an optimizer or a gradient. What else is written to is
part of the training that writes, wherever it was before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autoremat import _torch
from autoremat.memory.meter import state_of
from autoremat.memory.optimizers import parameters_of, that_have_stepped
from autoremat.memory.storage_sizes import storage_identities


class Written:
    """How often tensors had been written to as they were seen first."""

    def __init__(self) -> None:
        """None was."""
        self._versions: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there. What was seen before stays known as it was then."""
        for tensor in tensors:
            if tensor not in self._versions:
                self._versions[tensor] = _torch.version_of(tensor)

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have been written to since they were seen, but for what is trained."""
        tensors = list(tensors)
        self.note(tensors)
        stepped = {id(p) for optimizer in that_have_stepped() for p in parameters_of(optimizer)}
        found = [t for t in tensors if id(t) not in stepped and self._is_written(t)]
        if not found:
            return []
        state = storage_identities(state_of(that_have_stepped()))
        return [tensor for tensor in found if state.isdisjoint(storage_identities([tensor]))]

    def _is_written(self, tensor: torch.Tensor) -> bool:
        has_gradient = next(_torch.own_gradients([tensor]), None) is not None
        return not has_gradient and _torch.version_of(tensor) > self._versions[tensor]
