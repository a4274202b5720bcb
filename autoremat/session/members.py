"""The modules that one budget covers, and what a step of them holds.

Enters: modules, their optimizers, and what their calls are given. Leaves: a `Resident` of all of
them together. Guarantees: holds no module; what several of them share counts once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.meter import gradient_of, state_of, storages_nbytes, storages_of, tensors_in
from autoremat.memory.optimizers import StepOptimizers
from autoremat.memory.residents import Resident, resident_of
from autoremat.watch.audit import Present
from autoremat.watch.ledger import open_runs


class Members(Present):
    """Of one budget: modules that are trained in one step, and those that only help there."""

    def __init__(self) -> None:
        """None yet."""
        self._modules: list[weakref.ref[nn.Module]] = []
        self.optimizers = StepOptimizers(self._parameters, [])
        self._planned_state_nbytes = 0  # of optimizers, as the latest plan counts it
        self._given: list[weakref.ref[torch.Tensor]] = []  # to calls of the step

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
    def whole(self) -> nn.Module:
        """All of them as one."""
        modules = self.modules
        return modules[0] if len(modules) == 1 else nn.ModuleList(modules)

    def begin_step(self) -> None:
        """Nothing was given to a call of the step."""
        self._given = []

    def note_given(self, inputs: object) -> None:
        """A call is given these."""
        self._given += [weakref.ref(tensor) for tensor in tensors_in(inputs)]

    def resident(self, device: torch.device, inputs: object = None) -> Resident:
        """Bytes that a step holds whatever the plan.

        Args:
            device: what is elsewhere does not count.
            inputs: its batch; what its calls were given, if not said.
        """
        whole, given = self.whole, self._batch(device) if inputs is None else inputs
        known = self.optimizers.known or [None]
        found = [resident_of(whole, given, optimizer, device) for optimizer in known]
        parts = [one.parts for one in found]
        self._planned_state_nbytes = sum(part.optimizer_nbytes for part in parts)
        return Resident(
            replace(
                parts[0],
                optimizer_nbytes=self._planned_state_nbytes,
                others_nbytes=sum(part.others_nbytes for part in parts),
            ),
            optimizer=", ".join(dict.fromkeys(one.optimizer for one in found)),
            transient_nbytes=max(one.transient_nbytes for one in found),
            storages=frozenset[int]().union(*(one.storages for one in found)),
        )

    def leaves(self) -> list[torch.Tensor]:
        """See `Present`."""
        whole = self.whole
        given = (tensor for reference in self._given if (tensor := reference()) is not None)
        return [*whole.parameters(), *whole.buffers(), *given]

    def expected_nbytes(self, device: torch.device) -> int:
        """See `Present`."""
        return max(0, self._planned_state_nbytes - self._state_nbytes(device))

    def grown_nbytes(self, device: torch.device) -> int:
        """By how much the state of optimizers is larger than the latest plan counts it."""
        return max(0, self._state_nbytes(device) - self._planned_state_nbytes)

    def gradients(self) -> dict[int, int]:
        """Bytes of the gradients that exist, by their parameters; of sparse ones what they hold."""
        found = ((p, gradient_of(p)) for p in self._parameters())
        return {id(p): storages_nbytes([g], g.device) for p, g in found if g is not None}

    def _batch(self, device: torch.device) -> list[torch.Tensor]:
        """What calls of the step were given, but for what graphs of it have returned."""
        returned = frozenset[int]().union(*(run.returned for run in open_runs(device)))
        given = (tensor for reference in self._given if (tensor := reference()) is not None)
        return [t for t in given if returned.isdisjoint(map(_torch.storage_identity, storages_of(t)))]

    def _state_nbytes(self, device: torch.device) -> int:
        return storages_nbytes(state_of(self.optimizers.known), device)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return self.whole.parameters()
