"""A twin of a model and its batch whose tensors have sizes but no contents.

Enters: a module and inputs on any device, `meta` among them. Leaves: copies on fake tensors of one
device. Guarantees: no memory of the model's size is allocated, nothing of the user's is changed,
and what shared a tensor or a storage shares one in the twin.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autoremat._torch import (
    FakeTensorMode,
    compiled_call,
    storage_identity,
    tensor_leaves,
    tree_map,
)


class Faker:
    """Makes fake tensors on one device, the same one for the same tensor.

    Args:
        device: where the twin seems to live.
    """

    def __init__(self, device: torch.device) -> None:
        """Open a mode of its own."""
        self.mode = FakeTensorMode()
        self.device = device
        self._made: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []  # an identity is one as long as its owner lives

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of the model, in the same mode, every tensor of it fake."""
        self._note_shared(_held_by(model))
        return _copied(model, self.tensor)

    def values(self, values: Any) -> Any:
        """A nest of inputs with every tensor in it fake."""
        self._note_shared(tensor_leaves(values))
        return tree_map(lambda v: self.tensor(v) if isinstance(v, torch.Tensor) else v, values)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of one tensor, of the same sizes, strides, type and kind."""
        if id(tensor) not in self._made:
            self._originals.append(tensor)
            self._made[id(tensor)] = self._new(tensor)
        return self._made[id(tensor)]

    def _new(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"A tensor of layout {tensor.layout} has no fake: plan the model with dense "
                "parameters and inputs."
            )
        shape, stride = tuple(tensor.shape), tensor.stride()
        with self.mode, torch.no_grad():
            base = self._bases.get(storage_identity(tensor.untyped_storage()))
            if base is None:
                fake = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self.device)
            else:
                typed = base.view(tensor.dtype)
                fake = typed.as_strided(shape, stride, tensor.storage_offset()).detach()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _note_shared(self, tensors: Iterable[torch.Tensor]) -> None:
        """A base for each storage that several tensors look into; meta tensors have none."""
        by_storage: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.device.type != "meta":
                key = storage_identity(tensor.untyped_storage())
                by_storage.setdefault(key, {})[id(tensor)] = tensor
        for key, sharers in by_storage.items():
            if len(sharers) > 1 and key not in self._bases:
                nbytes = next(iter(sharers.values())).untyped_storage().nbytes()
                with self.mode:
                    self._bases[key] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def without_contents(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device, to be changed; tensors that are shared stay shared."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    return _copied(model, empty)


def _copied(model: nn.Module, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A copy of a model with other tensors, one for each."""
    # deepcopy takes what the memo holds instead of copying: no tensor is ever cloned.
    memo: dict[int, Any] = {id(tensor): copy_of(tensor) for tensor in _held_by(model)}
    calls = (compiled_call(module) for module in model.modules())
    memo |= {id(call): None for call in calls if call is not None}
    return copy.deepcopy(model, memo)


def _held_by(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers(), *_plain_attributes(model)]


def give_gradients(twin: nn.Module) -> None:
    """Let every parameter of a twin that is trained have a gradient already."""
    for parameter in twin.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)


def _plain_attributes(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold beside parameters and buffers, nested or not."""
    held = ("_parameters", "_buffers", "_modules")
    named = (item for module in model.modules() for item in vars(module).items())
    return tensor_leaves([value for name, value in named if name not in held])
