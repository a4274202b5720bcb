"""What stays where it is while forwards run: looked at once for all that look into them.

Enters: tensors that nothing but a backward or an optimizer adds to or takes away, and that are
found only if need be. Leaves: bytes by storage, of one owner and of several together. Guarantees:
they are found again once a backward has begun or an optimizer has stepped since, or gradients have
gone; in a backward each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.memory.meter import gradients_of, storage_sizes
from autoremat.memory.optimizers import count_steps
from autoremat.watch.ledger import beginnings


class Standing:
    """Storages on a device, each once.

    Attributes:
        sizes: bytes by identity.
        entries: the same in the order in which they came; it only grows.
        absent_nbytes: what counts as well, and no tensor shows.
    """

    def __init__(self, device: torch.device, *, moves: bool = False) -> None:
        """None yet.

        Args:
            device: what is elsewhere does not count.
            moves: whether a forward may change what there is, as one does that gathers shards.
        """
        self.sizes: dict[int, int] = {}
        self.entries: list[tuple[int, int]] = []
        self.absent_nbytes = 0
        self._device = device
        self._moment = None if moves or _torch.is_in_backward() else _moment()
        self._with_gradient: weakref.ref[torch.Tensor] | None = None

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there as well, and their gradients."""
        held = list(tensors)
        gradients = gradients_of(held)
        if gradients and self._with_gradient is None:
            first = next(t for t in held if t.is_leaf and t.grad is not None)
            self._with_gradient = weakref.ref(first)
        self.add_sizes(storage_sizes([*held, *gradients], self._device).items())

    def add_sizes(self, entries: Iterable[tuple[int, int]]) -> None:
        """Storages of these identities and sizes are there as well."""
        new = [(key, nbytes) for key, nbytes in entries if key not in self.sizes]
        self.entries += new
        self.sizes.update(new)

    @property
    def is_true(self) -> bool:
        """Whether it is still what there is."""
        if self._moment is None or self._moment != _moment() or _torch.is_in_backward():
            return False
        if self._with_gradient is None:
            return True
        tensor = self._with_gradient()
        return tensor is not None and tensor.grad is not None


class Together:
    """What several owners hold, each storage once; it grows as more of them come."""

    def __init__(self) -> None:
        """Nobody yet."""
        self.sizes: dict[int, int] = {}
        self.nbytes = 0
        self._taken: dict[Standing, int] = {}  # how many entries of each

    def of(self, parts: Collection[Standing]) -> Together:
        """All of these, and nothing else: itself if it has to be added to, or a new one."""
        if not self._taken.keys() <= set(parts):
            return Together().of(parts)
        for part in parts:
            new = part.entries[self._taken.get(part, 0) :]
            self._taken[part] = len(part.entries)
            for key, nbytes in new:
                if key not in self.sizes:
                    self.sizes[key] = nbytes
                    self.nbytes += nbytes
        return self


_of_roots: WeakKeyDictionary[nn.Module, dict[Hashable, Standing]] = WeakKeyDictionary()


def of_root(root: nn.Module, device: torch.device) -> Standing:
    """Parameters, buffers and gradients of a module: of all that ask for it."""

    def find() -> Standing:
        found = Standing(device, moves=bool(_torch.sharded_units(root)))
        tensors = (*root.parameters(), *root.buffers())
        found.add(tensor for tensor in tensors if not is_lazy(tensor))
        return found

    return known_or_found(_of_roots.setdefault(root, {}), device, find)


def known_or_found(
    known: dict[Hashable, Standing], key: Hashable, find: Callable[[], Standing]
) -> Standing:
    """What is known, if it is still true."""
    found = known.get(key)
    if found is None or not found.is_true:
        found = known[key] = find()
    return found


def _moment() -> Hashable:
    """What stays the same until a backward begins or an optimizer steps."""
    return beginnings(), count_steps()
