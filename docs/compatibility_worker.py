"""One architecture in one process: a training step in eager mode and ours, compared.

Enters: a `Job`. Leaves: a row of plain values. `compatibility.py` runs it in a process of its own,
so that a crash costs one row only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from compatibility_zoo import ZOO
from torch import Tensor, nn

import autoremat
from autoremat import _torch

SEED = 1234
SHARE = 0.6
UNBOUNDED = 2**50  # bytes: a budget under which nothing has to be recomputed
CPU = torch.device("cpu")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process does."""

    name: str
    compiler: str
    """`eager` (op by op) or `inductor`."""
    time_limit: float
    """Of the solver, in seconds."""

    @property
    def key(self) -> str:
        """A name that is unique within the page."""
        return f"{self.name}/{self.compiler}"


def row_of(job: Job) -> Row:
    """Everything that the page says of an architecture under a compiler."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    eager_peak_nbytes, resident_nbytes = _eager(job)
    budget_nbytes = resident_nbytes + int(SHARE * (eager_peak_nbytes - resident_nbytes))
    row: Row = {"resident_nbytes": resident_nbytes, "eager_peak_nbytes": eager_peak_nbytes}
    try:
        planned = _planned(job, budget_nbytes)
    except autoremat.InfeasibleBudget as error:
        row |= {"asked_nbytes": budget_nbytes, "floor_nbytes": error.floor_nbytes}
        planned = _planned(job, error.smallest_peak_nbytes)
    return {**row, **planned, "seconds": time.perf_counter() - started}


def _eager(job: Job) -> tuple[int, int]:
    """Peak of a step in eager mode, resident bytes included, and the resident bytes."""
    model, batch = ZOO[job.name].build()
    step = _step(job, model, batch)
    step()  # lazy state of libraries and of the model
    model.zero_grad(set_to_none=True)
    resident_nbytes = autoremat.resident_nbytes(model, batch)
    return resident_nbytes + autoremat.measure_peak(step, device=CPU), resident_nbytes


def _planned(job: Job, budget_nbytes: int) -> Row:
    """What our step gives under a budget.

    Raises:
        InfeasibleBudget: if no plan fits.
    """
    model, batch = _optimized(job, budget_nbytes)
    _torch.dynamo_counters.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(job, model, batch)()
        graphs = _torch.dynamo_counters["stats"]["unique_graphs"]
        found = _torch.dynamo_counters["graph_break"]
        breaks = {_reason(text): count for text, count in found.items()}
        planned_graphs = len(autoremat.report(model).graphs)
        verified = autoremat.verify(model, loss_fn=ZOO[job.name].loss, seed=SEED, **batch)
    report = autoremat.report(model)
    recomputed = sum(value.action == "recompute" for value in report.values)
    row: Row = {
        "graphs": graphs,
        "planned_graphs": planned_graphs,
        "breaks": breaks,
        "fallbacks": [str(fallback) for fallback in report.fallbacks],
        "warnings": sorted({_warning(entry) for entry in caught if _is_ours(entry)}),
        "recomputed": recomputed,
        "budget_nbytes": budget_nbytes,
        "predicted_nbytes": verified.predicted_peak_nbytes,
        "measured_nbytes": verified.measured_peak_nbytes,
        "loss_error": verified.loss_error,
        "gradient_error": verified.gradient_error,
        "buffer_error": verified.buffer_error,
        "worst_gradient": verified.worst_gradient,
        "tolerance": verified.tolerance,
        "reference": verified.reference,
        "solve_seconds": report.solve_seconds,
    }
    if job.compiler == "eager" and planned_graphs:
        row["bitwise"] = _is_bitwise(job, model, batch)
    return row


def _is_bitwise(job: Job, model: nn.Module, batch: dict[str, Any]) -> bool:
    """Whether the planned step gives the bits of the same graphs without recompute.

    Some models have other graphs when they are traced once more, as they are if the first plans do
    not fit together: what they do at their first call only ends graphs.
    """
    ours = _gradients(job, model, batch)
    torch.compiler.reset()
    plain, _ = _optimized(job, UNBOUNDED)
    if _are_equal(ours, _gradients(job, plain, batch)):
        return True
    torch.compiler.reset()
    autoremat.optimize(plain, UNBOUNDED, compiler=job.compiler, verbose=False)
    return _are_equal(ours, _gradients(job, plain, batch))


def _are_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


def _gradients(job: Job, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    _restore_buffers(model)
    loss = _step(job, model, batch)()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, **found}


def _restore_buffers(model: nn.Module) -> None:
    """Take back what steps have written to running statistics, which gradients may depend on."""
    for module in model.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()


def _optimized(job: Job, budget_nbytes: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.compiler.reset()
    model, batch = ZOO[job.name].build()
    autoremat.optimize(
        model, budget_nbytes, compiler=job.compiler, time_limit=job.time_limit, verbose=False
    )
    return model, batch


def _step(job: Job, model: nn.Module, batch: dict[str, Any]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss = ZOO[job.name].loss(model(**batch))
        loss.backward()
        return loss.detach()

    return step


def _is_ours(entry: warnings.WarningMessage) -> bool:
    return issubclass(entry.category, (autoremat.FallbackWarning, autoremat.OverBudgetWarning))


def _warning(entry: warnings.WarningMessage) -> str:
    return f"{entry.category.__name__}: {entry.message}"


def _reason(text: str) -> str:
    """Dynamo's reason for a graph break, its first line."""
    return text.strip().splitlines()[0].strip()
