"""A step that does not run, planned: it is traced on fakes, and its graphs are handed to a session.

Enters: an `OfflineStep`, `Options`. Leaves: the session that has planned it, and its report.
Guarantees: no memory of the model's size is allocated; the stages are those of a step that runs.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.ask.sizes import Varying
from autoremat.backend import with_own_code
from autoremat.call_stack import users_level, with_stack_room
from autoremat.elsewhere.apart import ApartError
from autoremat.elsewhere.libraries import with_libraries
from autoremat.elsewhere.present import COARSER, DEVICE
from autoremat.errors import InfeasibleBudget
from autoremat.memory.fake_twin import Faker, give_gradients
from autoremat.memory.residents import Resident, resident_of_twin, with_others
from autoremat.reporting import Report
from autoremat.session.call_sizes import CallSizes
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.session import Session
from autoremat.session.steps import Steps
from autoremat.session.torch_layers import traced_torch_layers

_OBJECTS = 200_000  # new ones after which Python looks for garbage


@dataclass(frozen=True)
class OfflineStep:
    """What is planned, whatever the budget.

    Attributes:
        model: the user's.
        inputs: the batch, positional and by keyword.
        optimizer: as for `plan`.
        home: where the step would run, or its graph is traced.
        offline: what is wanted beside the plan.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    optimizer: torch.optim.Optimizer | None
    home: torch.device
    offline: Offline


@dataclass(frozen=True)
class Planned:
    """A step that does not run, and its plan.

    Attributes:
        session: whoever has planned it.
        report: of the plan.
    """

    session: Session
    report: Report


def planned_session(options: Options, step: OfflineStep) -> Session:
    """Whoever has planned a step that does not run, with at least one graph; coarser without code.

    Raises:
        ValueError: if nothing can be planned.
        InfeasibleBudget: if no plan fits.
    """
    with _collecting_seldom():
        try:
            session = _traced(options, step)
        except ApartError as error:
            spec = options.setting.spec
            why = f"No code for {spec and spec.name} can be generated here: {error}"
            warnings.warn(f"autoremat: {why} {COARSER}", stacklevel=users_level())
            session = _traced(options.without_code(), step)
    _require_planned(session)
    return session


def planned(options: Options, step: OfflineStep) -> Planned:
    """The same with its report.

    Raises:
        ValueError: if nothing can be planned.
        InfeasibleBudget: if no plan fits.
    """
    session = planned_session(options, step)
    with session.progress as progress:
        progress.stage("report")
        return Planned(session, session.report())


@contextlib.contextmanager
def _collecting_seldom() -> Iterator[None]:
    """While open, Python looks for garbage a hundred times less often.

    Graphs are millions of objects that stay: looking through them was a sixth of the time that the
    plan of eight layers took, and more of larger models.
    """
    before = gc.get_threshold()
    if before[0]:  # 0 is never
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True)
class _Twin:
    """Model and batch of a step on fakes.

    Attributes:
        faker: made them, for one device.
        model: has gradients if the step adds to some.
        inputs: the batch, positional and by keyword.
    """

    faker: Faker
    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, step: OfflineStep, device: torch.device) -> _Twin:
        faker = Faker(device)
        twin = cls(faker, faker.model(step.model), faker.values(step.inputs))
        if step.offline.has_gradients:
            give_gradients(twin.model)
        return twin

    def resident(self, step: OfflineStep) -> Resident:
        """What the step holds on the device of these fakes."""
        given = self.model, self.inputs, step.model, step.optimizer
        return resident_of_twin(*given, self.faker.device)


def _traced(options: Options, step: OfflineStep) -> Session:
    """Whoever has planned the step.

    Raises:
        ApartError: if no code can be generated for a GPU that is not here.
    """
    twin = _Twin.of(step, step.home)
    _mark_sizes(step.inputs, twin.inputs, step.offline.varying)
    resident = _resident(options, step, twin)
    session = Session(Steps(options, offline=step.offline), lambda _: resident)
    _run(session, twin)
    session.settle()
    return session


def _resident(options: Options, step: OfflineStep, twin: _Twin) -> Resident:
    """What the step holds on the device that is planned for."""
    found, setting = twin.resident(step), options.setting
    if setting.spec is not None:
        there = with_libraries(_Twin.of(step, DEVICE).resident(step), setting.spec)
        found = there if setting.stands_in else replace(found, tensors=there.tensors)
    return _beside(found, step.offline.window_nbytes)


def _beside(resident: Resident, window_nbytes: int) -> Resident:
    """What is resident, and what no tensor of it shows."""
    if not window_nbytes:
        return resident
    tensors = resident.tensors
    if tensors is not None:
        tensors = replace(tensors, libraries=(*tensors.libraries, window_nbytes))
    parts = with_others(resident.parts, window_nbytes)
    return replace(resident, parts=parts, tensors=tensors, window=None)


def _mark_sizes(given: object, fakes: object, varying: Sequence[tuple[int, int]]) -> None:
    """Let sizes of a batch of fakes be symbols: those that are to vary, and those marked so."""
    leaves = _torch.tensor_leaves(fakes)
    marked = [
        (number, dimension)
        for number, tensor in enumerate(_torch.tensor_leaves(given))
        for dimension in _torch.marked_sizes(tensor)
    ]
    for number, dimension in {*varying, *marked}:
        _torch.may_vary(leaves[number], dimension)


@with_stack_room
def _run(session: Session, twin: _Twin) -> None:
    """One forward on fakes: every graph that it reaches is handed to the session."""
    model, faker, (inputs, keywords) = twin.model, twin.faker, twin.inputs
    call = _torch.compile_apart(with_own_code(_torch.own_call(model)), session.compile)
    session.steps.begin()
    stands_in = session.options.setting.stands_in
    autocast = _torch.autocast_on_cpu() if stands_in else contextlib.nullcontext()
    asked = session.steps.offline.autocast if session.steps.offline else None
    ranges = CallSizes(session.options.sizes)
    _require_no_ones(session.options.sizes.among(model.forward, inputs, keywords))
    everywhere = torch.autocast(faker.device.type, asked, enabled=asked is not None)
    try:
        eager = eager_recurrent_layers(model, session.steps)
        with session.progress, faker.mode, torch.enable_grad(), eager, autocast, everywhere:
            session.progress.stage("trace")
            with ranges.of(model.forward, inputs, keywords), traced_torch_layers():
                call(*inputs, **keywords)
    except (InfeasibleBudget, ApartError):
        raise
    except _torch.DataDependentOutput as error:
        # What code between graphs reads from a tensor is not known; the graphs so far are.
        session.told.fall_back("AR108", cause=error, operation=error.func)


def _require_no_ones(varying: Sequence[Varying]) -> None:
    """Refuse an example of which torch makes code for no other size.

    Raises:
        ValueError: if a size that varies is 1 in it.
    """
    for one in varying:
        if one.size == 1 and (one.high or 1) > 1:
            raise ValueError(
                f"{one.name} is 1 in the batch, and for a 1 torch makes code that is for nothing "
                f"else. Give a batch of which {one.name} is anything from 2 to {one.high}."
            )


def _require_planned(session: Session) -> None:
    if session.steps.graphs.parts:
        return
    why = " ".join(map(str, session.told.fallbacks)) or (
        "Dynamo found no graph in it that needs a gradient: its forward is not compiled "
        "(torch.compiler.disable, or code that Dynamo skips)."
    )
    raise ValueError(f"Nothing can be planned: {why}")
