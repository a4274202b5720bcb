"""Steps of a size, by a plan for a range of sizes and by one for this very size, taken in turns.

Enters: a case of `varied_batches.py`, optimised for its range, and a size. Leaves: how long its
step takes by that of a model that was planned for the size alone, and the same of code that torch
compiles for sizes that vary, by its code for this size. Guarantees: neither is planned beside the
other: the plan for the size is made in a process of its own, and that for the range stays as it is.
Steps are taken in one process: two of them differ by more than what is looked for.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_process import forget_plans
from torch import Tensor, nn
from varied_batches import CASES, Batch, Size, Varied

import autoremat
from autoremat import _torch
from autoremat.backend import with_own_code
from autoremat.optimized import optimized_call

TIME_LIMIT_S = 2.0
WARM_UP, ROUNDS = 4, 20  # steps before it is timed, and how often
REPEATS = 3  # fresh models beside that for the range: where their memory lies makes a percent
BESIDE = 4  # budgets: what all models hold, since the plan for the size is there already


def optimized(case: Varied, budget: int, compiler: str, **settings: object) -> nn.Module:
    """A fresh model with a budget."""
    return autoremat.optimize(
        case.model(),
        budget,
        compiler=compiler,
        verbose=False,
        time_limit=TIME_LIMIT_S,
        **settings,
    )


def seconds_of(model: nn.Module, batch: Batch) -> float:
    """What a step takes."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    model(*batch).backward()
    return time.perf_counter() - began


class Compiled(nn.Module):
    """A model that torch compiles: Dynamo would take one's code for another of the same class."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.compiled = torch.compile(with_own_code(model), **settings)

    def forward(self, *batch: Tensor) -> Tensor:
        """The loss."""
        return self.compiled(*batch)


class Ratios(NamedTuple):
    """What a step takes by code for sizes that vary, by what it takes by code for its own size.

    Attributes:
        planned: by our plans.
        torchs: without any, compiled by torch alone.
    """

    planned: float
    torchs: float


def over_alone(model: nn.Module, key: str, budget: int, size: Size) -> Ratios:
    """The medians of a step's time over that by a plan for this size, of steps taken in turns.

    Args:
        model: planned for the range of the case; it is not planned anew from now on.
        key: the name of the case, and its compiler if it has one.
        budget: of both plans, in bytes.
        size: of the steps.
    """
    session = optimized_call(model).session
    session.settle = lambda: False  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)  # of both together
        path = Path(folder) / "plan.json"
        process = multiprocessing.get_context("spawn").Process(
            target=_save_plan, args=(key, budget, size, path)
        )
        process.start()
        process.join()
        rounds = [
            seconds for _ in range(REPEATS) for seconds in _rounds(model, key, budget, size, path)
        ]
    planned, torchs = (
        statistics.median(seconds[first] / seconds[first + 1] for seconds in rounds)
        for first in (0, 2)
    )
    return Ratios(planned, torchs)


def _rounds(
    model: nn.Module, key: str, budget: int, size: Size, plan: Path
) -> list[tuple[float, ...]]:
    """Seconds of steps in turns: for the range and for the size, and the same by torch alone."""
    name, compiler = of_key(key)
    # Code for sizes that vary marks what it is given, and by these marks other code is compiled.
    batch, own_batch, marked = (CASES[name].batch(size) for _ in range(3))
    own = optimized(CASES[name], BESIDE * budget, compiler, plan=plan)
    backend = "inductor" if compiler == "inductor" else "aot_eager"
    varied, fixed = (
        Compiled(CASES[name].model(), backend=backend, dynamic=is_dynamic)
        for is_dynamic in (True, False)
    )
    steps = [(model, batch), (own, own_batch), (varied, marked), (fixed, own_batch)]
    with _torch.sizes_as_seen():  # others were seen here
        for _ in range(WARM_UP):
            for one, given in steps:
                seconds_of(one, given)
    found = [tuple(seconds_of(one, given) for one, given in steps) for _ in range(ROUNDS)]
    del own, varied, fixed, steps
    gc.collect()
    return found


def of_key(key: str) -> tuple[str, str]:
    """A case's model and its compiler."""
    name, _, compiler = key.partition(", ")
    return name, compiler or "eager"


def _save_plan(key: str, budget: int, size: Size, path: Path) -> None:
    """The plan for a size, as it is once steps have shown what they hold."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_plans()
    name, compiler = of_key(key)
    model, batch = optimized(CASES[name], budget, compiler), CASES[name].batch(size)
    for _ in range(WARM_UP):
        seconds_of(model, batch)
    autoremat.save_plan(model, path)
