"""What users call: `optimize`, `report`, `save_plan`.

Enters: the user's module or several, a budget, perhaps optimizers. Leaves: the same modules, whose
training calls run under a plan. The plan is made at the first training call; calls in `eval` mode
or without gradients run as if autoremat were not there.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import Budget as Asked
from autoremat.ask.options import Options
from autoremat.ask.plan_file import write
from autoremat.backend import module_call, session_behind
from autoremat.errors import FallbackError, FallbackWarning
from autoremat.fallbacks import fallback
from autoremat.graph.selectors import Selection
from autoremat.memory.meter import tensors_in
from autoremat.memory.optimizers import require_optimizer_of, watch_optimizers
from autoremat.planning.sizes import MANY_COMPILES
from autoremat.reporting import Report
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.members import as_one
from autoremat.session.retake import Before
from autoremat.session.session import Session
from autoremat.session.training import Shared, Training
from autoremat.units import format_nbytes

# One module, or several that share a budget.
Models = TypeVar("Models", nn.Module, Sequence[nn.Module])
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_WRITTEN = (
    "autoremat: part of this call has written to parameters, buffers or inputs in place, so it was "
    'not taken again under a leaner plan. budget="min" begins with the leanest one.'
)
_NEVER_PLANNED = frozenset({"AR201", "AR202"})  # whatever mode the model is put into later


class OptimizedCall:
    """The compiled call of one module, under the plans of all that share its budget."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        """Prepare to compile the model's call; nothing is compiled yet."""
        self.model = weakref.ref(model)
        self.training = training
        self._forward = type(model).forward
        self._is_frozen = not _is_trainable(model)
        self._shared: dict[Session, Shared] = {}  # with modules that are alike

    @property
    def session(self) -> Session:
        """The session of the latest training call."""
        return self.training.session

    @torch.compiler.disable(recursive=False)  # within an outer torch.compile, a graph of its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the model: compiled in training, as it is otherwise."""
        model = self._model()
        if _is_own_compile.get() and _torch.takes_what_is_called():  # after a graph break within it
            self.training.is_within_another = True
            return _torch.own_call(model)(*args, **kwargs)
        if not torch.is_grad_enabled():
            with self.session.steps.during_inference():
                output = _torch.own_call(model)(*args, **kwargs)
            self.training.members.note_held(output)
            return output
        if self._is_frozen and not _is_trainable(model):
            return _torch.own_call(model)(*args, **kwargs)
        if not model.training:
            return self._watched(_torch.own_call(model)(*args, **kwargs))
        return self._planned(model, args, kwargs)

    def _watched(self, output: Any) -> Any:
        """What a call in eval mode returned; a backward through it is told of."""
        made = (tensor.grad_fn for tensor in tensors_in(output))
        node = next((node for node in made if node is not None), None)
        if node is not None:
            session = self.session
            node.register_prehook(lambda _: session.told.fall_back("AR113"))
            self._note_eager(session, output)
        return output

    @torch.compiler.disable  # nor is what stands around the compiled call of ours traced
    def _planned(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _torch.in_functional_transform():
            self.session.told.fall_back("AR112")
            return _torch.own_call(model)(*args, **kwargs)
        if self._global_hooks_came_later():
            self.session.told.fall_back("AR110")
            output = _torch.own_call(model)(*args, **kwargs)
            self._note_eager(self.session, output)
            return output
        with self.training.planning:
            if type(model).forward is not self._forward:  # Dynamo has no guard for that
                self._forward = type(model).forward
                self.training.start_anew()
            lockstep = self.training.meet_ranks(model)
            session = self.training.begin((args, kwargs), id(self))
            is_first = session not in self._shared
            if is_first or not self._is_planned(session):  # others wait meanwhile for the plan
                with lockstep.beginning(session):
                    if lockstep.ranks:  # another rank's call goes on: it cannot be taken again
                        return self._run(session, args, kwargs)
                    return self._first_run(session, args, kwargs)
        return self._run(session, args, kwargs)

    def _first_run(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that compiles; where memory runs out, it is taken once more, as lean as can be."""
        model, options = self._model(), session.steps.options
        before = Before([*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))])
        try:
            return self._run(session, args, kwargs)
        except torch.OutOfMemoryError as error:
            if options.budget.is_least or options.setting.strict:
                raise
            if not before.is_now:
                error.add_note(_WRITTEN)
                raise
        before.restore_random()
        budget_nbytes = session.steps.budget_nbytes
        session = self.training.begin_leanest()
        output = self._run(session, args, kwargs)
        peak = format_nbytes(session.steps.peak_nbytes)
        session.told.fall_back("AR117", budget=format_nbytes(budget_nbytes), peak=peak)
        return output

    def _run(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        token = _is_own_compile.set(True)
        try:
            with (
                _torch.compiling_steps(2 * MANY_COMPILES * self.training.members.count),
                eager_recurrent_layers(self._model(), session.steps.leave_layer_eager),
            ):
                output = self._shared_in(session).compiled(self._model(), *args, **kwargs)
        finally:
            _is_own_compile.reset(token)
        self._tell_if_nothing_was_planned(session)
        if self._is_planned(session):
            session.steps.note_end(tensors_in(output))
        else:
            self._note_eager(session, output)
        return output

    def _shared_in(self, session: Session) -> Shared:
        if session not in self._shared:
            known = self._shared.items()
            self._shared = {s: shared for s, shared in known if self.training.runs(s)}
            self._shared[session] = self.training.shared(session, self._model(), module_call)
        return self._shared[session]

    def _is_planned(self, session: Session) -> bool:
        """Whether any graph of this module was, or of one alike."""
        return session.has_compiled(self._shared_in(session).kind) and session.steps.is_planned

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None, "a call comes from the module itself"
        return model

    def _global_hooks_came_later(self) -> bool:
        """Whether all modules have hooks that code compiled earlier does not run.

        Dynamo guards such hooks where there are some, and not where there are none.
        """
        present = _torch.kinds_of_global_hooks()
        absent = self.training.compiled_without
        if any(present[kind] for kind in absent):
            return True
        absent.update(kind for kind in present if not present[kind])
        return False

    def _note_eager(self, session: Session, output: Any) -> None:
        device = next(self._model().parameters()).device
        session.steps.note_eager_call(tensors_in(output), device)

    def _tell_if_nothing_was_planned(self, session: Session) -> None:
        told = {fallback.code for fallback in session.told.fallbacks}
        if self._is_planned(session) or told - {"AR109"}:  # which says that the rest is planned
            return
        if _is_trainable(self._model()):
            session.told.fall_back("AR105")


class Budget:
    """One budget for the whole step of several modules: give it to each call of `optimize`.

    `optimize([policy, critic], "40GB")` means the same. All calls get the same options.

    Attributes:
        size: what was asked for, as `optimize` takes it.
    """

    def __init__(self, size: str | int) -> None:
        """A budget that nothing is under yet.

        Raises:
            ValueError: if the size is malformed.
        """
        Asked.parse(size)
        self.size = size
        self._training: Training | None = None

    def _training_under(self, asked: Options) -> Training:
        """What the modules share, all of which are asked for under the same options."""
        if self._training is None:
            self._training = Training(asked)
        elif self._training.asked != asked:
            raise ValueError(
                "Modules that share a budget are planned under the same options: give each call of "
                "optimize the same, or all modules to one call."
            )
        return self._training


# Where an optimised part of an optimised model is one with the whole.
_is_own_compile: ContextVar[bool] = ContextVar("is_own_compile", default=False)


@functools.cache
def _keep_plans_in_outer_compiles() -> None:
    """Let Dynamo stop at optimised modules; once, and not before there are any."""
    _torch.stop_at(_is_planned_apart)


def _is_planned_apart(module: nn.Module) -> bool:
    """Whether a module that a compile has come to has a plan of its own."""
    call = _torch.compiled_call(module)
    if not isinstance(call, OptimizedCall):
        return False
    if _is_own_compile.get():
        call.training.is_within_another = True
        return False
    return True


def _is_trainable(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def optimize(
    model: Models,
    budget: str | int | Budget | None = None,
    *,
    optimizer: Optimizers | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    plan: str | Path | None = None,
    dropout: str | None = None,
    time_limit: float = 30.0,
    tune: int = 0,
    strict: bool = False,
    verbose: bool = True,
) -> Models:
    """Keep the peak of every training step of a model within a budget.

    The module is compiled in place, as `nn.Module.compile` does: it keeps its class, parameters,
    `state_dict` keys and mode. The plan is made at the first training call.

    Several modules that take part in one step (a policy and its critic, two towers) share one
    budget: what all of them and their optimizers hold counts, once, and their graphs are planned
    as parts of one step. From the second step on, when it is known how often each is called, the
    budget is divided between them. One without a trainable parameter only counts as held.

    Args:
        model: the module to train, on one device, or several of them.
        budget: peak of everything the step holds on the device: "40GB" (10^9 bytes), "40GiB"
            (2^30), a number of bytes, "80%" of the device's memory, "auto" for what it has free at
            the first training call, less a reserve, or "min" for as little as can be. With a fixed
            policy or a stored plan it may be left out: then it is the device's memory. One
            `Budget` that is given to several calls is the budget of all their modules together.
        optimizer: with it, its state counts as well, that which its first step creates included;
            it may be wrapped, as accelerate and Lightning do. One, or several.
        compiler: "inductor", or "eager" to run the planned graphs operation by operation.
        policy: "optimal" searches for the fastest plan within the budget. The others are fixed:
            "save-all", "recompute-all", "every-layer", "every-2" (or another number), "sqrt",
            "selective-attention".
        save: what the backward may never recompute: patterns of module paths ("layers.3",
            "*.attn.*") and operators ("aten.mm", `torch.ops.aten.mm`), one or several.
        recompute: what may not be kept from the forward to the backward, in the same form.
        plan: path of a plan that `save_plan` stored, to be applied as it is.
        dropout: "replay" draws random numbers again, where that gives those of the first draw;
            "save_masks" draws once and keeps what the backward needs. Without it, "replay" where
            that is known to be safe on the device.
        time_limit: seconds to choose a plan, per graph. Under Inductor the code that it would
            generate is read meanwhile; that cannot be cut short, and however late it is, lean
            plans are read until one fits.
        tune: how many of the first steps, 0 or at least 3, may run by other plans that fit, each
            of which is compiled: that of the fastest step stays, and nothing is compiled later.
        strict: raise where a graph cannot be planned, instead of a warning and torch's plan.
        verbose: show progress and one summary line.

    Returns:
        The same module, or a list of the same modules.

    Raises:
        ValueError: for a malformed budget, compiler, dropout or policy, for patterns that no
            module matches, for an optimizer none of whose parameters is the model's, and for
            modules that cannot share a budget: none, one twice, a part of another, optimised
            already, on several devices, or under a stored plan, which is one module's.
        TypeError: if `model` is not a module, or `optimizer` no optimizer.
        OSError: if the stored plan cannot be read.
        FallbackError: with `strict`, if the model cannot be planned as it is.

    The first training call raises `InfeasibleBudget` if no plan fits, `OverBudget` if the policy
    or the stored plan does not, `PlanMismatch` if the stored plan is another model's, and
    `SteeringError` if an operator of `save` or `recompute` does not occur. Where several processes
    train the model in lockstep, it raises on all of them what one of them cannot do, and
    `SteeringError` if they were asked for different plans; `RankError` names who did not come.
    """
    modules = _modules_in(model)
    is_one = isinstance(model, nn.Module)
    returned: Any = model if is_one else modules
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    shared = budget if isinstance(budget, Budget) else None
    asked = Options.parse(
        budget=budget.size if isinstance(budget, Budget) else budget,
        compiler=compiler,
        policy=policy,
        save=save,
        recompute=recompute,
        plan=plan,
        dropout=dropout,
        time_limit=time_limit,
        tune=tune,
        strict=strict,
        verbose=verbose,
    )
    training = Training(asked) if shared is None else shared._training_under(asked)
    if shared is not None or not is_one:
        training.members.require_room_for(modules)
        if plan is not None:
            raise ValueError("A stored plan is of one module, and not of several that share one.")
    options = asked.of(*modules)
    for given in optimizers:
        require_optimizer_of(as_one(modules), given)
    obstacle = _obstacle(modules, is_helper=shared is not None)
    if obstacle is not None:
        if strict:
            raise FallbackError.of(obstacle)
        warnings.warn(obstacle, stacklevel=2)
        if obstacle.code in _NEVER_PLANNED:
            return returned
    training.add(modules, [given for given in optimizers if given is not None], options)
    for module in modules:
        _torch.set_compiled_call(module, OptimizedCall(module, training))
    _keep_plans_in_outer_compiles()
    watch_optimizers(training)
    return returned


def _modules_in(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    if not isinstance(model, Iterable):
        raise TypeError(f"model is an nn.Module or several, not {type(model).__name__}.")
    return list(model)


def _obstacle(modules: Sequence[nn.Module], *, is_helper: bool) -> FallbackWarning | None:
    """Why modules cannot be planned as they are; None if they can."""
    trainable = [module for module in modules if _is_trainable(module)]
    if not trainable and not is_helper:
        return fallback("AR201")
    tensors = (tensor for m in modules for tensor in (*m.parameters(), *m.buffers()))
    devices = sorted({str(tensor.device) for tensor in tensors})
    accelerators = [name for name in devices if not name.startswith("cpu")]
    if len(accelerators) > 1 or (accelerators and "cpu" in devices):
        return fallback("AR202", devices=", ".join(devices))
    if not all(module.training for module in trainable):
        return fallback("AR203")
    return None


def report(model: nn.Module) -> Report:
    """What was planned for an optimised model, or one compiled with our backend.

    Of a block that was compiled by itself, it is the report of all blocks with its options.

    Raises:
        ValueError: if the model was not optimised, or has not run a training step yet.
    """
    session = session_behind(model.parameters())
    if session is None or isinstance(_torch.compiled_call(model), OptimizedCall):
        session = optimized_call(model).session
    if not session.steps.is_planned and not session.told.fallbacks:
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    return session.report()


def save_plan(model: nn.Module, path: str | Path) -> None:
    """Store what was planned for an optimised model, for `optimize(model, plan=path)`.

    What the path holds is replaced.

    Raises:
        ValueError: if the model was not optimised or shares its budget, or nothing is planned.
        OSError: if the path cannot be written.
    """
    stored = call_of_one(model, "a stored plan is of").session.stored_plan()
    if not stored.graphs:
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    write(stored, path)


def optimized_call(model: nn.Module) -> OptimizedCall:
    """What runs when an optimised model is called.

    Raises:
        ValueError: if the model was not optimised.
    """
    call = _torch.compiled_call(model)
    if isinstance(call, OptimizedCall):
        return call
    if call is None:
        raise ValueError("The model was not optimised: call autoremat.optimize(model, budget).")
    raise ValueError(
        f"{type(model).__name__} is compiled, but no planned graph is known that reads its "
        "parameters. "
        "It has not run a training step, or Module.compile does nothing for it, as for all classes "
        "of torch's own (nn.Sequential): use torch.compile(module, ...) or autoremat.optimize."
    )


def call_of_one(model: nn.Module, what: str) -> OptimizedCall:
    """What runs when a module is called that has a budget of its own.

    Args:
        model: the module.
        what: wants to know, "a stored plan is of".

    Raises:
        ValueError: if it was not optimised, or shares its budget.
    """
    call = optimized_call(model)
    count = len(call.training.members.modules)
    if count > 1:
        raise ValueError(
            f"{type(model).__name__} shares its budget with others ({count} modules): {what} "
            "one module. Put them into one that returns the loss, and optimize that."
        )
    return call
