"""Train a model twice, as it is and under a budget, and print both in one table.

Enters: a function that makes the model, which returns its loss, one that makes its optimizer, and
batches. Leaves: a table of measured peaks, step times and losses, and how far the weights of the
two runs lie apart. For `lora.py` and `diffusion.py`; a loop of yours needs none of it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import autoremat

MIB = 2**20
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        peak_nbytes: measured, of the highest step from the third on, all that it holds included.
        step_ms: median time of the other steps from the third on.
        loss: of the last five steps, in the mean.
        weights: after it, of what was trained.
    """

    peak_nbytes: int
    step_ms: float
    loss: float
    weights: list[Tensor]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> Run:
    """Train on each batch in turn; every fourth step is measured, the others are timed."""
    peaks, times, losses = [], [], []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    for number, batch in enumerate(batches):
        began = time.perf_counter()
        if number > 2 and number % 4 == 3:  # the first ones plan, compile and make the state
            optimizer.zero_grad(set_to_none=True)
            resident = autoremat.resident_nbytes(model, batch, optimizer)
            peaks.append(resident + autoremat.measure_peak(step, device=batch[0].device))
        else:
            step()
            times.append(time.perf_counter() - began)
    weights = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    return Run(max(peaks), 1e3 * statistics.median(times[2:]), sum(losses[-5:]) / 5, weights)


def side_by_side(
    make: Callable[[], nn.Module],
    new_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Callable[[], Iterator[Batch]],
    args: argparse.Namespace,
) -> tuple[Run, Run]:
    """Both runs, from the same weights and on the same batches; prints the table.

    Args:
        make: the same model each time.
        new_optimizer: makes its optimizer.
        batches: what the model is called with, at least four, the same ones each time; drawn one by
            one, as a loader does, so that a step holds no other.
        args: `share`, of the peak without a plan, and `compiler`.
    """
    model = make()
    before = train(model, new_optimizer(model), batches())
    del model
    gc.collect()
    budget = int(args.share * before.peak_nbytes)
    model = make()
    optimizer = new_optimizer(model)
    autoremat.optimize(model, budget, optimizer=optimizer, compiler=args.compiler)
    after = train(model, optimizer, batches())
    differ = max(
        float((a - b).abs().max()) for a, b in zip(before.weights, after.weights, strict=True)
    )
    print(autoremat.report(model).summary())
    print(f"\n| {'':<28} | peak, MiB | step, ms |   loss |")
    print("|---|--:|--:|--:|")
    for name, run in (("as it is", before), (f"autoremat, {budget / MIB:.1f} MiB allowed", after)):
        print(
            f"| {name:<28} | {run.peak_nbytes / MIB:9.1f} | {run.step_ms:8.1f} | {run.loss:6.3f} |"
        )
    print(f"\nAfter {args.steps} steps, trained weights differ by at most {differ:.1e}.")
    return before, after


def arguments(description: str, given: Sequence[str] | None, steps: int) -> argparse.Namespace:
    """The command line of an example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--share", type=float, default=0.5, help="of the peak without a plan")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    return parser.parse_args(given)
