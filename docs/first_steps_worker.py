"""The first step of one model in a process of its own, with caches that are its own too.

Enters: a model, how it is compiled, and a folder for all caches. Leaves: a row of what that took.
The first process to be given a folder finds it empty, a second one finds what the first has kept.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmark_models import MODELS, Loss

import autoremat
from autoremat.memory.meter import resident_nbytes

Row = dict[str, Any]
UNBOUNDED = 1 << 40
PLAIN = "torch.compile"


@dataclass(frozen=True)
class Point:
    """A first step.

    Attributes:
        model: a key of `benchmark_models.MODELS`.
        way: `PLAIN`, "min", or a share of the unplanned peak above what is resident, in percent.
        unplanned_nbytes: that peak; 0 where it is to be found out, and nothing is run.
        caches: a folder.
    """

    model: str
    way: str
    unplanned_nbytes: int
    caches: str


def row_of(point: Point) -> Row:
    """Processor seconds, also of compilers that are called, and seconds by the clock."""
    caches = Path(point.caches)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    os.environ["XDG_CACHE_HOME"] = str(caches / "user")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = MODELS[point.model]()
    model, inputs = Loss(case).train(), case.inputs
    resident = resident_nbytes(model, inputs)
    if not point.unplanned_nbytes:
        whole = autoremat.plan(model, *inputs, budget=UNBOUNDED, verbose=False)
        return {"unplanned_nbytes": whole.predicted_peak_nbytes - resident}
    model = _compiled(model, point, resident)
    before, began = _processor_seconds(), time.perf_counter()
    model(*inputs).backward()
    return {
        "processor_seconds": _processor_seconds() - before,
        "seconds": time.perf_counter() - began,
    }


def _compiled(model: torch.nn.Module, point: Point, resident: int) -> Any:
    if point.way == PLAIN:
        return torch.compile(model)
    budget: int | str = "min"
    if point.way != "min":
        budget = resident + point.unplanned_nbytes * int(point.way) // 100
    return autoremat.optimize(model, budget=budget, verbose=False)


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
