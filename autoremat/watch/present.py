"""What a model and its training hold at a moment, as far as anybody tells.

Enters: a model with its optimizers, or the arguments of graphs where nothing else is known. Leaves:
tensors and bytes, apart by what forwards may change. Guarantees: holds no tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.calls import CallsAround
from autoremat.memory.given import Given
from autoremat.memory.meter import state_of
from autoremat.memory.optimizers import StepOptimizers, parameters_of
from autoremat.memory.spread import Sharing, Spread, Traffic, traffic_of_run
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.watch.standing import Standing

_OFTEN = 2  # where gradients add up, no two steps in a row begin without


class Present:
    """What a model and its training hold at a moment.

    Attributes:
        optimizers: those that step the model.
    """

    optimizers: StepOptimizers
    _optimizer_steps = -1  # when the latest step began
    _taken_in_a_row = _OFTEN  # steps that found all gradients taken by an optimizer, or none

    def begin_step(self) -> None:
        """A forward begins, and no backward of one before it is to come."""
        is_waiting = self._optimizer_steps == self.optimizers.steps and self.has_gradients
        self._taken_in_a_row = 0 if is_waiting else self._taken_in_a_row + 1
        self._optimizer_steps = self.optimizers.steps

    @property
    def accumulates(self) -> bool:
        """Whether steps find gradients which no optimizer has taken yet: they are needed there.

        A scaler that leaves out an optimizer's step now and then makes that of no training.
        """
        return self._taken_in_a_row < _OFTEN

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Those that are known, which others are parts of."""
        raise NotImplementedError

    def gradients(self) -> Iterator[_torch.OfParameter]:
        """Those that exist, each beside what it is of.

        They are found without a look at what processes move.
        """
        raise NotImplementedError

    def lasting(self) -> list[torch.Tensor]:
        """Parameters and buffers: forwards bring and take none, unless they gather them."""
        raise NotImplementedError

    def new_lasting(self) -> list[torch.Tensor]:
        """Those that graphs were given for the first time since somebody asked for any."""
        return []

    def brought(self, device: torch.device) -> dict[int, int]:
        """Bytes of batches, and of what else calls bring, by identity."""
        raise NotImplementedError

    @property
    def units(self) -> list[_torch.ShardedUnit]:
        """What FSDP has made of the model: forwards gather its parameters, and let go of them."""
        return []

    def standing(self, device: torch.device) -> Standing:
        """All but what is brought: what optimizers step, gradients and state as well."""
        known = self.optimizers.known
        stepped = (parameter for optimizer in known for parameter in parameters_of(optimizer))
        found = Standing(device, self.units)
        found.add([*self.lasting(), *stepped])
        found.add_sizes(storage_sizes(state_of(known), device).items())
        found.absent_nbytes = self.absent_nbytes(device)
        return found

    def absent_nbytes(self, _device: torch.device) -> int:
        """What the plan counts and no tensor shows: optimizer state that does not exist yet."""
        return 0

    def to_come_nbytes(self, _device: torch.device) -> int:
        """What the plan counts of batches that are not there yet."""
        return 0

    @property
    def spread(self) -> Spread:
        """How processes share the model."""
        return Spread()

    def traffic_of_run(self, device: torch.device) -> Traffic | None:
        """What processes that share the model move for a run of a graph that begins now."""
        return traffic_of_run(self.units, device)

    @property
    def has_gradients(self) -> bool:
        """Whether a backward would add to gradients that exist; each backward asks."""
        return next(self.gradients(), None) is not None


class Arguments(Present):
    """What is known where nothing but the arguments of graphs is: those that live."""

    def __init__(self) -> None:
        """None yet."""
        self._lasting: dict[int, weakref.ref[torch.Tensor]] = {}
        self._brought = Given()
        self._new: list[weakref.ref[torch.Tensor]] = []  # lasting ones, since somebody asked
        self.around = CallsAround()
        self._sharing = Sharing()
        self.optimizers = StepOptimizers(self.leaves, [])

    @property
    def modules(self) -> list[nn.Module]:
        """See `Present`: those in which graphs have run."""
        return self.around.roots

    def note(self, args: Sequence[Any]) -> None:
        """Remember the parameters, buffers and batches among the arguments of a graph."""
        self._sharing.note_call()
        self.around.note()
        given = (v for v in args if isinstance(v, torch.Tensor) and v.is_leaf)
        real = [v for v in given if not isinstance(v, _torch.FakeTensor)]
        lasting = [v for v in real if isinstance(v, nn.Parameter) or _torch.is_static_input(v)]
        for value in lasting:
            before = self._lasting.get(id(value))
            if before is None or before() is not value:
                self._lasting[id(value)] = reference = weakref.ref(value)
                self._new.append(reference)
        known = set(map(id, lasting))
        self._brought.note(value for value in real if id(value) not in known)

    def begin_calls(self) -> None:
        """Graphs of another step are going to run: what was given before may live on."""
        self._brought.begin_step()

    def leaves(self) -> list[torch.Tensor]:
        """All that lives of what graphs were given, and what is gathered of it."""
        return [*self._leaves(), *self._shared()]

    def lasting(self) -> list[torch.Tensor]:
        """See `Present`."""
        self._new.clear()
        return [*self._lasting_now(), *self._shared()]

    def new_lasting(self) -> list[torch.Tensor]:
        """See `Present`."""
        new, self._new = self._new, []
        return _living(new)

    def brought(self, device: torch.device) -> dict[int, int]:
        """See `Present`."""
        return self._brought.sizes(device)

    def gradients(self) -> Iterator[_torch.OfParameter]:
        """See `Present`."""
        leaves = self._leaves()
        yield from _torch.own_gradients(leaves)
        parts = _torch.all_modules(self.around.roots)
        yield from _torch.sharded_gradients(parts, gathered=leaves)

    def absent_nbytes(self, device: torch.device) -> int:
        """See `Present`."""
        return self.spread_on(device).unseen_nbytes

    @property
    def spread(self) -> Spread:
        """See `Present`."""
        leaves = self._leaves()
        return self.spread_on(leaves[0].device if leaves else torch.device("cpu"))

    @property
    def is_shared(self) -> bool:
        """Whether processes share this model: they communicate beside its graphs."""
        return self._sharing.has_replica or bool(self.units)

    def spread_on(self, device: torch.device) -> Spread:
        """How processes share the model that these arguments are of."""
        return self._sharing.now(self.units, device)

    @property
    def units(self) -> list[_torch.ShardedUnit]:
        """See `Present`: these gather the parameters that graphs are given."""
        found = _torch.units_that_gather(self._leaves())
        return found or [u for root in self.around.roots for u in _torch.sharded_units(root)]

    def _shared(self) -> list[torch.Tensor]:
        units = self.units
        return [*_torch.tensors_of_units(units), *_torch.waiting_gradients(units)]

    def _leaves(self) -> list[torch.Tensor]:
        return [*self._lasting_now(), *self._brought.tensors]

    def _lasting_now(self) -> list[torch.Tensor]:
        self._lasting = {key: ref for key, ref in self._lasting.items() if ref() is not None}
        return _living(self._lasting.values())


def _living(references: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for reference in references if (tensor := reference()) is not None]
