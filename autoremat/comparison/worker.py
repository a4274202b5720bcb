"""The process that measures one variant of a target's step.

Enters: a `Task` as JSON in the last argument. Leaves: what `serve` sends: a row's figures, then
seconds of steps. Guarantees: model and batch are made anew here, so nothing of another variant is
in memory; what the variant raises is a row with a status.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import autoremat
from autoremat import _torch
from autoremat.comparison.layers import NotApplicable, checkpoint_layers
from autoremat.comparison.serve import Step, seconds, serve
from autoremat.comparison.variants import Task, Variant
from autoremat.errors import InfeasibleBudget
from autoremat.memory.meter import cuda_peaks
from autoremat.session.replans import usual_steps
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.hf import load
from autoremat.targets.target import Target, TargetError, last_line
from autoremat.units import format_nbytes, format_nbytes_apart

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")

Figures = dict[str, Any]


@dataclass(frozen=True)
class _Prepared:
    """A target's step as a variant runs it."""

    target: Target
    step: Step
    budget_nbytes: int | None

    @property
    def device(self) -> torch.device:
        model = self.target.model
        return next((t.device for t in model.parameters()), torch.device("cpu"))

    @property
    def batch(self) -> tuple[Any, Any]:
        return self.target.inputs, self.target.keywords

    def resident_nbytes(self) -> int:
        self.target.model.zero_grad(set_to_none=True)
        return autoremat.resident_nbytes(self.target.model, self.batch)


def main() -> None:
    """Measure the task of the command line."""
    data = json.loads(sys.argv[-1])
    task = Task(**{**data, "variant": Variant(**data["variant"])})
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    serve(lambda: measure(task))


def measure(task: Task) -> tuple[Figures, Callable[[], float] | None]:
    """The figures of a variant and what times one step; nothing where it has none."""
    try:
        return _measured(task)
    except TargetError as error:
        return {"status": "bad target", "message": str(error)}, None
    except NotApplicable as error:
        return {"status": "not applicable", "message": str(error)}, None
    except InfeasibleBudget as error:
        return _infeasible(error), None
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            words in str(error) for words in _OUT_OF_MEMORY
        )
        status = "out of memory" if is_memory else "failed"
        return {"status": status, "message": last_line(error)}, None


def _measured(task: Task) -> tuple[Figures, Callable[[], float] | None]:
    variant = task.variant
    prepared = _prepared(task, task.budget_nbytes)
    model = prepared.target.model
    figures: Figures = {
        "status": "ok",
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "batch": _batch_size(prepared.target),
        "device": _device_name(prepared.device),
        "torch_version": torch.__version__,
    }
    with _compiling(variant):
        figures["first_step_seconds"] = seconds(prepared.step)
        for _ in range(usual_steps(prepared.device)):  # they may be planned anew
            prepared.step()
    resident = prepared.resident_nbytes()
    prepared.target.model.zero_grad(set_to_none=True)
    own = cuda_peaks(prepared.step, prepared.device)
    if own is None:
        peak = resident + autoremat.measure_peak(prepared.step, device=prepared.device)
    else:
        peak, figures["reserved_nbytes"] = own.allocated_nbytes, own.reserved_nbytes
    figures |= {"resident_nbytes": resident, "peak_nbytes": peak}
    if variant.kind == "autoremat":
        figures |= _plan_figures(model, peak)
    return figures, partial(_timed, prepared)


def _prepared(task: Task, budget_nbytes: int | None) -> _Prepared:
    """The target with its model wrapped, compiled or about to be, as the variant says."""
    variant = task.variant
    if variant.kind == "autoremat" and budget_nbytes is None:
        budget_nbytes = _smallest_budget(task)
    target = load(TargetArguments.from_text(task.target))
    model = target.model
    if variant.kind == "checkpoint":
        checkpoint_layers(
            model,
            lambda: model(*target.inputs, **target.keywords),
            segment=variant.segment,
            selective=variant.selective,
        )
    if variant.kind == "autoremat":
        assert budget_nbytes is not None
        autoremat.optimize(
            model,
            budget_nbytes,
            compiler=variant.compiler,
            time_limit=task.time_limit,
            verbose=False,
        )
    elif variant.compiler == "inductor":
        model.compile()
    return _Prepared(target, _training_step(target), budget_nbytes)


def _smallest_budget(task: Task) -> int:
    """Ask for what is resident; the refusal names the smallest budget that has a plan.

    Less than that would be refused without a search, by a refusal that says what is resident.
    """
    below = _refusal(task, 1)
    if below is None:  # Nothing was planned, so nothing is refused: the row will say so.
        return 1
    searched = _refusal(task, below.resident_nbytes)
    return (searched or below).smallest_peak_nbytes


def _refusal(task: Task, budget_nbytes: int) -> InfeasibleBudget | None:
    """The error of a budget that no plan fits; None if it is accepted."""
    prepared = _prepared(task, budget_nbytes)
    try:
        prepared.step()
    except InfeasibleBudget as error:
        return error
    finally:
        del prepared
        torch.compiler.reset()
        gc.collect()
    return None


def _training_step(target: Target) -> Callable[[], torch.Tensor]:
    """Forward and backward, from no gradients, as a training loop writes them."""

    def step() -> torch.Tensor:
        target.model.zero_grad(set_to_none=True)
        output = target.model(*target.inputs, **target.keywords)
        loss = target.loss(output)
        loss.backward()
        return loss.detach()

    return step


def _timed(prepared: _Prepared) -> float:
    """Seconds of one step; on an accelerator its memory goes back, for the others' steps."""
    if prepared.device.type != "cuda":
        return seconds(prepared.step)
    prepared.step()  # takes the memory from the driver, which takes time
    taken = seconds(prepared.step)
    prepared.target.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return taken


def _compiling(variant: Variant) -> AbstractContextManager[None]:
    """Torch's own memory budget, while the graphs compile."""
    if variant.setting is None:
        return nullcontext()
    return _torch.activation_memory_budget(variant.setting)


def _plan_figures(model: nn.Module, peak_nbytes: int) -> Figures:
    report = autoremat.report(model)
    notes = [str(fallback) for fallback in report.fallbacks]
    if not report.graphs:
        notes.insert(0, "nothing was planned, so no budget is kept")
        return {"message": "; ".join(notes)}
    if peak_nbytes > report.budget_nbytes:
        measured, budget = format_nbytes_apart(peak_nbytes, report.budget_nbytes)
        notes.insert(0, f"measured {measured}, above the budget {budget}")
    return {
        "message": "; ".join(notes),
        "budget_nbytes": report.budget_nbytes,
        "predicted_peak_nbytes": report.predicted_peak_nbytes,
    }


def _infeasible(error: InfeasibleBudget) -> Figures:
    budget, smallest = format_nbytes_apart(error.budget_nbytes, error.smallest_peak_nbytes)
    return {
        "status": "infeasible",
        "message": f"no plan fits {budget}; the smallest peak is {smallest} "
        f"({error.smallest_peak_nbytes} bytes), of which "
        f"{format_nbytes(error.resident_nbytes)} are resident",
        "budget_nbytes": error.budget_nbytes,
        "smallest_peak_nbytes": error.smallest_peak_nbytes,
        "resident_nbytes": error.resident_nbytes,
    }


def _batch_size(target: Target) -> int:
    first = next(iter((*target.inputs, *target.keywords.values())), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
