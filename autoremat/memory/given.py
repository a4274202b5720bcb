"""What the calls of steps are given, as long as somebody holds it.

Enters: tensors as calls come. Leaves: those that live, and their bytes. Guarantees: holds none; a
batch that lives on while another one of its kind comes is one of many that the user holds: those in
the same list are found all at once then, before their turns come.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from autoremat.memory.storage_sizes import same_device, storage_sizes, tensors_in

_Kind = tuple[int, torch.dtype, torch.device]  # batches may differ in their sizes


class _Found(NamedTuple):
    """One tensor.

    Attributes:
        tensor: while it lives.
        step: in which it came, or was found.
        sizes: bytes of its storages, by identity.
    """

    tensor: weakref.ref[torch.Tensor]
    step: int
    sizes: Mapping[int, int]


class Given:
    """Of one session's steps."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._found: dict[_Kind, dict[int, _Found]] = {}
        self._searched: dict[_Kind, int] = {}  # how many of a kind a search has found
        self._step = 0
        self._is_under_way = False

    def begin_step(self) -> None:
        """Calls of another step begin: what was given before may live on."""
        self._step += 1
        self._is_under_way = False
        for kind, found in list(self._found.items()):
            self._found[kind] = found = {
                key: one for key, one in found.items() if one.tensor() is not None
            }
            if not found:
                del self._found[kind]

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """A call is given these."""
        new = [tensor for tensor in tensors if self._add(tensor)]
        for kind in () if self._is_under_way else dict.fromkeys(map(_kind_of, new)):
            if self._holds_earlier(kind):
                self._search(kind)
        self._is_under_way = True

    def note_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there while somebody holds them, and are no batch."""
        for tensor in tensors:
            self._add(tensor, is_batch=False)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that live."""
        found = (one.tensor() for one in self._all())
        return [tensor for tensor in found if tensor is not None]

    def sizes(self, device: torch.device, but: Collection[int] = ()) -> dict[int, int]:
        """Bytes of their storages on a device, by identity, and of their gradients.

        Args:
            device: where.
            but: identities of storages whose tensors do not count.
        """
        sizes: dict[int, int] = {}
        for one in self._all():
            tensor = one.tensor()
            if tensor is None or not same_device(tensor.device, device):
                continue
            if but and any(key in but for key in one.sizes):
                continue
            sizes |= one.sizes
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                sizes |= storage_sizes([tensor.grad], device)
        return sizes

    def _all(self) -> Iterator[_Found]:
        return (one for found in self._found.values() for one in found.values())

    def _add(self, tensor: torch.Tensor, *, is_batch: bool = True) -> bool:
        """Whether it is new."""
        found = self._found.setdefault(_kind_of(tensor), {})
        before = found.get(id(tensor))
        if before is not None and before.tensor() is tensor:
            return False
        sizes = storage_sizes([tensor], tensor.device)
        step = self._step if is_batch else _NEVER
        found[id(tensor)] = _Found(weakref.ref(tensor), step, sizes)
        return is_batch

    def _holds_earlier(self, kind: _Kind) -> bool:
        """Whether a batch of an earlier step lives on, and more are to be looked for.

        Each search has to be worth twice the one before: the user may collect what was given.
        """
        earlier = (one for one in self._found[kind].values() if one.step < self._step)
        count = sum(one.tensor() is not None for one in earlier)
        return count > 2 * self._searched.get(kind, 0)

    def _search(self, kind: _Kind) -> None:
        """All others that the user keeps with those of earlier steps."""
        living = (one.tensor() for one in self._found[kind].values() if one.step < self._step)
        for tensor in _kept_with([tensor for tensor in living if tensor is not None]):
            with suppress(RuntimeError, NotImplementedError):  # half-dead ones have no storage
                self._add(tensor)
        self._searched[kind] = len(self._found[kind])


_NEVER = 1 << 62  # no step is later


def _kept_with(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What lies in the same containers: in a list of batches, each of which may be one as well."""
    holders = _containers_of(tensors)
    around = _containers_of(holders)
    found = {id(tensor): tensor for tensor in tensors_in((holders, around))}
    devices = {tensor.device for tensor in tensors}
    plain = (tensor for tensor in found.values() if type(tensor) is torch.Tensor)
    return [t for t in plain if not t.requires_grad and t.device in devices]


def _containers_of(things: list[Any]) -> list[Any]:
    """Lists, tuples and dicts that hold any of these, but for the names of a module."""
    return [
        holder
        for holder in gc.get_referrers(*things)
        if type(holder) in (list, tuple, dict) and holder is not things
        if not (type(holder) is dict and "__builtins__" in holder)
    ]


def _kind_of(tensor: torch.Tensor) -> _Kind:
    return tensor.dim(), tensor.dtype, tensor.device
