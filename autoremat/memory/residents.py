"""What a step holds whatever the plan: the one place that counts it.

Enters: a model, its batch and its optimizer; or, of a backend, what each graph is given. Leaves: a
`Resident`. Guarantees: a storage counts once, in the first part that holds it: parameters,
gradients, optimizer state, buffers, batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoremat import _torch
from autoremat.memory.calls import CallsAround
from autoremat.memory.held_tensors import HeldTensors, held_tensors
from autoremat.memory.meter import buffers_of, gradients_of, resident_parts, state_of
from autoremat.memory.optimizer_memory import OptimizerFootprint, optimizer_footprint
from autoremat.memory.optimizers import layers_of, parameters_of
from autoremat.memory.spread import Spread, Traffic
from autoremat.memory.storage_sizes import (
    rounded_nbytes,
    same_device,
    storage_identities,
    storage_sizes,
    storages_of,
    tensors_in,
)
from autoremat.memory.window import Window, window_of
from autoremat.reporting import GraphReport
from autoremat.reporting.resident import ResidentParts

_PARAMETERS, _GRADIENTS, _, _BUFFERS, _BATCH, *_OTHERS = (
    part.name for part in fields(ResidentParts)
)


@dataclass(frozen=True)
class Resident:
    """Bytes that are live whatever the plan.

    Attributes:
        parts: what they are.
        optimizer: class of the optimizer whose state is counted, or "".
        transient_nbytes: what the optimizer's step takes for itself, after the backward.
        traffic: what processes that share the model move; its window is in the parts.
        storages: identities of the storages that are counted, as far as known.
        tensors: each of them, where it is known of a step that does not run.
        accumulates: whether the step needs the gradients that it finds.
        window: what would be held whole if parameters were divided among devices; None where they
            are already, or another process holds the model as well, or nobody knows the model.
    """

    parts: ResidentParts = field(default_factory=ResidentParts)
    optimizer: str = ""
    transient_nbytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    storages: frozenset[int] = frozenset()
    tensors: HeldTensors | None = None
    accumulates: bool = False
    window: Window | None = None

    @property
    def nbytes(self) -> int:
        """All of them together."""
        return self.parts.nbytes

    def with_batch(self, more_nbytes: int) -> Resident:
        """The same with a batch that is larger by so much."""
        if not more_nbytes:
            return self
        batch_nbytes = self.parts.batch_nbytes + more_nbytes
        return replace(self, parts=replace(self.parts, batch_nbytes=batch_nbytes))

    def beside(self, more: Mapping[int, int]) -> Resident:
        """The same with storages of these sizes, by identity, of which some may count already."""
        new = {key: nbytes for key, nbytes in more.items() if key not in self.storages}
        parts = with_others(self.parts, sum(new.values()))
        return replace(self, parts=parts, storages=self.storages.union(new))

    def with_unseen(self, nbytes: int) -> Resident:
        """The same with so much more of the allocator's that no tensor shows."""
        unseen_nbytes = self.parts.unseen_nbytes + nbytes
        return replace(self, parts=replace(self.parts, unseen_nbytes=unseen_nbytes))

    def with_optimizer(self, found: Resident) -> Resident:
        """The same, with the optimizer that was found at another moment, and nothing else of it."""
        return replace(
            self,
            parts=replace(self.parts, optimizer_nbytes=found.parts.optimizer_nbytes),
            optimizer=found.optimizer,
            transient_nbytes=found.transient_nbytes,
        )


def resident_of(
    model: nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Resident:
    """What a step on these inputs holds on a device.

    Args:
        model: the model, or a twin of it that holds fake tensors.
        inputs: the batch.
        optimizer: with it, its state counts, that which its next step creates included.
        device: what is elsewhere does not count.
    """
    parts = resident_parts(model, inputs, optimizer, device)
    return _with_next_step(parts, model, inputs, optimizer)


def resident_of_twin(
    twin: nn.Module,
    inputs: Any,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    home: torch.device,
) -> Resident:
    """The same of a model that is elsewhere than its step would run.

    Args:
        twin: holds fake tensors where the step would run.
        inputs: the batch, as fake.
        model: what the optimizer is of; its tensors may be anywhere.
        optimizer: as for `resident_of`.
        home: where the step would run.
    """
    parts = resident_parts(twin, inputs, None, home)
    held = [*parameters_of(optimizer), *state_of([optimizer])]
    for place in {tensor.device for tensor in held}:
        there = resident_parts(model, (), optimizer, place)
        parts = replace(
            parts,
            optimizer_nbytes=parts.optimizer_nbytes + there.optimizer_nbytes,
            others_nbytes=parts.others_nbytes + there.others_nbytes,
        )
    found = _with_next_step(parts, twin, inputs, optimizer, home)
    if home.type != "cuda":
        return found
    return replace(found, tensors=held_tensors(twin, inputs, model, optimizer, home))


def spread_out(resident: Resident, spread: Spread) -> Resident:
    """The same where processes share the model: at the moment at which they hold the most."""
    more_nbytes = spread.unseen_nbytes + spread.traffic.window_nbytes - spread.now_nbytes
    passing_nbytes = max(0, -more_nbytes)  # what is there now counts as of the parameters
    parameters_nbytes = max(0, resident.parts.parameters_nbytes - passing_nbytes)
    parts = replace(resident.parts, parameters_nbytes=parameters_nbytes)
    parts = with_others(parts, max(0, more_nbytes))
    window = resident.window if spread == Spread() else None
    return replace(resident, parts=parts, traffic=spread.traffic, window=window)


def resident_of_step(
    parts: Sequence[ResidentParts], graphs: Sequence[GraphReport]
) -> ResidentParts:
    """What a step holds whatever the plan, while that of its graphs runs which peaks highest.

    Args:
        parts: of each graph, what the step held when it was planned.
        graphs: their reports.
    """
    if not graphs:
        return ResidentParts()
    found = max(range(len(graphs)), key=lambda n: graphs[n].predicted_peak_nbytes)
    timeline = graphs[found].timeline
    held_nbytes = parts[found].nbytes if timeline is None else timeline.resident_nbytes
    return with_others(parts[found], held_nbytes - parts[found].nbytes)


def with_others(parts: ResidentParts, more_nbytes: int) -> ResidentParts:
    """The parts, and so many bytes more that others hold."""
    return replace(parts, others_nbytes=parts.others_nbytes + more_nbytes)


def _with_next_step(
    parts: ResidentParts,
    model: nn.Module,
    inputs: Any,
    optimizer: torch.optim.Optimizer | None,
    home: torch.device | None = None,
) -> Resident:
    """The parts with what the optimizer's next step creates, and takes for itself."""
    layers = layers_of(optimizer)
    footprint = OptimizerFootprint(0, 0)
    if layers:
        footprint = optimizer_footprint(layers[-1], home if home and home.type == "cuda" else None)
    state_nbytes = parts.optimizer_nbytes + footprint.state_nbytes
    stepped = parameters_of(optimizer)
    return Resident(
        replace(parts, optimizer_nbytes=state_nbytes),
        optimizer=type(layers[-1]).__name__ if layers else "",
        transient_nbytes=footprint.transient_nbytes,
        storages=storage_identities(
            [
                *model.parameters(),
                *_torch.tensors_of_units(_torch.sharded_units(model)),
                *buffers_of(model),
                *tensors_in(inputs),
                *stepped,
            ]
        ),
        window=window_of(model),
    )


class GivenToGraphs:
    """What the graphs of a step are given: all that is known where nobody tells of the model.

    Parameters and buffers of all graphs count as long as they live, and the batch of the first:
    what later ones are given beside, code of the step has made.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._found: dict[int, tuple[str, StorageWeakRef, int, torch.device]] = {}

    def note(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        around: CallsAround | None = None,
        *,
        is_first: bool,
    ) -> None:
        """Remember the sizes of what a graph is given, without holding it.

        Args:
            module: the Dynamo graph; it may own parameters and buffers.
            inputs: its inputs.
            around: the calls that it is compiled in.
            is_first: whether the step begins with it.
        """
        around = around or CallsAround()
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        if around.parameters:  # buckets are given fake tensors: what is real is around them
            given = [value for value in given if not isinstance(value, _torch.FakeTensor)]
        static = list(filter(_torch.is_static_input, given))
        parameters = [*module.parameters(), *(v for v in static if isinstance(v, nn.Parameter))]
        parameters += around.parameters
        buffers = [*module.buffers(), *around.buffers, *static]
        if is_first:
            batch = (key for key, (part, *_) in self._found.items() if part == _BATCH)
            for key in list(batch):
                del self._found[key]
        self._note(_PARAMETERS, parameters)
        self._note(_GRADIENTS, gradients_of([*parameters, *given]))
        self._note(_BUFFERS, buffers)
        if is_first:
            self._note(_BATCH, [*given, *around.given])

    def resident(
        self,
        device: torch.device,
        units: Sequence[_torch.ShardedUnit] = (),
        spread: Spread | None = None,
    ) -> Resident:
        """What of it lives on a device.

        Args:
            device: what is elsewhere does not count.
            units: what gathers parameters that graphs are given: these count as they are now.
            spread: how processes share the model, if they do.
        """
        shared = _torch.tensors_of_units(units)
        parameters = storage_sizes(shared, device)
        waiting = _torch.waiting_gradients(units)
        gradients = storage_sizes([*gradients_of(shared), *waiting], device)
        sizes = dict.fromkeys((_PARAMETERS, _GRADIENTS, _BUFFERS, _BATCH), 0)
        sizes[_PARAMETERS] += sum(parameters.values())
        sizes[_GRADIENTS] += sum(gradients.values())
        held = {key: found for key, found in self._found.items() if not found[1].expired()}
        apart = {key: found for key, found in held.items() if key not in parameters | gradients}
        for part, _, nbytes, place in apart.values():
            if same_device(place, device):
                sizes[part] += rounded_nbytes(nbytes, device)
        found = Resident(ResidentParts(**sizes), storages=frozenset(held))
        return found if spread is None else spread_out(found, spread)

    def beside(self, resident: Resident, device: torch.device) -> Resident:
        """What is resident, and what the graphs always read beside it.

        Such as a tensor that is a plain attribute, or a teacher that the forward calls.
        """
        more = {
            key: rounded_nbytes(nbytes, device)
            for key, (part, storage, nbytes, place) in self._found.items()
            if part in (_PARAMETERS, _BUFFERS)
            if same_device(place, device) and not storage.expired()
        }
        return resident.beside(more)

    def _note(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            # A fake tensor's storage claims to be on `meta`, so the tensor is asked for the device.
            for storage in storages_of(tensor):
                found = (part, StorageWeakRef(storage), storage.nbytes(), tensor.device)
                before = self._found.get(_torch.storage_identity(storage))
                if before is None or before[1].expired():
                    self._found[_torch.storage_identity(storage)] = found
