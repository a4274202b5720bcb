"""`plan`: what `optimize` would do, without a step being run.

Enters: a model, perhaps on the `meta` device, a batch of any contents, a budget. Leaves: a
`Report`. Guarantees: no memory of the model's size is allocated; for a device that is here, the
plan is the one that `optimize` makes, since the same stages make it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.ask.plan_file import write
from autoremat.backend import with_own_code
from autoremat.call_stack import users_level, with_stack_room
from autoremat.cost.device_specs import DeviceSpec, find_spec
from autoremat.elsewhere.apart import ApartError
from autoremat.elsewhere.libraries import with_libraries
from autoremat.elsewhere.present import COARSER, DEVICE
from autoremat.errors import InfeasibleBudget
from autoremat.graph.selectors import Selection
from autoremat.memory.fake_twin import Faker, give_gradients
from autoremat.memory.optimizers import require_optimizer_of
from autoremat.memory.residents import resident_of_twin
from autoremat.reporting import Report
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.session import Session
from autoremat.session.steps import REPLANS, Steps


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: str | int | None = None,
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    repeatable: Selection = None,
    save_to: str | Path | None = None,
    time_limit: float = 30.0,
    verbose: bool = True,
    curve: int = 0,
    **keywords: Any,
) -> Report:
    """The plan of a training step, without running it.

    Model and batch may be on the `meta` device: only sizes matter. For a GPU that is not here,
    operations are estimated by its data sheet. With triton installed (`autoremat[gpu]`) attention
    is the one that torch takes on that GPU, and the peak is read from the code that Inductor
    generates for it; without it, and with `compiler="eager"`, the graph is the CPU's and the peak
    the model's. The report says which.

    Args:
        model: the module, in train mode.
        inputs: the batch's positional part; tensors of the sizes to plan for.
        budget: as for `optimize`; a percentage is of the memory of `device`.
        device: "cpu", "cuda", or a name such as "H100" or "A100 40GB"; where the model is if not
            given, which then must not be `meta`.
        optimizer: of the model's parameters; with it, the state that it holds or creates counts.
        compiler: "inductor" or "eager".
        policy: as for `optimize`.
        save: as for `optimize`.
        recompute: as for `optimize`.
        repeatable: as for `optimize`.
        save_to: where to store the plan, for `optimize(model, plan=...)`.
        time_limit: seconds to choose a plan, per graph. Under Inductor the code that it would
            generate is read meanwhile; that cannot be cut short, and however late it is, lean
            plans are read until one fits.
        verbose: show progress and one summary line.
        curve: how many budgets to plan for beside this one, for the report's curve of peak and
            time; 0 for none, else at least 2. They take a third of `time_limit` more.
        keywords: the batch's keyword part.

    Raises:
        ValueError: for a malformed budget, compiler, device or policy, for patterns that match
            nothing, a model in eval mode or without a parameter that needs a gradient, another
            model's optimizer, and a step in which nothing can be planned.
        InfeasibleBudget: if no plan fits.
    """
    _require_curve(curve)
    home, options = asked(
        model,
        device,
        optimizer,
        budget=budget,
        compiler=compiler,
        policy=policy,
        save=save,
        recompute=recompute,
        repeatable=repeatable,
        time_limit=time_limit,
        verbose=verbose,
    )
    offline = Offline(curve, time_limit / 3)
    session = planned_session(
        options, model, (inputs, dict(keywords)), optimizer, home, offline=offline
    )
    if save_to is not None:
        write(session.stored_plan(), save_to)
    return session.report()


def asked(
    model: nn.Module,
    device: str | torch.device | None,
    optimizer: torch.optim.Optimizer | None,
    **options: Any,
) -> tuple[torch.device, Options]:
    """Where the twin of a model seems to live, and what was asked for.

    Args:
        model: as for `plan`.
        device: the same.
        optimizer: the same.
        options: of `Options.parse`, but for the data sheet.

    Raises:
        ValueError: as of `plan`, of what is known before anything is traced.
    """
    _require_trainable(model)
    require_optimizer_of(model, optimizer)
    home, spec = _place(model, device)
    return home, Options.parse(spec=spec, **options).of(model)


def planned_session(
    options: Options,
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    home: torch.device,
    *,
    offline: Offline,
) -> Session:
    """Whoever has planned a step that does not run; there is at least one graph.

    Args:
        options: what was asked for.
        model: in train mode.
        inputs: the batch, positional and by keyword.
        optimizer: as for `plan`.
        home: where the twin seems to live.
        offline: what else is to be found.

    Raises:
        ValueError: if nothing can be planned.
        InfeasibleBudget: if no plan fits.
    """
    given = (model, inputs, optimizer, home, offline)
    try:
        session = _planned(options, *given)
    except ApartError as error:
        spec = options.setting.spec
        why = f"No code for {spec and spec.name} can be generated here: {error}"
        warnings.warn(f"autoremat: {why} {COARSER}", stacklevel=users_level())
        session = _planned(options.without_code(), *given)
    _require_planned(session)
    return session


def _planned(
    options: Options,
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    optimizer: torch.optim.Optimizer | None,
    home: torch.device,
    offline: Offline,
) -> Session:
    """Whoever has planned the step.

    Raises:
        ApartError: if no code can be generated for a GPU that is not here.
    """
    faker = Faker(home)
    twin, (fakes, fake_keywords) = faker.model(model), faker.values(inputs)
    if offline.has_gradients:
        give_gradients(twin)
    leaves = _torch.tensor_leaves((fakes, fake_keywords))
    marked = [
        (number, dimension)
        for number, given in enumerate(_torch.tensor_leaves(inputs))
        for dimension in _torch.marked_sizes(given)
    ]
    for number, dimension in {*offline.varying, *marked}:
        _torch.may_vary(leaves[number], dimension)
    if options.setting.stands_in:
        there = Faker(DEVICE)
        seen = there.model(model), there.values(inputs)
        if offline.has_gradients:
            give_gradients(seen[0])
        held = resident_of_twin(*seen, model, optimizer, DEVICE)
        resident = with_libraries(held, options.setting.spec)
    else:
        resident = resident_of_twin(twin, (fakes, fake_keywords), model, optimizer, home)
    steps = Steps(options, replans=REPLANS, offline=offline)
    session = Session(steps, lambda _: resident)
    _run(session, faker, twin, fakes, fake_keywords)
    session.settle()
    return session


@with_stack_room
def _run(
    session: Session,
    faker: Faker,
    twin: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> None:
    """One forward on fakes: every graph that it reaches is handed to the session."""
    call = _torch.compile_apart(with_own_code(_torch.own_call(twin)), session.compile)
    session.steps.begin()
    stands_in = session.options.setting.stands_in
    autocast = _torch.autocast_on_cpu() if stands_in else contextlib.nullcontext()
    try:
        eager = eager_recurrent_layers(twin, session.steps.leave_layer_eager)
        with session.progress, faker.mode, torch.enable_grad(), eager, autocast:
            session.progress.stage("trace")
            call(*inputs, **keywords)
    except (InfeasibleBudget, ApartError):
        raise
    except _torch.DataDependentOutput as error:
        # What code between graphs reads from a tensor is not known; the graphs so far are.
        session.told.fall_back("AR108", cause=error, operation=error.func)


def _require_curve(points: int) -> None:
    if points < 0 or points == 1:
        raise ValueError(f"curve is {points}: a curve has two ends, give 0 or at least 2.")


def _require_trainable(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, not {type(model).__name__}.")
    if not model.training:
        raise ValueError(
            "The model is in eval mode, where nothing is planned: call model.train() first."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "No parameter of the model needs a gradient, so there is no backward to plan: call "
            "requires_grad_() on what is to be trained."
        )


def _require_planned(session: Session) -> None:
    if session.steps.graphs.parts:
        return
    why = " ".join(map(str, session.told.fallbacks)) or (
        "Dynamo found no graph in it that needs a gradient: its forward is not compiled "
        "(torch.compiler.disable, or code that Dynamo skips)."
    )
    raise ValueError(f"Nothing can be planned: {why}")


def _place(
    model: nn.Module, device: str | torch.device | None
) -> tuple[torch.device, DeviceSpec | None]:
    """Where the twin seems to live, and the device to plan for if it is not here."""
    if device is None:
        first = next(model.parameters()).device
        if first.type == "meta":
            raise ValueError(
                'The model is on the meta device: say what to plan for, device="cpu", "cuda", or '
                'a name such as "H100".'
            )
        return first, None
    try:
        home = torch.device(device)
    except RuntimeError:
        # Without a GPU the graph is traced as on the CPU; its sizes are the same.
        return torch.device("cpu"), find_spec(str(device))
    if home.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here. Name the GPU to plan for by its data sheet: "
            'device="H100", "A100 40GB", ...'
        )
    if home.type not in ("cpu", "cuda"):
        raise ValueError(f'device is "cpu", "cuda" or the name of a GPU, not {str(device)!r}.')
    return home, None
