"""What users call: `optimize`, `report`, `save_plan`.

Enters: the user's module, a budget, perhaps its optimizer. Leaves: the same module, whose training
calls run under a plan. The plan is made at the first training call; calls in `eval` mode or
without gradients run as if autoremat were not there.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.ask.plan_file import write
from autoremat.backend import with_own_code
from autoremat.errors import FallbackError, FallbackWarning
from autoremat.fallbacks import fallback
from autoremat.graph.selectors import Selection
from autoremat.memory.meter import (
    gradients_of,
    state_of,
    storages_nbytes,
    tensors_in,
)
from autoremat.memory.optimizers import StepOptimizers, require_optimizer_of, watch_optimizers
from autoremat.memory.residents import Resident, resident_of, spread_out
from autoremat.memory.spread import Sharing, Spread
from autoremat.planning.sizes import MANY_COMPILES
from autoremat.reporting import Report
from autoremat.session.eager_recurrent import eager_recurrent_layers
from autoremat.session.session import Session
from autoremat.session.steps import REPLANS, Steps
from autoremat.watch.audit import Present

_NEVER_PLANNED = frozenset({"AR201", "AR202"})  # whatever mode the model is put into later


@dataclass
class _Variant:
    """One plan of a model: for steps that find gradients of up to so many bytes."""

    session: Session
    compiled: Callable[..., Any]
    gradient_nbytes: int
    calls: int = 0


class OptimizedCall(Present):
    """The compiled call of one module, and what the call in progress was given.

    There are up to two plans: a step that adds to gradients which exist already (gradient
    accumulation) holds them twice while its backward runs. It gets a plan of its own if the
    first one leaves no room for that.
    """

    def __init__(
        self, model: nn.Module, options: Options, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Prepare to compile the model's call; nothing is compiled yet."""
        self.model = weakref.ref(model)
        self._options = options
        self.optimizers = StepOptimizers(self._parameters, optimizer)
        self._sharing = Sharing()
        self._planned_state_nbytes = 0  # of optimizers, as the latest plan counts it
        self._here = threading.local()  # inputs of the call in progress: they are resident
        self._given: list[weakref.ref[torch.Tensor]] = []  # to calls of the step
        self._planning = threading.RLock()
        self._variants: list[_Variant] = []
        self._current: _Variant
        self._forward = type(model).forward
        self._start_anew(model)
        self._compiled_without: set[str] = set()  # kinds of global hooks that were absent

    @property
    def session(self) -> Session:
        """The session of the latest training call."""
        return self._current.session

    @torch.compiler.disable(recursive=False)  # within an outer torch.compile, a graph of its own
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the model: compiled in training, as it is otherwise."""
        model = self._model()
        if not torch.is_grad_enabled():
            with self.session.steps.during_inference():
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
        with self._planning:
            current = self._begin(model, (args, kwargs))
            if not current.session.steps.is_planned:  # others that call meanwhile wait for the plan
                return self._run(current, args, kwargs)
        return self._run(current, args, kwargs)

    def _begin(self, model: nn.Module, inputs: object) -> _Variant:
        """A call begins: the plan that it runs under."""
        if type(model).forward is not self._forward:  # Dynamo has no guard for that
            self._start_anew(model)
        if not self.session.steps.is_open:  # else its backward is to come: it is the same step
            self._given = []
            self._current = self._variant_for(model)
        self._sharing.note_call(model)
        self._given += [weakref.ref(tensor) for tensor in tensors_in(inputs)]
        self.session.steps.begin()
        return self._current

    def _run(self, current: _Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._model()
        self._here.inputs = (args, kwargs)
        token = _is_own_compile.set(True)
        try:
            with (
                _torch.compiling_steps(2 * MANY_COMPILES),
                eager_recurrent_layers(model, current.session.steps.leave_layer_eager),
            ):
                output = current.compiled(*args, **kwargs)
        finally:
            _is_own_compile.reset(token)
            self._here.inputs = None
        self._tell_if_nothing_was_planned(current.session)
        if current.session.steps.is_planned:
            current.session.steps.note_end(tensors_in(output))
        else:
            self._note_eager(current.session, output)
        self._measure_where_free(current)
        return output

    # --- what a step holds ----------------------------------------------------------------------

    def resident(self, device: torch.device, inputs: object) -> Resident:
        """Bytes that a step on these inputs holds whatever the plan."""
        first, *others = self.optimizers.known or [None]
        found = spread_out(resident_of(self._model(), inputs, first, device), self._spread(device))
        more_nbytes = storages_nbytes(state_of(others), device)
        self._planned_state_nbytes = found.parts.optimizer_nbytes + more_nbytes
        return replace(
            found, parts=replace(found.parts, optimizer_nbytes=self._planned_state_nbytes)
        )

    def leaves(self) -> list[torch.Tensor]:
        """See `Present`."""
        model = self._model()
        given = (tensor for reference in self._given if (tensor := reference()) is not None)
        return [*model.parameters(), *_torch.sharded_tensors(model), *model.buffers(), *given]

    def expected_nbytes(self, device: torch.device) -> int:
        """See `Present`."""
        state_nbytes = self._planned_state_nbytes - self._state_nbytes(device)
        return max(0, state_nbytes) + self.spread.unseen_nbytes

    @property
    def spread(self) -> Spread:
        """See `Present`."""
        return self._spread(self.session.steps.device)

    def _spread(self, device: torch.device) -> Spread:
        return self._sharing.now(self._model(), device)

    def _state_nbytes(self, device: torch.device) -> int:
        return storages_nbytes(state_of(self.optimizers.known), device)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step: its state may be there for the first time."""
        if self.model() is None or not self.optimizers.has_new_state(optimizer):
            return
        session = self.session
        if not session.steps.is_planned and not session.told.fallbacks and self._model().training:
            session.told.fall_back("AR114", kind=type(self._model()).__name__)
        grown_nbytes = self._state_nbytes(session.steps.device) - self._planned_state_nbytes
        session.steps.surroundings.note_resident(max(0, grown_nbytes))

    def _parameters(self) -> Iterable[nn.Parameter]:
        model = self.model()
        return () if model is None else model.parameters()

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None, "a call comes from the module itself"
        return model

    def _start_anew(self, model: nn.Module) -> None:
        """Plan at the next call, as if there had been none."""
        self._forward = type(model).forward
        self._variants = []
        self._current = self._new_variant(model)
        self._variants.append(self._current)

    def _new_variant(self, model: nn.Module) -> _Variant:
        # Code that Dynamo has compiled holds the session. It may not hold the model in turn: no
        # garbage collector looks into code.
        itself = weakref.ref(self)

        def resident(device: torch.device) -> Resident:
            call = itself()
            assert call is not None, "only its calls compile"
            return call.resident(device, call._here.inputs)

        # Once training runs, a step that cannot be kept within the budget is warned of, not ended.
        steps = Steps(
            self._options,
            present=lambda: call if (call := itself()) and call.model() is not None else None,
            replans=REPLANS,
            is_told=True,
        )
        session = Session(steps, resident, refuses=not self._variants)
        return _variant(model, session)

    def _variant_for(self, model: nn.Module) -> _Variant:
        """The first plan that leaves room for the gradients that exist now."""
        gradient_nbytes = _gradient_nbytes(model)
        self._share_budgets(model)
        for variant in self._variants:
            steps = variant.session.steps
            if not steps.is_planned:
                variant.gradient_nbytes = gradient_nbytes
                return variant
            more_nbytes = gradient_nbytes - variant.gradient_nbytes
            if more_nbytes <= max(0, steps.budget_nbytes - steps.peak_nbytes):
                return variant
        self._variants.append(self._new_variant(model))
        return self._variants[-1]

    def _share_budgets(self, model: nn.Module) -> None:
        """Plan steps anew whose graphs, planned one after the other, do not fit together."""
        for number, variant in enumerate(self._variants):
            session = variant.session.replanned()
            if session is not None:
                self._variants[number] = _variant(model, session)

    def _global_hooks_came_later(self) -> bool:
        """Whether all modules have hooks that code compiled earlier does not run.

        Dynamo guards such hooks where there are some, and not where there are none.
        """
        present = _torch.kinds_of_global_hooks()
        if any(present[kind] for kind in self._compiled_without):
            return True
        self._compiled_without.update(kind for kind in present if not present[kind])
        return False

    def _note_eager(self, session: Session, output: Any) -> None:
        device = next(self._model().parameters()).device
        session.steps.note_eager_call(tensors_in(output), device)

    def _tell_if_nothing_was_planned(self, session: Session) -> None:
        if session.steps.is_planned or session.told.fallbacks:
            return
        if any(parameter.requires_grad for parameter in self._model().parameters()):
            session.told.fall_back("AR105")

    def _measure_where_free(self, variant: _Variant) -> None:
        """On CUDA the allocator counts by itself: the second step's peak is read at the third."""
        device = variant.session.steps.device
        if device.type != "cuda" or variant.calls > 2:
            return
        variant.calls += 1
        if variant.calls == 2:
            torch.cuda.reset_peak_memory_stats(device)
        elif variant.calls == 3:
            variant.session.note_measured(torch.cuda.max_memory_allocated(device))


def _variant(model: nn.Module, session: Session) -> _Variant:
    compiled = _torch.compile_apart(with_own_code(_torch.own_call(model)), session.compile)
    return _Variant(session, compiled, _gradient_nbytes(model))


# Where an optimised part of an optimised model is one with the whole.
_is_own_compile: ContextVar[bool] = ContextVar("is_own_compile", default=False)


@functools.cache
def _keep_plans_in_outer_compiles() -> None:
    """Let Dynamo stop at optimised modules; once, and not before there are any."""
    _torch.stop_at(
        lambda module: (
            isinstance(_torch.compiled_call(module), OptimizedCall) and not _is_own_compile.get()
        )
    )


def _gradient_nbytes(model: nn.Module) -> int:
    """Of the gradients that exist; of sparse ones, what they hold."""
    found = gradients_of([*model.parameters(), *_torch.sharded_tensors(model)])
    return storages_nbytes(found, found[0].device) if found else 0


def optimize(
    model: nn.Module,
    budget: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    plan: str | Path | None = None,
    dropout: str | None = None,
    time_limit: float = 30.0,
    strict: bool = False,
    verbose: bool = True,
) -> nn.Module:
    """Keep the peak of every training step of a model within a budget.

    The module is compiled in place, as `nn.Module.compile` does: it keeps its class, parameters,
    `state_dict` keys and mode. The plan is made at the first training call.

    Args:
        model: the module to train, on one device.
        budget: peak of everything the step holds on the device: "40GB" (10^9 bytes), "40GiB"
            (2^30), a number of bytes, or "80%" of the device's memory. With a fixed policy or a
            stored plan it may be left out: then it is the device's memory.
        optimizer: with it, its state counts as well, that which its first step creates included;
            it may be wrapped, as accelerate and Lightning do.
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
        strict: raise where a graph cannot be planned, instead of a warning and torch's plan.
        verbose: show progress and one summary line.

    Returns:
        The same module.

    Raises:
        ValueError: for a malformed budget, compiler, dropout or policy, for patterns that no
            module matches, and for an optimizer none of whose parameters is the model's.
        TypeError: if `model` is not a module, or `optimizer` no optimizer.
        OSError: if the stored plan cannot be read.
        FallbackError: with `strict`, if the model cannot be planned as it is.

    The first training call raises `InfeasibleBudget` if no plan fits, `OverBudget` if the policy
    or the stored plan does not, `PlanMismatch` if the stored plan is another model's, and
    `SteeringError` if an operator of `save` or `recompute` does not occur.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, not {type(model).__name__}.")
    require_optimizer_of(model, optimizer)
    options = Options.parse(
        budget=budget,
        compiler=compiler,
        policy=policy,
        save=save,
        recompute=recompute,
        plan=plan,
        dropout=dropout,
        time_limit=time_limit,
        strict=strict,
        verbose=verbose,
    ).of(model)
    call = OptimizedCall(model, options, optimizer)
    obstacle = _obstacle(model)
    if obstacle is not None:
        if strict:
            raise FallbackError.of(obstacle)
        warnings.warn(obstacle, stacklevel=2)
        if obstacle.code in _NEVER_PLANNED:
            return model
    _torch.set_compiled_call(model, call)
    _keep_plans_in_outer_compiles()
    watch_optimizers(call)
    return model


def _obstacle(model: nn.Module) -> FallbackWarning | None:
    """Why a model cannot be planned as it is; None if it can."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return fallback("AR201")
    devices = sorted({str(p.device) for p in (*model.parameters(), *model.buffers())})
    accelerators = [name for name in devices if not name.startswith("cpu")]
    if len(accelerators) > 1 or (accelerators and "cpu" in devices):
        return fallback("AR202", devices=", ".join(devices))
    if not model.training:
        return fallback("AR203")
    return None


def report(model: nn.Module) -> Report:
    """What was planned for an optimised model.

    Raises:
        ValueError: if the model was not optimised, or has not run a training step yet.
    """
    call = optimized_call(model)
    if not call.session.steps.is_planned and not call.session.told.fallbacks:
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    return call.session.report()


def save_plan(model: nn.Module, path: str | Path) -> None:
    """Store what was planned for an optimised model, for `optimize(model, plan=path)`.

    What the path holds is replaced.

    Raises:
        ValueError: if the model was not optimised, or nothing is planned.
        OSError: if the path cannot be written.
    """
    stored = optimized_call(model).session.stored_plan()
    if not stored.graphs:
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    write(stored, path)


def optimized_call(model: nn.Module) -> OptimizedCall:
    """What runs when an optimised model is called.

    Raises:
        ValueError: if the model was not optimised.
    """
    call = _torch.compiled_call(model)
    if not isinstance(call, OptimizedCall):
        raise ValueError("The model was not optimised: call autoremat.optimize(model, budget).")
    return call
