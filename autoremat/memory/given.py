"""What the calls of steps are given, as long as somebody holds it.

Enters: tensors as calls come. Leaves: those that live, and their bytes. Guarantees: holds none; a
tensor counts once, however often it is given, and is asked for its storage then only.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from autoremat.memory.meter import same_device, storage_sizes


class _Found(NamedTuple):
    """One tensor.

    Attributes:
        tensor: while it lives.
        sizes: bytes of its storages, by identity.
    """

    tensor: weakref.ref[torch.Tensor]
    sizes: Mapping[int, int]


class Given:
    """Of one session's steps."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._found: dict[int, _Found] = {}

    def begin_step(self) -> None:
        """Calls of another step begin: what was given before may live on."""
        self._found = {k: one for k, one in self._found.items() if one.tensor() is not None}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """A call is given these, or has made them: they are there while somebody holds them."""
        for tensor in tensors:
            before = self._found.get(id(tensor))
            if before is None or before.tensor() is not tensor:
                sizes = storage_sizes([tensor], tensor.device)
                self._found[id(tensor)] = _Found(weakref.ref(tensor), sizes)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that live."""
        found = (one.tensor() for one in self._found.values())
        return [tensor for tensor in found if tensor is not None]

    def sizes(self, device: torch.device, but: Collection[int] = ()) -> dict[int, int]:
        """Bytes of their storages on a device, by identity, and of their gradients.

        Args:
            device: where.
            but: identities of storages whose tensors do not count.
        """
        sizes: dict[int, int] = {}
        for one in self._found.values():
            tensor = one.tensor()
            if tensor is None or not same_device(tensor.device, device):
                continue
            if but and any(key in but for key in one.sizes):
                continue
            sizes |= one.sizes
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                sizes |= storage_sizes([tensor.grad], device)
        return sizes
