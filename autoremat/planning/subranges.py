"""Parts of a range of sizes for which a plan of their own would be faster.

Enters: a graph, stated at the upper corner of its ranges, its plan, and the budget. Leaves: corners
of smaller ranges, those first that are worth most. Guarantees: nothing is searched for; what a plan
would take at smaller sizes is told from two plans that are there, by `simulate`.

A plan for the largest sizes recomputes at all sizes what only the largest have no room for. At
smaller sizes the plan that recomputes nothing may fit already; where it does not, a mix of both is
taken for what a search would find: plans of less memory take more time, and each further byte costs
more than the one before, so that none between them is slower than the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autoremat_solver import Plan, Problem, simulate

from autoremat.planning.ranges import Covered
from autoremat.planning.sizes import Symbols, sizes_of, subject_at
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject

MOST = 3  # plans beside that for the largest sizes
WORTH = 0.03  # of a step's time, from which on there is one
_CELLS = {1: 8, 2: 4, 3: 3}  # into which each of so many ranges is divided; more than that into 2

Cell = tuple[int, ...]  # by range, how many of its divisions a corner is up


class Corner(NamedTuple):
    """The upper corner of a part of the ranges.

    Attributes:
        numbers: what each symbol is there.
        shrunk: by which factor all of the ranges together reach further.
    """

    numbers: Symbols
    shrunk: float


def corners_worth_a_plan(
    subject: Subject, plan: Plan, budget_nbytes: int, known: Covered, lows: Symbols
) -> list[Corner]:
    """Where other plans than that of the largest sizes are worth it; at most `MOST`.

    Args:
        subject: the graph as its plan sees it, at the largest sizes.
        plan: its plan.
        budget_nbytes: for what the simulator counts.
        known: how far the plan holds, with the names of sizes.
        lows: by symbol, the smallest size that was said.
    """
    highest = sizes_of(subject)
    names = list(dict.fromkeys(known.names[s] for s in highest if s in known.names))
    if set(highest) != set(lows) & set(known.names) or all(
        lows[symbol] == high for symbol, high in highest.items()
    ):
        return []  # of a size that nobody has limited, no part is known
    count = _CELLS.get(len(names), 2)
    whole: Cell = (count,) * len(names)

    def corner(cell: Cell) -> Corner:
        up = dict(zip(names, cell, strict=True))
        numbers = {
            symbol: lows[symbol] + (high - lows[symbol]) * up[known.names[symbol]] // count
            for symbol, high in highest.items()
        }
        ratios = {symbol: highest[symbol] / n for symbol, n in numbers.items()}
        return Corner(numbers, known.shrunk(ratios))

    slowest_us, _ = _times(subject.lowered.problem, plan, budget_nbytes)
    if slowest_us <= (1 + WORTH) * _fastest_us(subject.lowered.problem):
        return []
    cells = list(itertools.product(range(1, count + 1), repeat=len(names)))
    times_us = {
        cell: _times(
            subject_at(subject, corner(cell).numbers).lowered.problem, plan, budget_nbytes
        )[1]
        for cell in cells
        if cell != whole
    }
    return [corner(cell) for cell in _best(cells, times_us, slowest_us)]


def _fastest_us(problem: Problem) -> float:
    return simulate(problem, as_written(problem)).time_us


def _times(problem: Problem, plan: Plan, budget_nbytes: int) -> tuple[float, float]:
    """Of a plan, and of what would be found for the budget; both in microseconds."""
    rich, lean = simulate(problem, as_written(problem)), simulate(problem, plan)
    spared_nbytes = rich.peak_nbytes - lean.peak_nbytes
    if rich.peak_nbytes <= budget_nbytes:
        return lean.time_us, min(rich.time_us, lean.time_us)
    if spared_nbytes <= 0 or rich.time_us >= lean.time_us:
        return lean.time_us, lean.time_us
    share = max(0.0, (budget_nbytes - lean.peak_nbytes) / spared_nbytes)
    return lean.time_us, lean.time_us - share * (lean.time_us - rich.time_us)


def _best(cells: list[Cell], times_us: Mapping[Cell, float], slowest_us: float) -> Iterator[Cell]:
    """Corners, each of them worth it beside those before.

    Args:
        cells: all parts of the ranges; sizes are taken to be as likely in each.
        times_us: of a step by a plan for the sizes up to each.
        slowest_us: of a step by the plan for all sizes.
    """
    now_us = dict.fromkeys(cells, slowest_us)

    def saved(corner: Cell) -> dict[Cell, float]:
        within = (c for c in cells if all(a <= b for a, b in zip(c, corner, strict=True)))
        return {c: now_us[c] - times_us[corner] for c in within if now_us[c] > times_us[corner]}

    for _ in range(MOST):
        best = max(times_us, key=lambda corner: sum(saved(corner).values()))
        gains = saved(best)
        if sum(gains.values()) <= WORTH * sum(now_us[cell] for cell in gains):
            return
        now_us |= dict.fromkeys(gains, times_us[best])
        yield best
