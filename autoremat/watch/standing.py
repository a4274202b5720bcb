"""What stays where it is while forwards run: looked at once for all that look into them.

Enters: tensors that nothing but a backward or an optimizer adds to or takes away, and that are
found only if need be. Leaves: bytes by storage, of one owner and of several together, and what
forwards gather beside them. Guarantees: they are found again once a backward has begun or an
optimizer has stepped since, or gradients have gone; in a backward each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.memory.meter import gradients_of
from autoremat.memory.optimizers import count_steps
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.watch.ledger import beginnings


class Standing:
    """Storages on a device, each once.

    Attributes:
        sizes: bytes by identity.
        entries: the same in the order in which they came; it only grows.
        absent_nbytes: what counts as well, and no tensor shows.
        moving: what counts as well, and forwards change.
    """

    def __init__(self, device: torch.device, units: Sequence[_torch.ShardedUnit] = ()) -> None:
        """None yet.

        Args:
            device: what is elsewhere does not count.
            units: whose parameters forwards gather. Of FSDP1's nothing tells which have changed:
                then all is found each time.
        """
        self.sizes: dict[int, int] = {}
        self.entries: list[tuple[int, int]] = []
        self.absent_nbytes = 0
        self._device = device
        gatherings = dict.fromkeys(unit.gathering for unit in units)
        is_known = None not in gatherings and not _torch.is_in_backward()
        self._moment = _moment() if is_known else None
        self.moving = [moving_of(g, device) for g in gatherings if g is not None]
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
        known = [self.sizes, *(moving.now() for moving in self.moving)]
        new = [(key, n) for key, n in entries if all(key not in sizes for sizes in known)]
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


class Moving:
    """What the units of a model gather and let go of while forwards run, each storage once.

    Attributes:
        nbytes: of all of it, as it was when it was asked for last.
    """

    def __init__(self, gathering: _torch.Gathering, device: torch.device) -> None:
        """Nothing is known of these units yet, nor of what is between them."""
        self.nbytes = 0
        self._gathering = gathering
        self._device = device
        self._states: list[Hashable] = []
        self._parts: dict[int, dict[int, int]] = {}  # by number of the unit
        self._sizes: dict[int, int] = {}
        self._moment = None if _torch.is_in_backward() else _moment()

    @property
    def is_true(self) -> bool:
        """Whether nothing but forwards can have changed it."""
        return self._moment == _moment() and not _torch.is_in_backward()

    def now(self) -> dict[int, int]:
        """Bytes by identity; only units that have changed are looked at."""
        states = self._gathering.states()
        before = self._states or [_UNKNOWN] * len(states)
        changed = [n for n, state in enumerate(states) if state != before[n]]
        self._states = states
        for number in (_BETWEEN, *changed):
            for key in self._parts.pop(number, ()):
                self.nbytes -= self._sizes.pop(key)
        for number in changed:
            self._keep(number, self._gathering.gathered(number))
        self._keep(_BETWEEN, self._gathering.in_flight())
        return self._sizes

    def _keep(self, number: int, tensors: Iterable[torch.Tensor]) -> None:
        sizes = storage_sizes(tensors, self._device)
        new = {key: nbytes for key, nbytes in sizes.items() if key not in self._sizes}
        self._parts[number] = new
        self._sizes |= new
        self.nbytes += sum(new.values())


_UNKNOWN = object()  # the state of a unit that was not looked at
_BETWEEN = -1  # in place of a unit's number
_of_units: dict[tuple[_torch.Gathering, torch.device], Moving] = {}


def moving_of(gathering: _torch.Gathering, device: torch.device) -> Moving:
    """Of all that ask for these units."""
    found = _of_units.get((gathering, device))
    if found is None or not found.is_true:
        for key in [key for key, moving in _of_units.items() if not moving.is_true]:
            del _of_units[key]
        found = _of_units[gathering, device] = Moving(gathering, device)
    return found


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
        units = _torch.sharded_units(root)
        found = Standing(device, units)
        shared = (*_torch.tensors_of_units(units), *_torch.waiting_gradients(units))
        tensors = (*root.parameters(), *shared, *root.buffers())
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
