"""The modules that one budget covers, and what a step of them holds.

Enters: modules, their optimizers, and what their calls are given. Leaves: a `Resident` of all of
them together. Guarantees: holds no module; what several of them share counts once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.calls import brought
from autoremat.memory.given import Given
from autoremat.memory.meter import state_of
from autoremat.memory.optimizers import StepOptimizers
from autoremat.memory.residents import Resident, resident_of, spread_out
from autoremat.memory.spread import Sharing, Spread
from autoremat.memory.storage_sizes import (
    storage_identities,
    storage_sizes,
    storages_nbytes,
    tensors_in,
)
from autoremat.watch.ledger import open_runs
from autoremat.watch.present import Present


class Members(Present):
    """Of one budget: modules that are trained in one step, and those that only help there."""

    def __init__(self) -> None:
        """None yet."""
        self._modules: list[weakref.ref[nn.Module]] = []
        self.optimizers = StepOptimizers(self._parameters, [])
        self._planned_state_nbytes = 0  # of optimizers, as the latest plan counts it
        self._given = Given()  # to calls, and by those without a plan
        self._batches: dict[Hashable, dict[int, int]] = {}  # of each module, what came last
        self._called: set[Hashable] = set()  # in this step
        self._has_begun = False  # this step's first call
        self._sharing = Sharing()
        self.copies: WeakSet[nn.Module] = WeakSet()  # of modules, that nobody trains

    def add(self, modules: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Cover these as well."""
        self._modules += map(weakref.ref, modules)
        self.optimizers.add(optimizers)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that live."""
        found = (reference() for reference in self._modules)
        return [module for module in found if module is not None]

    @property
    def are_there(self) -> bool:
        """Whether any of them lives: each run of a graph asks several times."""
        return any(reference() is not None for reference in self._modules)

    @property
    def count(self) -> int:
        """Of the modules, those that are gone included."""
        return len(self._modules)

    @property
    def whole(self) -> nn.Module:
        """All of them as one."""
        return as_one(self.modules)

    def require_room_for(self, modules: Sequence[nn.Module]) -> None:
        """Refuse what cannot share a budget with the modules that are covered.

        Raises:
            TypeError: if one is no module.
            ValueError: if there is none, for the same module twice, a module and a part of it, an
                optimised one, and several devices.
        """
        if not modules:
            raise ValueError("There is no module to optimize: the list is empty.")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"A model is an nn.Module, not {type(module).__name__}.")
            if _torch.compiled_call(module) is not None:
                raise ValueError(
                    f"{type(module).__name__} is compiled or optimised already: give it to one "
                    "call of optimize only, with all that shares its budget."
                )
        _require_apart([*self.modules, *modules])
        _require_one_device([*self.modules, *modules])

    def begin_step(self) -> None:
        """Calls of another step begin: what was given before may live on."""
        super().begin_step()
        self._given.begin_step()
        self._called.clear()
        self._has_begun = False
        self._sharing.note_call(self._all_parts())

    def note_given(self, inputs: object, caller: Hashable) -> None:
        """A call of a module is given these."""
        given = tensors_in(inputs)
        self._sharing.note_call()
        around = [] if self._has_begun else brought(_torch.module_calls())
        self._given.note([*given, *around])
        self._has_begun = True
        if len(self._modules) > 1:
            before = self._batches.get(caller, {}) if caller in self._called else {}
            device = self._device
            batch = [tensor for tensor in _brought(given, device) if tensor.grad_fn is None]
            self._batches[caller] = before | storage_sizes(batch, device)
            self._called.add(caller)

    def note_held(self, values: object) -> None:
        """These are there while somebody holds them: a call without gradients made them."""
        self._given.note_made(tensors_in(values))

    def resident(self, device: torch.device, inputs: object = None) -> Resident:
        """Bytes that a step holds whatever the plan.

        Args:
            device: what is elsewhere does not count.
            inputs: its batch; what its calls were given, if not said.
        """
        whole = self.whole
        given = _brought(self._given.tensors, device) if inputs is None else inputs
        more_nbytes = self._batches_to_come(device) if inputs is None else 0
        known = self.optimizers.known
        stepping = self.optimizers.given or known[:1] or [None]
        found = [resident_of(whole, given, optimizer, device) for optimizer in stepping]
        parts = [one.parts for one in found]
        others_nbytes = storages_nbytes(state_of(known[len(stepping) :]), device)
        state_nbytes = sum(part.optimizer_nbytes for part in parts) + others_nbytes
        self._planned_state_nbytes = state_nbytes
        together = Resident(
            replace(
                parts[0],
                optimizer_nbytes=state_nbytes,
                batch_nbytes=parts[0].batch_nbytes + more_nbytes,
                others_nbytes=sum(part.others_nbytes for part in parts),
            ),
            optimizer=", ".join(dict.fromkeys(one.optimizer for one in found)),
            transient_nbytes=max(one.transient_nbytes for one in found),
            storages=frozenset[int]().union(*(one.storages for one in found)),
            window=found[0].window,
        )
        together = together.beside(storage_sizes(self._copied(), device))
        return spread_out(together, self._spread(device))

    def lasting(self) -> list[torch.Tensor]:
        """See `Present`."""
        whole, units = self.whole, self.units
        shared = [*_torch.tensors_of_units(units), *_torch.waiting_gradients(units)]
        return [*whole.parameters(), *shared, *whole.buffers(), *self._copied()]

    def brought(self, device: torch.device) -> dict[int, int]:
        """See `Present`."""
        return self._given.sizes(device, _returned(device))

    @property
    def units(self) -> list[_torch.ShardedUnit]:
        """See `Present`."""
        return _torch.sharded_units(self.whole)

    def gradients(self) -> Iterator[_torch.OfParameter]:
        """See `Present`."""
        yield from self._trained_gradients()
        yield from _torch.own_gradients(self._given.tensors)

    def absent_nbytes(self, device: torch.device) -> int:
        """See `Present`."""
        state_nbytes = max(0, self._planned_state_nbytes - self.state_nbytes(device))
        return state_nbytes + self._spread(device).unseen_nbytes

    def to_come_nbytes(self, device: torch.device) -> int:
        """See `Present`."""
        return self._batches_to_come(device)

    @property
    def spread(self) -> Spread:
        """See `Present`."""
        return self._spread(self._device)

    def _spread(self, device: torch.device) -> Spread:
        return self._sharing.now(self.units, device)

    def state_nbytes(self, device: torch.device) -> int:
        """Of the optimizers that are known, as much as there is now."""
        return storages_nbytes(state_of(self.optimizers.known), device)

    def gradient_nbytes(self) -> dict[int, int]:
        """Bytes of the gradients that exist, by their parameters; of sparse ones what they hold."""
        found, counted = Counter[int](), set[int]()
        for parameter, gradient in self._trained_gradients():
            sizes = storage_sizes([gradient], gradient.device)
            found[id(parameter)] += sum(n for key, n in sizes.items() if key not in counted)
            counted.update(sizes)
        return found

    @property
    def _device(self) -> torch.device:
        modules = (module for reference in self._modules if (module := reference()) is not None)
        found = (p.device for module in modules for p in module.parameters())
        return next(found, torch.device("cpu"))

    def _batches_to_come(self, device: torch.device) -> int:
        """Bytes of what modules will be given whose turn comes after another backward.

        Who trains them holds the batch of all of them; it is taken to be as large as the last.
        """
        sizes = {key: n for found in self._batches.values() for key, n in found.items()}
        return max(0, sum(sizes.values()) - sum(self._given.sizes(device).values()))

    def _parameters(self) -> Iterable[nn.Parameter]:
        return self.whole.parameters()

    def _copied(self) -> list[torch.Tensor]:
        """What copies of the modules hold."""
        return [tensor for one in self.copies for tensor in (*one.parameters(), *one.buffers())]

    def _all_parts(self) -> Iterator[nn.Module]:
        """The modules and what is in them."""
        return _torch.all_modules(self.modules)

    def _trained_gradients(self) -> Iterator[_torch.OfParameter]:
        modules = list(self._all_parts())
        yield from _torch.own_gradients(_torch.own_parameters(modules))
        yield from _torch.sharded_gradients(modules)


def _brought(given: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Of what calls were given, all but what graphs of the step have returned."""
    returned = _returned(device)
    return [tensor for tensor in given if returned.isdisjoint(storage_identities([tensor]))]


def _returned(device: torch.device) -> set[int]:
    """Identities of what graphs have returned whose backward is to come."""
    return {key for run in open_runs(device) for key in run.returned}


def kind_of(module: nn.Module) -> Hashable:
    """What modules have in common that may run the same code: Dynamo's guards tell the rest."""
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named)
    return type(module), tensors


def as_one(modules: Sequence[nn.Module]) -> nn.Module:
    """A module that has all of these, or the only one."""
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def _require_apart(modules: Sequence[nn.Module]) -> None:
    for number, module in enumerate(modules):
        if any(module is other for other in modules[:number]):
            raise ValueError(
                f"{type(module).__name__} is given twice: a module shares a budget once."
            )
    for module in modules:
        parts = {id(part) for part in module.modules()}
        inner = next((o for o in modules if o is not module and id(o) in parts), None)
        if inner is not None:
            raise ValueError(
                f"{type(inner).__name__} is a part of {type(module).__name__}, which is given as "
                "well: give one of them."
            )


def _require_one_device(modules: Sequence[nn.Module]) -> None:
    devices = {str(t.device) for m in modules for t in (*m.parameters(), *m.buffers())}
    if len(devices) > 1:
        raise ValueError(
            f"The modules are on several devices ({', '.join(sorted(devices))}): a budget is of "
            "one. Move them to one device, or give those on each a budget of their own."
        )
