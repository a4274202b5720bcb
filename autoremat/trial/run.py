"""The trial: steps of one GPT under budget after budget, predicted and measured.

Enters: a device. Leaves: a `Trial`. Guarantees: a budget that fails costs its own row only; what
one has left in memory is gone before the next.

Peaks of what is reserved, and allocated peaks as torch counts them, are CUDA's; on a CPU they are
None, and all else is measured as on a GPU.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoremat.api import optimize
from autoremat.api import report as report_of
from autoremat.comparison.serve import seconds
from autoremat.cost.machine import free_nbytes
from autoremat.errors import InfeasibleBudget
from autoremat.memory.meter import cuda_peaks, measure_peak, resident_nbytes
from autoremat.offline import plan
from autoremat.progress import Progress
from autoremat.reporting import Report
from autoremat.session.replans import usual_steps
from autoremat.trial.gpt import Sizes, made, sizes_for
from autoremat.trial.model import INFEASIBLE, Row, Trial

UNLIMITED = "unlimited"
SHARES = (75, 50, 35, 25)  # percent of what the step needs above its resident bytes
_UNBOUNDED_NBYTES = 1 << 60
_PEAKS, _ROUNDS = 2, 7  # steps of which peaks are measured, and that are timed


def try_device(
    device: torch.device,
    *,
    sizes: Sizes | None = None,
    compiler: str = "inductor",
    time_limit: float = 10.0,
    verbose: bool = True,
) -> Trial:
    """Five budgets on a 12-layer GPT.

    Args:
        device: "cuda" or "cpu".
        sizes: of the GPT; what the device's free memory has room for, if not given.
        compiler: what runs the planned graphs.
        time_limit: seconds to choose a plan, per budget.
        verbose: show progress.

    Raises:
        ValueError: if there is no room for the GPT.
    """
    began, free = time.monotonic(), free_nbytes(device)
    chosen = sizes_for(free) if sizes is None else sizes
    attempt = _Attempt(device, chosen, compiler, time_limit)
    rows: list[Row] = []
    budgets = [(UNLIMITED, None), *((f"{share}%", share) for share in SHARES)]
    with Progress(verbose) as progress:
        for name, share in budgets:
            progress.stage(f"try {name}")
            progress.advance(len(rows), len(budgets), "budgets")
            rows.append(attempt.row(name, _budget(share, rows)))
    return Trial(
        rows=tuple(rows),
        layers=chosen.layers,
        width=chosen.width,
        tokens=chosen.tokens,
        batch=chosen.batch,
        compiler=compiler,
        versions=_versions(),
        allocator=_allocator(),
        free_nbytes=free,
        seconds=time.monotonic() - began,
    )


def _budget(share: int | None, rows: list[Row]) -> int | None:
    """Of the whole step: a share of what the first row predicts above its resident bytes."""
    if share is None or not rows:
        return None
    peak, resident = rows[0].predicted_peak_nbytes, rows[0].resident_nbytes
    if peak is None or resident is None:
        return None
    return resident + (peak - resident) * share // 100


class _Attempt:
    """How each budget is tried."""

    def __init__(
        self, device: torch.device, sizes: Sizes, compiler: str, time_limit: float
    ) -> None:
        self._device, self._sizes = device, sizes
        self._asked: dict[str, Any] = {
            "compiler": compiler,
            "time_limit": time_limit,
            "verbose": False,
        }

    def row(self, name: str, budget_nbytes: int | None) -> Row:
        """A budget's figures, or what went wrong with it."""
        row = Row(name, budget_nbytes=budget_nbytes)
        if name != UNLIMITED and budget_nbytes is None:
            return replace(row, status="failed", message="The step without a plan did not run.")
        try:
            return self._tried(row, _UNBOUNDED_NBYTES if budget_nbytes is None else budget_nbytes)
        except InfeasibleBudget as error:
            return replace(row, status=INFEASIBLE, message=str(error))
        except Exception as error:  # whatever a new device does, the other rows are of use
            is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            status = "out of memory" if is_memory else "failed"
            return replace(row, status=status, message=f"{type(error).__name__}: {error}")
        finally:
            torch.compiler.reset()
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _tried(self, row: Row, budget: int) -> Row:
        model, tokens = made(self._sizes, self._device)
        expected = plan(model, tokens, budget=budget, device=self._device, **self._asked)
        optimize(model, budget, **self._asked)

        def step() -> Tensor:
            model.zero_grad(set_to_none=True)
            loss: Tensor = model(tokens)
            loss.backward()
            return loss.detach()

        first_step_s = seconds(step)
        for _ in range(usual_steps(self._device)):
            step()
        row = with_peaks(row, model, tokens, step, self._device)
        row = _predicted(row, report_of(model), expected)
        times = [seconds(step) for _ in range(_ROUNDS)]
        return replace(row, step_us=1e6 * statistics.median(times), first_step_s=first_step_s)


def with_peaks(
    row: Row, model: nn.Module, tokens: Tensor, step: Callable[[], Tensor], device: torch.device
) -> Row:
    """The row with what steps of a model have in memory, from no gradients."""
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, tokens)
    own = cuda_peaks(step, device, steps=_PEAKS)
    if own is not None:
        return replace(
            row,
            resident_nbytes=resident,
            beside_nbytes=max(0, own.before_nbytes - resident),
            peak_nbytes=own.allocated_nbytes,
            reserved_nbytes=own.reserved_nbytes,
        )
    peaks = []
    for _ in range(_PEAKS):
        model.zero_grad(set_to_none=True)
        peaks.append(measure_peak(step, device=device))
    return replace(row, resident_nbytes=resident, peak_nbytes=resident + max(peaks))


def _predicted(row: Row, report: Report, expected: Report) -> Row:
    """What the plan said; of what is reserved, the plan of the step that did not run."""
    code = report.code_times_us
    reserved = expected.reserved
    return replace(
        row,
        predicted_peak_nbytes=report.predicted_peak_nbytes,
        predicted_reserved_nbytes=None if reserved is None else reserved.peak_nbytes,
        predicted_us=report.predicted_time_us,
        predicted_code_us=None if code is None else code[1],
        message=" ".join(map(str, report.fallbacks)),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda or "")}
    for name in ("autoremat", "torch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _allocator() -> str:
    """As the environment has it: the newer name counts where both are set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
