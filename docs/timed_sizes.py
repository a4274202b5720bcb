"""Steps of a size, by a plan for a range of sizes and by one for this very size, taken in turns.

Enters: a case of `varied_batches.py`, optimised for its range, and a size. Leaves: how long its
step takes by that of a model that was planned for the size alone. Guarantees: that model lives in a
process of its own, so that neither plans beside what the other holds; one computes at a time.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from own_process import forget_plans
from torch import nn
from varied_batches import CASES, Batch, Size, Varied

import autoremat

TIME_LIMIT_S = 2.0
WARM_UP, ROUNDS = 4, 40  # steps before it is timed, and how often


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


def over_alone(model: nn.Module, key: str, budget: int, size: Size) -> float:
    """The median of a step's time over that by a plan for this size, of steps one behind the other.

    Args:
        model: planned for the range of the case.
        key: the name of the case, and its compiler if it has one.
        budget: of both plans, in bytes.
        size: of the steps.
    """
    batch = CASES[key.partition(", ")[0]].batch(size)
    with _alone(key, budget, size) as other:
        ratios = []
        for _ in range(WARM_UP + ROUNDS):
            ours_s = seconds_of(model, batch)
            other.send(True)
            ratios.append(ours_s / other.recv())
    return statistics.median(ratios[WARM_UP:])


@contextmanager
def _alone(key: str, budget: int, size: Size) -> Iterator[Connection]:
    """A process that takes a step, and answers with its seconds, each time that it is asked to."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_steps, args=(key, budget, size, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()  # it is planned
        yield ours
        ours.send(False)
    finally:
        ours.close()
        process.join(1.0)
        process.kill()
        process.join()


def _take_steps(key: str, budget: int, size: Size, asked: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forget_plans()
    name, _, compiler = key.partition(", ")
    model = optimized(CASES[name], budget, compiler or "eager")
    batch = CASES[name].batch(size)
    for _ in range(WARM_UP):  # nothing is planned anew after them
        seconds_of(model, batch)
    asked.send(True)
    while asked.recv():
        asked.send(seconds_of(model, batch))
