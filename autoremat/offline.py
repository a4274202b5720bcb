"""`plan`: what `optimize` would do, without a step being run.

Enters: a model, perhaps on the `meta` device, a batch of any contents, a budget. Leaves: a
`Report`. Guarantees: no memory of the model's size is allocated; for a device that is here, the
plan is the one that `optimize` makes, since the same stages make it.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import Budget
from autoremat.ask.hosts import told_of
from autoremat.ask.options import THROUGHPUT, Offline, Options
from autoremat.ask.plan_file import write
from autoremat.ask.sizes import Varying
from autoremat.backend import with_own_code
from autoremat.call_stack import users_level, with_stack_room
from autoremat.cost.card import spec_named
from autoremat.cost.device_specs import DeviceSpec
from autoremat.elsewhere.apart import ApartError
from autoremat.elsewhere.libraries import with_libraries
from autoremat.elsewhere.present import COARSER, DEVICE
from autoremat.errors import InfeasibleBudget, OverReserved
from autoremat.graph.devices import device_nbytes
from autoremat.graph.selectors import Selection
from autoremat.memory.fake_twin import Faker, give_gradients
from autoremat.memory.optimizers import require_optimizer_of
from autoremat.memory.residents import Resident, resident_of_twin, with_others
from autoremat.reporting import ASSUMED, Fact, Report
from autoremat.reserved.search import Tried, largest_within
from autoremat.session.call_sizes import CallSizes
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.session import Session
from autoremat.session.steps import Steps
from autoremat.setup.applied import run_of
from autoremat.setup.asked import TrainingSetup
from autoremat.units import format_nbytes

_OBJECTS = 200_000  # new ones after which Python looks for garbage


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: str | int | None = None,
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    setup: TrainingSetup | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    repeatable: Selection = None,
    save_to: str | Path | None = None,
    offload: str | int | None = None,
    link: str | float | None = None,
    time_limit: float = 30.0,
    verbose: bool = True,
    curve: int = 0,
    code: bool = True,
    sizes: Any = None,
    goal: str = "time",
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
        budget: as for `optimize`; a percentage is of the memory of `device`. For a GPU it may be
            of what CUDA's allocator reserves, which is what "out of memory" is about:
            "75GB reserved", "95% reserved". Then several plans are made, up to six, each within
            `time_limit`.
        device: "cpu", "cuda", a name such as "H100" or "A100 40GB", or a file that
            `autoremat doctor --gpu --out` has exported on a GPU, "card.json"; where the model is
            if not given, which then must not be `meta`.
        optimizer: of the model's parameters, or its name, "AdamW8bit" or "SGD-momentum"; with it,
            the state that it holds or creates counts.
        setup: precision, adapters, sharding and what else the run has that this model has not. A
            copy of the model is planned for it. The report's `assumed` says what follows.
        compiler: "inductor" or "eager".
        policy: as for `optimize`.
        save: as for `optimize`.
        recompute: as for `optimize`.
        repeatable: as for `optimize`.
        save_to: where to store the plan, for `optimize(model, plan=...)`.
        offload: where values may wait: for a GPU that is not here the size of its host's memory,
            "24GB", or "auto", 90 % of what this machine has free; on the CPU with
            `compiler="eager"` a folder, as for `optimize`. The peak is then that of the model of
            the code.
        link: how they get there: "pcie3", "pcie4", "pcie5", "nvlink-c2c" or bytes per second each
            way; the device's own by its data sheet, if not given.
        time_limit: seconds to choose a plan, per graph. Under Inductor the code that it would
            generate is read meanwhile; that cannot be cut short, and however late it is, lean
            plans are read until one fits.
        verbose: show progress and one summary line.
        curve: how many budgets to plan for beside this one, for the report's curve of peak and
            time; 0 for none, else at least 2. They take a third of `time_limit` more.
        code: whether code that Inductor generates for a GPU that is not here is read. Without, the
            plan takes less than half of the time, and its peak is that of a model of the code.
        sizes: as for `optimize`: one plan for a range of sizes, made for the largest; the batch is
            an example of it. The report says how far it is proven (`Sizes`), and gives the peak as
            a formula.
        goal: as for `optimize`. Inputs of the model's own that are called as an argument of this
            function go in by their position.
        keywords: the batch's keyword part.

    Raises:
        ValueError: for a malformed budget, compiler, device or policy, for patterns that match
            nothing, an offload or a link that does not go with the rest, a setup that the model
            cannot have, a model in eval mode or without a parameter that needs a gradient, another
            model's optimizer, and a step in which nothing can be planned.
        InfeasibleBudget: if no plan fits; `OverReserved` if none does that was tried for a budget
            of what is reserved.
    """
    _require_curve(curve)
    limit_nbytes = _reserved_limit(budget, model, device)
    _require_trainable(model)
    run = run_of(model, (inputs, dict(keywords)), optimizer, setup, _runs_on(model, device))
    home, options = asked(
        run.model,
        _device_of(model) if device is None else device,
        run.optimizer,
        budget=budget if limit_nbytes is None else limit_nbytes,
        compiler=compiler,
        policy=policy,
        save=save,
        recompute=recompute,
        repeatable=repeatable,
        offload=offload,
        link=link,
        time_limit=time_limit,
        verbose=verbose,
        sizes=sizes,
        goal=goal,
    )
    host = options.setting.offload
    if limit_nbytes is not None and options.goal == THROUGHPUT:
        raise ValueError(
            f'goal="{THROUGHPUT}" is told for budgets of what is allocated, not of what is '
            "reserved: leave one of the two out."
        )
    if host is not None and (limit_nbytes is not None or save_to is not None):
        other = "a budget of what is reserved" if limit_nbytes is not None else "save_to="
        raise ValueError(f"offload={offload!r} does not go with {other}: leave one of the two out.")
    options = options if code else options.without_reading()
    offline = Offline(
        curve,
        time_limit / 3,
        has_gradients=run.has_gradients,
        autocast=run.autocast,
        window_nbytes=run.window_nbytes,
    )
    step = OfflineStep(run.model, run.inputs, run.optimizer, home, offline)
    if limit_nbytes is None:
        session, report = _reported(options, step)
    else:
        session, report = _within_reserved(limit_nbytes, options, step)
    if save_to is not None:
        write(session.stored_plan(), save_to)
    told = filter(None, (*run.assumed, "" if host is None else told_of(host)))
    assumed = (Fact(ASSUMED, sentence) for sentence in told)
    return replace(report, facts=(*report.facts, *assumed))


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


def planned_session(options: Options, step: OfflineStep) -> Session:
    """Whoever has planned a step that does not run, with at least one graph; coarser without code.

    Raises:
        ValueError: if nothing can be planned.
        InfeasibleBudget: if no plan fits.
    """
    with _collecting_seldom():
        try:
            session = _planned(options, step)
        except ApartError as error:
            spec = options.setting.spec
            why = f"No code for {spec and spec.name} can be generated here: {error}"
            warnings.warn(f"autoremat: {why} {COARSER}", stacklevel=users_level())
            session = _planned(options.without_code(), step)
    _require_planned(session)
    return session


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


def _reported(options: Options, step: OfflineStep) -> tuple[Session, Report]:
    session = planned_session(options, step)
    with session.progress as progress:
        progress.stage("report")
        return session, session.report()


def _reserved_limit(
    budget: str | int | None, model: nn.Module, device: str | torch.device | None
) -> int | None:
    """What a plan may reserve; None where the budget is of what is allocated.

    Raises:
        ValueError: if the device has no allocator that reserves.
    """
    given = None if budget is None else Budget.parse(budget)
    if given is None or not given.of_reserved:
        return None
    _require_trainable(model)
    home, spec = _place(model, device)
    if spec is None and home.type != "cuda":
        raise ValueError(
            f"Budget {given.given!r} is of what CUDA's allocator reserves, and the step is planned "
            'for the CPU, whose allocator keeps nothing in reserve. Name a GPU, device="H100", or '
            'leave "reserved" out.'
        )
    return given.nbytes(spec.memory_nbytes if spec is not None else device_nbytes(home))


def _within_reserved(
    limit_nbytes: int, options: Options, step: OfflineStep
) -> tuple[Session, Report]:
    """The same for a budget of what is reserved, by a few budgets of what is allocated.

    Raises:
        OverReserved: if no plan that was tried is within it.
        InfeasibleBudget: if no plan's allocated peak is.
    """
    alone = replace(step, offline=replace(step.offline, curve_points=0))  # one curve is enough
    found: dict[int, tuple[Session, Report] | InfeasibleBudget] = {}

    def smallest(budget_nbytes: int) -> int | None:
        leaner = replace(options, budget=Budget(budget_nbytes, given=budget_nbytes))
        try:
            found[budget_nbytes] = _reported(leaner, alone)
        except InfeasibleBudget as error:
            found[budget_nbytes] = error
            return error.smallest_peak_nbytes
        return None

    def planned(budget_nbytes: int) -> Tried[tuple[Session, Report]]:
        made = found[budget_nbytes]
        assert not isinstance(made, InfeasibleBudget)
        reserved = made[1].reserved
        if reserved is None:
            raise ValueError(
                "What the step reserves is not known, as nobody knows what parts of it without a "
                f"plan allocate: {'; '.join(map(str, made[1].fallbacks))} Give a budget of what is "
                "allocated."
            )
        return Tried(budget_nbytes, made[1].predicted_peak_nbytes, reserved.peak_nbytes, made)

    best, tried = largest_within(limit_nbytes, planned, smallest)
    if best is None:
        raise _over_reserved(limit_nbytes, tried, found)
    session, report = best.made
    if step.offline.curve_points:
        leaner = replace(options, budget=Budget(best.budget_nbytes, given=best.budget_nbytes))
        report = replace(report, curve=_reported(leaner, step)[1].curve)
    return session, _as_asked(report, limit_nbytes, best.budget_nbytes, len(tried))


def _as_asked(report: Report, limit_nbytes: int, budget_nbytes: int, plans: int) -> Report:
    """The report beside the budget that the user gave."""
    text = (
        f"a budget of {format_nbytes(budget_nbytes)} of what is allocated: of {plans} that were "
        f"tried, it makes the best use of {format_nbytes(limit_nbytes)} reserved"
    )
    reserved = report.reserved and replace(report.reserved, budget_nbytes=limit_nbytes)
    facts = (*report.facts, Fact("Planned with", text))
    return replace(report, budget_nbytes=limit_nbytes, reserved=reserved, facts=facts)


def _over_reserved(
    limit_nbytes: int,
    tried: list[Tried[tuple[Session, Report]]],
    found: Mapping[int, tuple[Session, Report] | InfeasibleBudget],
) -> InfeasibleBudget:
    """That nothing is within a budget of what is reserved."""
    refused = [error for error in found.values() if isinstance(error, InfeasibleBudget)]
    if not tried:
        error = refused[0]
        error.add_note(
            "That is of what is allocated. What is reserved is never less, and more as a rule: a "
            'budget of so much "reserved" is refused, too.'
        )
        return error
    least = min(tried, key=lambda one: one.reserved_nbytes)
    report = least.made[1]
    cases = () if report.reserved is None else report.reserved.cases
    fitting = [c.setting for c in cases if c.fits and c.peak_nbytes <= limit_nbytes]
    return OverReserved(
        budget_nbytes=limit_nbytes,
        smallest_peak_nbytes=least.reserved_nbytes,
        floor_nbytes=report.resident_nbytes,
        resident=report.resident,
        advice=report.advice,
        allocated_nbytes=report.reserved.default.allocated_nbytes if report.reserved else 0,
        setting=fitting[0] if fitting else "",
    )


def _planned(options: Options, step: OfflineStep) -> Session:
    """Whoever has planned the step.

    Raises:
        ApartError: if no code can be generated for a GPU that is not here.
    """
    model, inputs, optimizer, home = step.model, step.inputs, step.optimizer, step.home
    faker = Faker(home)
    twin, (fakes, fake_keywords) = faker.model(model), faker.values(inputs)
    has_gradients, spec = step.offline.has_gradients, options.setting.spec
    if has_gradients:
        give_gradients(twin)
    _mark_sizes(inputs, (fakes, fake_keywords), step.offline.varying)
    resident = resident_of_twin(twin, (fakes, fake_keywords), model, optimizer, home)
    if spec is not None:
        there = Faker(DEVICE)
        seen = there.model(model), there.values(inputs)
        if has_gradients:
            give_gradients(seen[0])
        held = resident_of_twin(*seen, model, optimizer, DEVICE)
        held = with_libraries(held, spec)
        resident = held if options.setting.stands_in else replace(resident, tensors=held.tensors)
    resident = _beside(resident, step.offline.window_nbytes)
    steps = Steps(options, offline=step.offline)
    session = Session(steps, lambda _: resident)
    _run(session, faker, twin, fakes, fake_keywords)
    session.settle()
    return session


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
    asked = session.steps.offline.autocast if session.steps.offline else None
    ranges = CallSizes(session.options.sizes)
    _require_no_ones(session.options.sizes.among(twin.forward, inputs, keywords))
    everywhere = torch.autocast(faker.device.type, asked, enabled=asked is not None)
    try:
        eager = eager_recurrent_layers(twin, session.steps.leave_layer_eager)
        with session.progress, faker.mode, torch.enable_grad(), eager, autocast, everywhere:
            session.progress.stage("trace")
            with ranges.of(twin.forward, inputs, keywords):
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


def _device_of(model: nn.Module) -> torch.device | None:
    """Where a model is; None if nowhere."""
    found = next(model.parameters()).device
    return None if found.type == "meta" else found


def _runs_on(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where the step would run: a GPU that is not here is one, too."""
    home, spec = _place(model, device)
    return home if spec is None else DEVICE


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
        return torch.device("cpu"), spec_named(str(device))
    if home.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here. Name the GPU to plan for by its data sheet: "
            'device="H100", "A100 40GB", ...'
        )
    if home.type not in ("cpu", "cuda"):
        raise ValueError(f'device is "cpu", "cuda" or the name of a GPU, not {str(device)!r}.')
    return home, None
