"""What calls of modules hold beside the graphs that run inside of them.

Enters: this thread's stack, when a graph is compiled or runs. Leaves: the outermost module, and
what it and those inside it were given, while they live. Guarantees: holds no module and no tensor.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.memory.meter import gradients_of, storage_sizes, tensors_in


class CallsAround:
    """Of one session's graphs: it may be that they see only a part of a model and of its batch."""

    def __init__(self) -> None:
        """None yet."""
        self._outermost: weakref.ref[nn.Module] | None = None
        self._given: list[weakref.ref[torch.Tensor]] = []

    def note(self) -> None:
        """A graph is compiled or runs."""
        calls = _torch.module_calls()
        if calls:
            self._outermost = weakref.ref(calls[0][0])
            self._given = list(map(weakref.ref, brought(calls)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the outermost module."""
        return [p for p in self.outermost.parameters() if not is_lazy(p)]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Of the outermost module."""
        return list(self.outermost.buffers())

    @property
    def given(self) -> list[torch.Tensor]:
        """Batches, as far as somebody holds them."""
        return [tensor for reference in self._given if (tensor := reference()) is not None]

    @property
    def outermost(self) -> nn.Module:
        """The module that no other has called; an empty one if it is gone."""
        module = None if self._outermost is None else self._outermost()
        return nn.Module() if module is None else module

    def storages(self, device: torch.device) -> dict[int, int]:
        """Bytes of all of it on a device, gradients included, by identity."""
        held = [*self.parameters, *self.buffers, *self.given]
        return storage_sizes([*held, *gradients_of(held)], device)


def brought(calls: list[tuple[nn.Module, object]]) -> list[torch.Tensor]:
    """What calls of modules were given and no operation with a gradient has made."""
    tensors = (tensor for _, given in calls for tensor in tensors_in(given))
    found = {id(t): t for t in tensors if t.is_leaf and not isinstance(t, _torch.FakeTensor)}
    return list(found.values())
