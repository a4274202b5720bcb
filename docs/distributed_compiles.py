"""What planning and compiling equal blocks takes, against their number.

Enters: a number of layers and a name of `BUDGETS`. Leaves: a row: compiles, and seconds of the
first steps, of a GPT whose blocks share half of the bytes that the step takes without a plan.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeGuard

import torch
from distributed_models import Decoder, GPTBlock, batch
from own_process import forget_plans

import autoremat
from autoremat.memory.meter import resident_nbytes

LAYERS = (2, 8, 24, 80)
STEPS = 3  # from the next one on nothing is compiled
SHARE = 0.5


def _in_a_list(model: Decoder, budget_nbytes: int, given: dict[str, Any]) -> None:
    autoremat.optimize(list(model.blocks), budget_nbytes, **given)


def _apart(model: Decoder, budget_nbytes: int, given: dict[str, Any]) -> None:
    shared = autoremat.Budget(budget_nbytes)
    for block in model.blocks:
        autoremat.optimize(block, shared, **given)


def _by_backend(model: Decoder, budget_nbytes: int, given: dict[str, Any]) -> None:
    for block in model.blocks:
        block.compile(backend="autoremat", options={"budget": budget_nbytes, **given})


BUDGETS: dict[str, Callable[[Decoder, int, dict[str, Any]], None]] = {
    "one list": _in_a_list,
    "apart, one Budget": _apart,
    "apart, backend": _by_backend,
}


def key(layers: int, budget: str) -> str:
    """Of a row."""
    return f"compiles/{layers}/{budget}"


def serve(layers: int, budget: str, given: dict[str, Any], sender: Connection) -> None:
    """Send the row, measured in this process, which has compiled nothing before."""
    torch.set_num_threads(1)
    forget_plans()
    warnings.simplefilter("ignore", UserWarning)  # of a first step, too: it is planned anew
    torch.manual_seed(0)
    model = Decoder(GPTBlock, layers)
    _seconds_of_step(model)
    plain_seconds, highest_nbytes = _seconds_of_step(model), _peak_nbytes(model)
    budget_nbytes = int(SHARE * highest_nbytes)
    BUDGETS[budget](model, budget_nbytes, {"verbose": False, **given})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        seconds = [_seconds_of_step(model) for _ in range(STEPS)]
    measured_nbytes = _peak_nbytes(model)
    report = autoremat.report(model.blocks[0])
    text = next(fact.text for fact in report.facts if fact.name == "Compiles")
    compiles, latest = map(int, re.findall(r"\d+", text)[:2])
    row = {
        "key": key(layers, budget),
        "status": "ok",
        "layers": layers,
        "shared": budget,
        "compiles": compiles,
        "latest_compile": latest,
        "first_steps_seconds": seconds,
        "plain_seconds": plain_seconds,
        "peak_share": measured_nbytes / budget_nbytes,
        "is_told": any(w.message.is_leanest for w in told if _is_ours(w.message)),
    }
    sender.send(row)


def _is_ours(message: Warning | str) -> TypeGuard[autoremat.OverBudgetWarning]:
    return isinstance(message, autoremat.OverBudgetWarning)


def _seconds_of_step(model: Decoder) -> float:
    begin = time.perf_counter()
    model(*batch(0)).backward()
    seconds = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    return seconds


def _peak_nbytes(model: Decoder) -> int:
    given = batch(0)
    before_nbytes = resident_nbytes(model, given)
    found = before_nbytes + autoremat.measure_peak(lambda: model(*given).backward(), device="cpu")
    model.zero_grad(set_to_none=True)
    return found
