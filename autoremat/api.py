"""What users call: `optimize`, `report`, `save_plan`.

Enters: the user's module or several, a budget, perhaps optimizers. Leaves: the same modules, whose
training calls run under a plan. The plan is made at the first training call; calls in `eval` mode
or without gradients run as if autoremat were not there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import Budget as Asked
from autoremat.ask.options import Options
from autoremat.ask.plan_file import write
from autoremat.backend import session_behind, session_of_alike
from autoremat.call_stack import users_level
from autoremat.errors import FallbackError, FallbackWarning
from autoremat.fallbacks import fallback
from autoremat.graph.selectors import Selection
from autoremat.memory.optimizers import require_optimizer_of, watch_optimizers
from autoremat.optimized import (
    CopiedCall,
    OptimizedCall,
    call_of_one,
    call_with_part,
    is_trainable,
    keep_plans_in_outer_compiles,
)
from autoremat.reporting import Report
from autoremat.session.members import as_one
from autoremat.session.session import Session
from autoremat.session.training import Training

# One module, or several that share a budget.
Models = TypeVar("Models", nn.Module, Sequence[nn.Module])
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_NEVER_PLANNED = frozenset({"AR201", "AR202"})  # whatever mode the model is put into later


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


def optimize(
    model: Models,
    budget: str | int | Budget | None = None,
    *,
    optimizer: Optimizers | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    repeatable: Selection = None,
    plan: str | Path | None = None,
    known_plan: str | Path | None = None,
    dropout: str | None = None,
    offload: str | int | None = None,
    time_limit: float = 30.0,
    tune: int = 0,
    sizes: Mapping[str, Any] | str | None = None,
    on_larger: str = "raise",
    goal: str = "time",
    strict: bool = False,
    verbose: bool = True,
) -> Models:
    """Keep the peak of every training step of a model within a budget.

    The module is compiled in place, as `nn.Module.compile` does: it keeps its class, parameters,
    `state_dict` keys and mode. The plan is made at the first training call. A deep copy of the
    module is optimised as the module was, at its own first training call; its optimizer is known
    from the first step on that it makes.

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
        repeatable: collectives and custom operators that may run again, in the same form; without
            it they run once.
        plan: path of a plan that `save_plan` stored, to be applied as it is.
        known_plan: path of such a plan, taken for each graph that it is of and where it fits the
            budget, without a search; others are planned. For runs that are resumed, perhaps
            elsewhere, with another batch or another torch.
        dropout: "replay" draws random numbers again, where that gives those of the first draw;
            "save_masks" draws once and keeps what the backward needs. Without it, "replay" where
            that is known to be safe on the device.
        offload: lets values leave the device and come back before they are read, where that costs
            less than to make them again; what waits elsewhere is not counted in the budget. From a
            GPU to page-locked memory of its host: a size, "24GB", which that may take, or "auto",
            at most 90 % of what is free. From the CPU to files in a folder, "disk:PATH".
        time_limit: seconds to choose a plan, per graph. Under Inductor the code that it would
            generate is read meanwhile; that cannot be cut short, and however late it is, lean
            plans are read until one fits.
        tune: how many of the first steps, 0 or at least 3, may run by other plans that fit, each
            of which is compiled: that of the fastest step stays, and nothing is compiled later.
        sizes: which sizes of the inputs vary, and from where to where: one plan is made for the
            largest, and holds for all. {"batch": (1, 32), "sequence": (128, 4096)} are the first
            two dimensions of every tensor that the model is called with; {"images": {2: (224,
            384)}} is a dimension of one input, by its name. What is smaller than a range runs as
            well. "seen" makes plans for what has been seen, rounded up to powers of two.
        on_larger: "raise" a `SizeError` before a step that is larger than its range, or "plan" it
            as it comes, rounded up.
        goal: "time", or "throughput" to have the report say what the step does per second, what
            more memory would buy and less would cost. The plan is the same: for a batch, the
            fastest step is the one with the most samples per second. Up to three more plans are
            made for it, when the report is asked for; none runs.
        strict: raise where a graph cannot be planned, instead of a warning and torch's plan.
        verbose: show progress and one summary line.

    Returns:
        The same module, or a list of the same modules.

    Raises:
        ValueError: for a malformed budget, compiler, dropout, goal, policy or sizes, for patterns
            that no module matches, for an optimizer none of whose parameters is the model's, and
            for modules that cannot share a budget: none, one twice, a part of another, optimised
            already, on several devices, or under a stored plan, which is one module's.
        TypeError: if `model` is not a module, or `optimizer` no optimizer.
        OSError: if the stored plan cannot be read.
        FallbackError: with `strict`, if the model cannot be planned as it is.

    The first training call raises `InfeasibleBudget` if no plan fits, `OverBudget` if the policy
    or the stored plan does not, `PlanMismatch` if the stored plan is another model's, and
    `SteeringError` if an operator of `save`, `recompute` or `repeatable` does not occur. Where
    several processes train the model in lockstep, it raises on all of them what one of them cannot
    do, and `SteeringError` if they were asked for different plans; `RankError` names who did not
    come.
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
        repeatable=repeatable,
        plan=plan,
        known_plan=known_plan,
        dropout=dropout,
        offload=offload,
        time_limit=time_limit,
        tune=tune,
        sizes=sizes,
        on_larger=on_larger,
        goal=goal,
        strict=strict,
        verbose=verbose,
    )
    training = Training(asked) if shared is None else shared._training_under(asked)
    is_shared = shared is not None or not is_one
    if is_shared and plan is not None:
        raise ValueError("A stored plan is of one module, and not of several that share one.")
    _cover(training, modules, optimizers, is_shared=is_shared, is_helper=shared is not None)
    return returned


def _cover(
    training: Training,
    modules: Sequence[nn.Module],
    optimizers: Sequence[Any] = (),
    *,
    is_shared: bool,
    is_helper: bool,
) -> None:
    """Let the calls of these be planned, if they can be.

    Args:
        training: plans them.
        modules: none of which it plans yet.
        optimizers: of them; None is none.
        is_shared: whether the budget covers others, or may yet.
        is_helper: whether they may have nothing to train.
    """
    for module in modules:
        call = _torch.compiled_call(module) if isinstance(module, nn.Module) else None
        if isinstance(call, CopiedCall):
            call.give_way()  # what was asked for the module that it is a copy of
    if is_shared:
        training.members.require_room_for(modules)
    options = training.asked.of(*modules)
    for given in optimizers:
        require_optimizer_of(as_one(modules), given)
    obstacle = _obstacle(modules, is_helper=is_helper)
    if obstacle is not None:
        if training.asked.setting.strict:
            raise FallbackError.of(obstacle)
        warnings.warn(obstacle, stacklevel=users_level())
        if obstacle.code in _NEVER_PLANNED:
            return
    training.add(modules, [given for given in optimizers if given is not None], options)
    alike = functools.partial(_optimize_alike, training.asked, training if is_shared else None)
    for module in modules:
        OptimizedCall(module, training, alike)
    keep_plans_in_outer_compiles()
    watch_optimizers(training)


def _optimize_alike(asked: Options, shared: Training | None, model: nn.Module) -> None:
    """Optimise a copy of a module as that was: under the budget that it shares, or a like one."""
    is_shared = shared is not None
    _cover(shared or Training(asked), [model], is_shared=is_shared, is_helper=is_shared)


def _modules_in(model: Any) -> list[nn.Module]:
    if isinstance(model, nn.Module):
        return [model]
    if not isinstance(model, Iterable):
        raise TypeError(f"model is an nn.Module or several, not {type(model).__name__}.")
    return list(model)


def _obstacle(modules: Sequence[nn.Module], *, is_helper: bool) -> FallbackWarning | None:
    """Why modules cannot be planned as they are; None if they can."""
    trainable = [module for module in modules if is_trainable(module)]
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

    Where batches are accumulated, steps may run by two plans: it is of the one that takes more.
    Of a block that was compiled by itself, it is the report of all blocks with its options, also if
    it was skipped so far and another one that is like it has run. Of a module in an optimised one,
    or around one, as trainers wrap them, it is that one's.

    Raises:
        ValueError: if the model was not optimised, or has not run a training step yet; and if
            several modules in it or around it were, each for itself, which it names.
    """
    planned: Session | Training | None = None
    if not isinstance(_torch.compiled_call(model), OptimizedCall):
        planned = session_behind(model.parameters()) or session_of_alike(model)
    if planned is None:
        planned = call_with_part(model).training
    found = planned.report()
    if not found.graphs and not found.fallbacks:
        raise ValueError("Nothing is planned yet: that happens at the first training call.")
    return found


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
