"""One model at one share of its peak: every reading of generated code, beside what was modelled.

Enters: a model's name and a share. Leaves: a row. Nothing is compiled to kernels, nothing is run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from benchmark_models import MODELS, Loss
from own_process import forget_plans

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.reader import Reader

Row = dict[str, Any]
UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Point:
    """A budget for a model.

    Attributes:
        model: a key of `benchmark_models.MODELS`.
        percent: of the unplanned peak above what is resident; 0 for the leanest plan.
        time_limit: of the search, in seconds.
    """

    model: str
    percent: int
    time_limit: float

    @property
    def key(self) -> str:
        """Of its row."""
        return f"{self.model} {self.percent} %" if self.percent else f"{self.model} min"


def row_of(point: Point) -> Row:
    """The budget, the plan that is taken, and what every plan on the way was read to take."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = MODELS[point.model]()
    model = Loss(case).train()
    inputs = case.inputs
    resident = resident_nbytes(model, inputs)
    forget_plans()
    whole = autoremat.plan(model, *inputs, budget=UNBOUNDED, verbose=False)
    unplanned = whole.predicted_peak_nbytes - resident
    readings: list[Row] = []
    known = Reader._choice

    def choice(self: Any, modules: Any, solution: Any, code: Any, **form: bool) -> Any:
        found = known(self, modules, solution, code, **form)
        if found.torchs is None and not solution.method.startswith("torch"):
            modelled = solution.timeline.peak_nbytes - resident
            read = code.peaks.nbytes - resident
            method = solution.method if found.in_order else f"{solution.method}, where read"
            readings.append({"method": method, "modelled": modelled, "read": read})
        return found

    budget: int | str = resident + unplanned * point.percent // 100 if point.percent else "min"
    started = time.process_time()
    row: Row = {"resident_nbytes": resident, "unplanned": unplanned, "readings": readings}
    with mock.patch.object(Reader, "_choice", choice):
        try:
            found = autoremat.plan(
                model, *inputs, budget=budget, verbose=False, time_limit=point.time_limit
            )
        except autoremat.InfeasibleBudget as error:
            row["refused_at"] = error.smallest_peak_nbytes - resident
        else:
            row["peak"] = found.predicted_peak_nbytes - resident
            row["time"] = found.predicted_time_us / found.graphs[0].baseline_time_us
    return {**row, "status": "ok", "processor_seconds": time.process_time() - started}
