"""`fit`: the batch for a budget, without a step being run.

Enters: a model, a function that makes its batch of a size, a budget. Leaves: a `Fit`. Guarantees:
no memory of the model's or the batch's size is allocated; every size in the answer was planned as
`autoremat.plan` plans it, and the next larger one was refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoremat import offline
from autoremat.ask.budget import Budget
from autoremat.errors import InfeasibleBudget
from autoremat.graph.selectors import Selection
from autoremat.progress import Progress
from autoremat.reporting.formula import PeakFormula
from autoremat.sizing.batches import Batches
from autoremat.sizing.model import Accumulation, Fit, FitPoint, Refused
from autoremat.sizing.plans import Planner
from autoremat.sizing.search import (
    Answer,
    Sizes,
    best_of,
    find_fastest,
    find_largest,
    first_that_fits,
)

_CANDIDATES = 4  # sizes of one part of a global batch that are planned beside gradients


class FitError(ValueError):
    """A search that cannot begin; the message says what was found, and what would do."""


def fit(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    budget: str | int,
    *,
    over: str = "batch",
    global_batch: int | None = None,
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    compiler: str = "inductor",
    save: Selection = None,
    recompute: Selection = None,
    reserve: float = 0.0,
    least: int = 1,
    most: int | None = None,
    multiple_of: int = 1,
    points: int = 8,
    time_limit: float = 30.0,
    verbose: bool = True,
) -> Fit:
    """The largest batch that fits a budget, and the fastest, which is often a smaller one.

    Offline, as `plan`: nothing runs, so nothing runs out of memory. A batch that just fits has to
    recompute much; the loosest plan of a smaller one may do more samples per second.

    Args:
        model: the module, in train mode; on the `meta` device if you like.
        make_batch: from a size to the batch: a tensor, a tuple of tensors (positional) or a dict
            of them (keywords). It is called on fake tensors, which take no memory.
        budget: as for `optimize`; a percentage is of the memory of `device`.
        over: what the size is: "batch", or another word for it, such as "sequence"; it is named in
            texts, and throughput counts it.
        global_batch: with it, how many forwards and backwards of which size make one of that.
        device: as for `plan`.
        optimizer: as for `plan`.
        compiler: as for `plan`.
        save: as for `optimize`.
        recompute: as for `optimize`.
        reserve: share of the budget to be left free, such as 0.05.
        least: the smallest size to try.
        most: the largest size to try; None for as large as fits.
        multiple_of: sizes are multiples of it.
        points: how many sizes may be planned to find the fastest, beside those that the largest
            needs; 0 for the largest alone.
        time_limit: as for `plan`, for each size.
        verbose: show progress, and a line for each size.

    Raises:
        ValueError: as of `plan`, and if the model or `make_batch` accepts no size, or returns
            something else at another size (`BatchError`).
        InfeasibleBudget: if not even the smallest size fits; it says what that would need.
    """
    began = time.monotonic()
    wanted = _Wanted(over, reserve, least, most, multiple_of, points, global_batch)
    home, options = offline.asked(
        model,
        device,
        optimizer,
        budget=budget,
        compiler=compiler,
        save=save,
        recompute=recompute,
        time_limit=time_limit,
        verbose=False,
    )
    options = options.on(home)
    whole_nbytes = options.budget_nbytes(home)
    if options.budget.is_least:
        raise FitError('budget="min" grows with the batch: give a size in bytes.')
    budget_nbytes = int(whole_nbytes * (1 - reserve))
    options = replace(options, budget=Budget(size_nbytes=budget_nbytes, given=budget))
    batches = Batches(make_batch, over)
    planner = Planner(model, batches, options, budget_nbytes, optimizer, home)
    with Progress(verbose) as progress:
        found = _found(wanted, planner, progress)
        result = Fit(
            target=type(model).__name__,
            over=over,
            budget_nbytes=whole_nbytes,
            reserve_nbytes=whole_nbytes - budget_nbytes,
            largest=found.points[-1],
            fastest=best_of(found.points),
            points=tuple(found.points),
            refused=tuple(found.refused),
            step=multiple_of,
            accumulation=found.accumulation,
            formula=found.formula,
            device=options.setting.device_name(home),
            compiler=compiler,
            optimizer="" if optimizer is None else type(optimizer).__name__,
            notes=found.notes,
            seconds=time.monotonic() - began,
        )
        progress.finish(result.text().splitlines()[0])
    return result


@dataclass(frozen=True)
class _Wanted:
    """Which sizes are looked for, as `fit` has them."""

    over: str
    reserve: float
    least: int
    most: int | None
    multiple_of: int
    points: int
    global_batch: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.over, str) or not self.over:
            raise FitError(f'over is a word for the size, such as "batch", not {self.over!r}.')
        if not 0 <= self.reserve < 1:
            raise FitError(
                f"reserve is a share of the budget, 0 or above and below 1, not {self.reserve}."
            )
        for name in ("least", "multiple_of", "most", "global_batch"):
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or count < 1):
                raise FitError(f"{name} is a whole number from 1 on, not {count!r}.")
        if not isinstance(self.points, int) or self.points < 0:
            raise FitError(f"points is a number of sizes, 0 or more, not {self.points!r}.")
        if self.most is not None and self.most < self.first:
            raise FitError(f"most={self.most} is below the smallest size to try, {self.first}.")

    @property
    def first(self) -> int:
        """The smallest size to try."""
        return -(-self.least // self.multiple_of) * self.multiple_of


@dataclass(frozen=True)
class _Found:
    """What a search has shown; the fields are those of `Fit`."""

    points: list[FitPoint]
    refused: list[Refused]
    accumulation: Accumulation | None
    formula: PeakFormula | None
    notes: tuple[str, ...]


def _found(wanted: _Wanted, planner: Planner, progress: Progress) -> _Found:
    """What can be planned, and what is to be known of it."""
    sizes = _searched(wanted, planner, progress)
    fallbacks = tuple(planner.fallbacks)  # of these sizes, not of what is planned beside them
    accumulation = formula = None
    if wanted.global_batch is not None:
        beside = replace(planner, has_gradients=True)
        accumulation = _accumulated(wanted.global_batch, sizes, beside)
    points = sizes.points
    if len(points) > 1:
        progress.stage("formula")
        formula = planner.formula(points[-1].size, points[-2].size)
    notes = (*fallbacks, *_notes(wanted, planner, sizes, accumulation))
    return _Found(points, sizes.refused, accumulation, formula, tuple(dict.fromkeys(notes)))


def _searched(wanted: _Wanted, planner: Planner, progress: Progress) -> Sizes:
    """The sizes that were planned, the largest that fits among them.

    Raises:
        InfeasibleBudget: if none fits.
        FitError: if none is accepted.
    """

    def at(size: int) -> Answer:
        progress.stage(f"{wanted.over} {size}")
        return planner.at(size)

    sizes = Sizes(at, wanted.multiple_of, wanted.most, planner.budget_nbytes)
    first = first_that_fits(sizes, wanted.first)
    if first is None:
        raise _nothing_fits(sizes, planner.refusal, wanted.over)
    find_fastest(sizes, find_largest(sizes, first), wanted.points)
    return sizes


def _nothing_fits(sizes: Sizes, refusal: InfeasibleBudget | None, over: str) -> Exception:
    """Of the smallest size: what it needs, or who does not accept it."""
    first = sizes.refused[0]
    if refusal is not None:
        refusal.add_note(
            f"That is {over} {first.size}, the smallest that was asked for: no {over} fits."
        )
        return refusal
    return FitError(f"No {over} can be planned: {over} {first.size}: {first.reason}")


def _accumulated(wanted: int, sizes: Sizes, beside: Planner) -> Accumulation | None:
    """The fastest way to make a global batch of several, each planned beside the gradients.

    Those whose size divides the wanted one come first; where there are few, the last is smaller.
    """
    largest, step = sizes.points[-1].size, sizes.step
    if wanted <= largest and wanted % step == 0:
        answer = sizes.at(wanted)
        if isinstance(answer, FitPoint):
            return Accumulation(wanted, 1, wanted, answer.plan)
    found: list[Accumulation] = []
    for size in _parts_of(wanted, largest, step)[:_CANDIDATES]:
        answer = beside.at(size)
        if isinstance(answer, FitPoint):
            steps = -(-wanted // size)
            last = wanted - (steps - 1) * size
            found.append(Accumulation(size, steps, last, answer.plan))
    return min(found, key=lambda one: (one.time_us, one.steps), default=None)


def _parts_of(wanted: int, largest: int, step: int) -> list[int]:
    """Sizes whose multiples are the wanted one or little more, the most promising first."""
    parts = [
        size
        for steps in range(1, wanted // step + 1)
        if (size := -(-wanted // steps // step) * step) <= largest
    ]
    even = [size for size in parts if wanted % size == 0]
    uneven = [size for size in parts if wanted % size]
    ordered = [*even[:_CANDIDATES], *uneven[:1]] if len(even) > 1 else [*uneven[:3], *even]
    return list(dict.fromkeys(ordered))


def _notes(
    wanted: _Wanted, planner: Planner, sizes: Sizes, accumulation: Accumulation | None
) -> Iterator[str]:
    """What the user has to know beside, once all is planned."""
    largest, over = sizes.points[-1].size, wanted.over
    if wanted.global_batch is not None and accumulation is None:
        yield f"No part of a global batch of {wanted.global_batch} fits beside the gradients."
    if planner.no_formula:
        yield f"The peak has no formula over {over}: {planner.no_formula}."
    yield from _of_refusals(sizes, largest, over)
    yield from _of_tables(planner.model, over, largest)


def _of_refusals(sizes: Sizes, largest: int, over: str) -> Iterator[str]:
    """What is to be known of the next larger size."""
    above = [one for one in sizes.refused if one.size > largest]
    if above and above[0].smallest_peak_nbytes is None:
        yield f"{over.capitalize()} {above[0].size}: {above[0].reason}"
    elif not above and sizes.most is not None:
        yield f"No {over} above most={sizes.most} was tried."


def _of_tables(model: nn.Module, over: str, largest: int) -> Iterator[str]:
    """Tables that are shorter than a sequence: whether a number is within one, no fake tells."""
    if over == "batch":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings < largest:
            yield (
                f"{name} has {module.num_embeddings} rows. If these are positions, no {over} above "
                f"that can run: give most={module.num_embeddings}."
            )
