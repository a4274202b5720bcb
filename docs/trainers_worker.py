"""One trainer's whole run in a process of its own, without a plan and under a budget.

Enters: the name of a case. Leaves: a row: the highest measured step, the budget, and what else is
told of the run. Weights after it are compared with those of the run without a plan.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch
from trainers_cases import CASES, Meter, Run

import autoremat

Row = dict[str, Any]


def row_of(name: str) -> Row:
    """Train twice, without a plan and with one."""
    torch.set_num_threads(1)
    plain = CASES[name]()
    plain.train()
    unplanned = max(plain.meter.peaks)
    floor = _floor(plain)
    budget = int(floor + plain.share * (unplanned - floor))
    torch.compiler.reset()
    run = CASES[name]()
    report_of_run = run.under(budget)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train()
    report = report_of_run()
    pairs = zip(plain.model.state_dict().values(), run.model.state_dict().values(), strict=True)
    compiles = next(f.text for f in report.facts if f.name == "Compiles")
    return {
        "budget_nbytes": budget,
        "unplanned_nbytes": unplanned,
        "peak_nbytes": max(run.meter.peaks),
        "predicted_nbytes": report.predicted_peak_nbytes,
        "measured_steps": len(run.meter.peaks),
        "compiles": compiles,
        "planning_s": _planning_s(run.meter),
        "weights_differ": max(float((a.float() - b.float()).abs().max()) for a, b in pairs),
        "over_told": sum(issubclass(w.category, autoremat.OverBudgetWarning) for w in told),
        "fallbacks": [fallback.code for fallback in report.fallbacks],
    }


def _floor(run: Run) -> int:
    """What has to be there, in bytes: what is before a step, and the gradients that it makes."""
    trained = (p for p in run.model.parameters() if p.requires_grad)
    return min(run.meter.held) + sum(p.nbytes for p in trained)


def _planning_s(meter: Meter) -> float:
    """Seconds of the steps that take more than twice what is usual, less what is usual."""
    usual = statistics.median(meter.seconds)
    return sum(took - usual for took in meter.seconds if took > 2 * usual)
