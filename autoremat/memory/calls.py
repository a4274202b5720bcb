"""What calls of modules hold beside the graphs that run inside of them.

Enters: this thread's stack, when a graph is compiled or runs. Leaves: the outermost modules, and
what these were given, while they live. Guarantees: holds no module and no tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.memory.meter import buffers_of, gradients_of
from autoremat.memory.storage_sizes import storage_sizes, tensors_in


class CallsAround:
    """Of one session's graphs: it may be that they see only a part of a model and of its batch."""

    def __init__(self) -> None:
        """None yet."""
        self._given: WeakKeyDictionary[nn.Module, list[weakref.ref[torch.Tensor]]]
        self._given = WeakKeyDictionary()

    def note(self) -> None:
        """A graph is compiled or runs."""
        calls = _torch.module_calls()
        if calls and self._is_outermost(calls[0][0]):
            self._given[calls[0][0]] = list(map(weakref.ref, brought(calls)))

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that no other has called."""
        return [root for found in self._given.keyrefs() if (root := found()) is not None]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of these modules."""
        return [p for root in self.roots for p in root.parameters() if not is_lazy(p)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Of these modules."""
        return [b for root in self.roots for b in buffers_of(root) if not is_lazy(b)]

    @property
    def given(self) -> list[torch.Tensor]:
        """Batches, as far as somebody holds them."""
        references = (reference for found in self._given.values() for reference in found)
        return [tensor for reference in references if (tensor := reference()) is not None]

    def storages(self, device: torch.device) -> dict[int, int]:
        """Bytes of all of it on a device, gradients included, by identity."""
        held = [*self.parameters, *self.buffers, *self.given]
        return storage_sizes([*held, *gradients_of(held)], device)

    def _is_outermost(self, module: nn.Module) -> bool:
        """Whether no known one contains it: checkpoints run a part again, a user calls one alone.

        Those that it contains are forgotten.
        """
        if module in self._given:
            return True
        if any(part is module for root in self.roots for part in root.modules()):
            return False
        for part in module.modules():
            self._given.pop(part, None)
        return True


def brought(calls: Sequence[tuple[nn.Module, object]]) -> list[torch.Tensor]:
    """What the outermost of calls was given and no operation with a gradient has made."""
    tensors = (tensor for _, given in calls[:1] for tensor in tensors_in(given))
    found = {id(t): t for t in tensors if t.is_leaf and not isinstance(t, _torch.FakeTensor)}
    return list(found.values())
