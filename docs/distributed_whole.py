"""What blocks that share a budget recompute, beside a plan for the whole model.

Enters: a name of `MODELS` and a share of `SHARES`. Leaves: a row: bytes and times of a step whose
blocks are compiled by themselves, and of the same step planned as one graph, in one process.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import torch
from distributed_models import batch, make
from own_process import forget_plans
from torch import Tensor, nn

import autoremat
from autoremat.backend import session_behind
from autoremat.memory.meter import resident_nbytes
from autoremat.reporting import GraphReport

SHARES = (75, 50, 40)  # percent of the peak without a plan
STEPS = 4
ROUNDS = 11


def key(model: str, share: int) -> str:
    """Of a row."""
    return f"whole/{model}/{share}"


def points(row: dict[str, Any]) -> float:
    """What blocks recompute more than the whole model does, in percent of a step without a plan."""
    return float(100 * (row["parted_again_us"] - row["whole_again_us"]) / row["plain_us"])


def serve(model: str, share: int, given: dict[str, Any], sender: Connection) -> None:
    """Send the row, measured in this process, which has compiled nothing before."""
    torch.set_num_threads(1)
    forget_plans()
    warnings.simplefilter("ignore", UserWarning)  # of a first step, too: it is planned anew
    data = batch(0)
    plain, whole, parted = make(model), make(model), make(model)
    _step(plain, data)
    budget_nbytes = _peak_nbytes(plain, data) * share // 100
    options = {"budget": budget_nbytes, "verbose": False, **given}
    autoremat.optimize(whole, **options)
    for block in parted.blocks:
        block.compile(backend="autoremat", options=options)
    for _ in range(STEPS):
        _step(whole, data)
        _step(parted, data)
    (graph,) = autoremat.report(whole).graphs
    row = {
        "status": "ok",
        "budget_nbytes": budget_nbytes,
        "whole_nbytes": _peak_nbytes(whole, data),
        "parted_nbytes": _peak_nbytes(parted, data),
        "plain_us": graph.baseline_time_us,
        "whole_again_us": _again_us(graph),
        "parted_again_us": _again_in_runs_us(parted),
        "time_ratio": statistics.median(
            _step(parted, data) / _step(whole, data) for _ in range(ROUNDS)
        ),
    }
    sender.send(row)


def _again_us(graph: GraphReport) -> float:
    """What one run of it recomputes."""
    return float(graph.predicted_time_us - graph.baseline_time_us)


def _again_in_runs_us(model: nn.Module) -> float:
    """What the runs of all graphs recompute."""
    session = session_behind(model.parameters())
    assert session is not None
    runs = Counter(session.steps.graphs.runs)
    return sum(runs[graph.name] * _again_us(graph) for graph in session.report().graphs)


def _step(model: nn.Module, data: tuple[Tensor, ...]) -> float:
    """Its seconds."""
    begin = time.perf_counter()
    model(*data).backward()
    seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    return seconds


def _peak_nbytes(model: nn.Module, data: tuple[Tensor, ...]) -> int:
    before_nbytes = resident_nbytes(model, data)
    peak_nbytes = autoremat.measure_peak(lambda: model(*data).backward(), device="cpu")
    model.zero_grad(set_to_none=True)
    return before_nbytes + peak_nbytes
