"""One process that measures one point: a model, a variant, a budget.

Started by `benchmarks.py` with the point as JSON in its last argument. Leaves JSON lines on its
standard output: first the row (peak, gradients, buffers, the plan's figures), then, for each line
`step` on its standard input, the seconds of one training step. A process for each point keeps
Dynamo's state and the allocator's figures apart, and lets a crash cost one row only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from benchmark_models import MODELS
from benchmark_sac_ilp import NoPlan, checkpoint_as_decided
from own_process import forget_plans
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.comparison.layers import checkpoint_layers
from autoremat.comparison.serve import seconds, serve
from tests.models import Case

SEED = 1234
WARM_UPS = 2
UNBOUNDED = 2**50  # bytes: a budget under which nothing has to be recomputed
FINITE_DIFFERENCE_STEP = 1e-2


@dataclass(frozen=True)
class Point:
    """What one worker measures."""

    model: str
    compiler: str
    """`eager` (op by op) or `inductor`."""
    variant: str
    """`plain`, `checkpoint`, `selective`, `sac_ilp` or `torch budget` (with their `setting`), or
    `autoremat` (`budget`)."""
    setting: float | None = None
    """torch's `activation_memory_budget`; the share of the peak that `sac_ilp` was asked for; for
    autoremat the share of eager's peak in percent."""
    budget_nbytes: int | None = None
    """The budget, resident included; None with `autoremat` asks for the smallest feasible one."""
    time_limit: float = 30.0
    beside: str | None = None
    """Key of the row whose measured peak is the budget."""

    @property
    def key(self) -> str:
        """A name that is unique within a run."""
        parts = [self.model, self.compiler, self.variant]
        if self.beside is not None:
            parts.append("at " + "/".join(self.beside.split("/")[2:]))
        elif self.variant == "autoremat":
            parts.append("smallest" if self.setting is None else f"{self.setting:g}")
        elif self.setting is not None:
            parts.append(f"{self.setting:g}")
        return "/".join(parts)


def main() -> None:
    """Measure the point, then serve timed steps until standard input closes."""
    torch.set_num_threads(1)
    forget_plans()
    point = Point(**json.loads(sys.argv[-1]))

    def measured() -> tuple[dict[str, Any], Callable[[], float] | None]:
        row, step = measure_point(point)
        timed = None if step is None else partial(seconds, step)
        return {**asdict(point), "key": point.key, **row}, timed

    serve(measured)


def measure_point(point: Point) -> tuple[dict[str, Any], Callable[[], Tensor] | None]:
    """Return the row of a point and its training step (None where the budget is infeasible)."""
    eager = _reference(MODELS[point.model]())
    unplanned = None
    if point.variant == "autoremat" and point.compiler == "eager":
        unplanned = _result(_planned(point, UNBOUNDED))
        torch.compiler.reset()
    budget = point.budget_nbytes
    if point.variant == "autoremat" and budget is None:
        budget = _smallest_feasible(point)
        torch.compiler.reset()

    try:
        case = prepare(point, budget)
    except NoPlan as error:
        return {"status": "no peer", "message": str(error)}, None
    step = training_step(case)
    with _settings(point):
        started = time.perf_counter()
        try:
            step()
        except autoremat.InfeasibleBudget as error:
            return {"status": "infeasible", **_budget_row(point, budget, error)}, None
        first = time.perf_counter() - started
        for _ in range(WARM_UPS - 1):
            step()
    row: dict[str, Any] = {"status": "ok", "first_step_seconds": first}
    row |= _memory_row(case, step)
    row |= _gradient_row(case, point, eager, unplanned)
    if case.dropout:
        row["finite_difference_error"] = finite_difference_error(case, step)
    if point.variant == "autoremat":
        row |= _plan_row(case.model, budget)
        if case.batch_norm:
            row |= _float64_row(point)
    return row, step


def prepare(point: Point, budget_nbytes: int | None) -> Case:
    """The case of a point with its model compiled, or about to be, as the variant says."""
    if point.variant == "autoremat":
        assert budget_nbytes is not None
        return _planned(point, budget_nbytes)
    if point.variant == "sac_ilp":
        assert point.setting is not None
        return checkpoint_as_decided(MODELS[point.model], point.setting)
    case = MODELS[point.model]()
    if point.variant in ("checkpoint", "selective"):
        selective = point.variant == "selective"
        checkpoint_layers(case.model, case.step, selective=selective)
    if point.compiler == "inductor":
        case.model.compile()
    return case


def training_step(case: Case) -> Callable[[], Tensor]:
    """A step that draws the same random numbers and creates its gradients anew each time."""

    def step() -> Tensor:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        return case.step()

    return step


def finite_difference_error(case: Case, step: Callable[[], Tensor]) -> float:
    """Relative error of the gradient's length against the loss's slope along it, one seed.

    With the same dropout mask in forward and backward the two agree up to curvature and rounding;
    with another mask in the backward they differ by tens of percent.
    """
    step()
    parameters = [p for p in case.model.parameters() if p.grad is not None]
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    length = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()

    def loss_at(distance: float) -> float:
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(g, alpha=distance / length)
        loss = step().item()
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(g, alpha=distance / length)
        return loss

    h = FINITE_DIFFERENCE_STEP
    slope = (loss_at(h) - loss_at(-h)) / (2 * h)
    return abs(slope - length) / length


def _planned(point: Point, budget_nbytes: int) -> Case:
    return _optimize(MODELS[point.model](), point, budget_nbytes)


def _optimize(case: Case, point: Point, budget_nbytes: int) -> Case:
    autoremat.optimize(
        case.model,
        budget=budget_nbytes,
        compiler=point.compiler,
        time_limit=point.time_limit,
        verbose=False,
    )
    return case


def _smallest_feasible(point: Point) -> int:
    """Ask for next to nothing; the refusal names the smallest budget that has a plan."""
    case = _planned(point, _resident(MODELS[point.model]()) + 1)
    try:
        training_step(case)()
    except autoremat.InfeasibleBudget as error:
        return int(error.smallest_peak_nbytes)
    raise AssertionError("a budget of one byte above what is resident was accepted")


def _result(case: Case) -> dict[str, Tensor]:
    """Loss, gradients and buffers after one step from the initial state."""
    loss = training_step(case)()
    return {
        "loss": loss,
        **{f"grad {n}": p.grad for n, p in _named(case.model) if p.grad is not None},
        **{f"buffer {n}": b.clone() for n, b in case.model.named_buffers()},
    }


_reference = _result


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters under their original names, wrapped for checkpointing or not."""
    for name, parameter in model.named_parameters():
        yield name.replace(".wrapped.", "."), parameter


def _resident(case: Case) -> int:
    return int(autoremat.resident_nbytes(case.model, case.inputs))


def _memory_row(case: Case, step: Callable[[], Tensor]) -> dict[str, Any]:
    """Peak above resident of one step that starts without gradients."""
    gradients = sum(p.grad.nbytes for p in case.model.parameters() if p.grad is not None)
    case.model.zero_grad(set_to_none=True)
    return {
        "resident_nbytes": _resident(case),
        "peak_nbytes": int(autoremat.measure_peak(step, device=torch.device("cpu"))),
        "gradient_nbytes": gradients,
    }


def _gradient_row(
    case: Case, point: Point, eager: dict[str, Tensor], unplanned: dict[str, Tensor] | None
) -> dict[str, Any]:
    """One step from the initial state against eager, and against the same graph unplanned."""
    with torch.no_grad():  # undo what the warm-up did to buffers
        for name, buffer in MODELS[point.model]().model.named_buffers():
            _buffer(case.model, name).copy_(buffer)
    got = _result(case)
    got = {name.replace(".wrapped.", "."): value for name, value in got.items()}
    row: dict[str, Any] = {
        "gradient_error": _error(got, eager, "grad "),
        "buffer_error": _error(got, eager, "buffer "),
    }
    if unplanned is not None:
        row["bitwise"] = all(torch.equal(got[name], unplanned[name]) for name in unplanned)
    return row


def _buffer(model: nn.Module, name: str) -> Tensor:
    """The buffer of that name, looked through the wrappers of checkpointed layers."""
    return {n.replace(".wrapped.", "."): b for n, b in model.named_buffers()}[name]


def _error(got: dict[str, Tensor], want: dict[str, Tensor], prefix: str) -> float | None:
    """Largest absolute error over the largest reference, over all tensors of a kind."""
    names = [n for n, t in want.items() if n.startswith(prefix) and t.is_floating_point()]
    if not names:
        return None
    scale = max(want[n].abs().max().item() for n in names)
    return max((got[n] - want[n]).abs().max().item() for n in names) / scale


def _float64_row(point: Point) -> dict[str, Any]:
    """Gradients and buffers of a small batch in float64.

    Planned for the same share of its eager peak, or the smallest feasible one above it.
    """

    def make() -> Case:
        return MODELS[point.model](batch=8, size=96, dtype=torch.float64)

    case = make()
    resident, step = _resident(case), training_step(case)
    peak = int(autoremat.measure_peak(step, device=torch.device("cpu")))
    want = _result(make())
    budget = resident + max(1, int(peak * (point.setting or 0.0) / 100))
    torch.compiler.reset()
    try:
        got = _result(_optimize(make(), point, budget))
    except autoremat.InfeasibleBudget as error:
        torch.compiler.reset()
        got = _result(_optimize(make(), point, int(error.smallest_peak_nbytes)))
    return {
        "gradient_error_float64": _error(got, want, "grad "),
        "buffer_error_float64": _error(got, want, "buffer "),
    }


def _plan_row(model: nn.Module, budget_nbytes: int | None) -> dict[str, Any]:
    report = autoremat.report(model)
    names = ["predicted_peak_nbytes", "predicted_time_us", "baseline_time_us", "gap", "status"]
    fields = {name: getattr(report, name) for name in [*names, "method", "solve_seconds"]}
    fields["plan_status"] = str(fields.pop("status"))
    return {**fields, "code_times_us": report.code_times_us, "budget_nbytes": budget_nbytes}


def _budget_row(point: Point, budget_nbytes: int | None, error: Any) -> dict[str, Any]:
    return {
        "budget_nbytes": budget_nbytes,
        "resident_nbytes": _resident(MODELS[point.model]()),
        "smallest_peak_nbytes": error.smallest_peak_nbytes,
        "floor_nbytes": error.floor_nbytes,
    }


def _settings(point: Point) -> AbstractContextManager[None]:
    """Set torch's own `activation_memory_budget` while the graphs compile."""
    if point.variant != "torch budget":
        return nullcontext()
    assert point.setting is not None
    return _torch.activation_memory_budget(point.setting)


if __name__ == "__main__":
    main()
