"""Parts of a range of sizes for which a plan of their own would be faster.

Enters: a graph, stated at the upper corner of its ranges, its plan, and the budget; who plans up to
a corner. Leaves: corners of smaller ranges, those first that are worth most beside the plans that
have come of the ones before. Guarantees: nothing is searched for here; what a plan would take at
smaller sizes is told from two plans that are there, by `simulate`.

A plan for the largest sizes recomputes at all sizes what only the largest have no room for. At
smaller sizes the plan that recomputes nothing may fit already; where it does not, a mix of both is
taken for what a search would find: plans of less memory take more time, and each further byte costs
more than the one before, so that none between them is slower than the line. A part in which nothing
is recomputed is as large as that allows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autoremat_solver import Plan, Problem, simulate

from autoremat.planning.ranges import Covered, largest_between
from autoremat.planning.sizes import Symbols, sizes_of, subject_at
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject

MOST = 3  # plans beside that for the largest sizes
_MOST_TRIED = 5  # of these, the ones that are dropped included
_CELLS = {1: 8, 2: 4, 3: 3}  # into which each of so many ranges is divided; more than that into 2


class Worth(NamedTuple):
    """Of a step's time, what a plan has to save.

    Attributes:
        plain: one that recomputes nothing.
        other: one that has to be searched for.
    """

    plain: float
    other: float

    def of(self, recomputed: float) -> float:
        """What it is of a plan that recomputes so much of a step."""
        return self.plain if recomputed < _NOTHING else self.other


# Op by op a plan that recomputes nothing takes no search and no kernels, and what small operations
# take is more than their bytes say; under Inductor each compiles anew.
WORTH = {"eager": Worth(0.002, 0.03), "inductor": Worth(0.03, 0.03)}
_NOTHING = 1e-9

Cell = tuple[int, ...]  # by range, how many of its divisions a corner is up


class Corner(NamedTuple):
    """The upper corner of a part of the ranges.

    Attributes:
        numbers: what each symbol is there.
        shrunk: by which factor all of the ranges together reach further.
    """

    numbers: Symbols
    shrunk: float


def plan_parts(
    subject: Subject,
    plan: Plan,
    budget_nbytes: int,
    lows: Symbols,
    known: Covered,
    plan_at: Callable[[Corner], float | None],
    *,
    worth: Worth,
) -> None:
    """Have plans made where others than that of the largest sizes are worth it; at most `MOST`.

    Args:
        subject: the graph as its plan sees it, at the largest sizes.
        plan: its plan.
        budget_nbytes: for what the simulator counts.
        lows: by symbol, the smallest size that was said.
        known: how far the plan holds, with the names of sizes.
        plan_at: plans for the sizes up to a corner; returns what a step takes by that, relative to
            one that recomputes nothing, or None if nothing comes of it.
        worth: of a step's time, what a plan has to save.
    """
    highest = sizes_of(subject)
    if set(highest) != set(lows) & set(known.names):
        return  # of a size that nobody has limited, no part is known
    varying = (known.names[symbol] for symbol, high in highest.items() if lows[symbol] < high)
    names = list(dict.fromkeys(varying))
    fastest_us, slowest_us, _ = _times(subject.lowered.problem, plan, budget_nbytes)
    if not names or slowest_us <= (1 + min(worth)) * fastest_us:
        return
    count = _CELLS.get(len(names), 2)

    def numbers_at(cell: Cell) -> dict[Any, int]:
        up = dict(zip(names, cell, strict=True))
        return {
            symbol: lows[symbol]
            + (high - lows[symbol]) * up.get(known.names[symbol], count) // count
            for symbol, high in highest.items()
        }

    cells = list(itertools.product(range(1, count + 1), repeat=len(names)))
    times_us = {
        cell: _times(subject_at(subject, numbers).lowered.problem, plan, budget_nbytes)[2]
        for cell in cells
        if (numbers := numbers_at(cell)) != highest
    }
    tried: list[Symbols] = [highest]

    def make(cell: Cell) -> float | None:
        """What a step takes, in microseconds; of several cells the farthest may be the same."""
        numbers = numbers_at(cell)
        for corner in (_stretched(subject, numbers, budget_nbytes, known), numbers):
            if corner not in tried:
                tried.append(corner)
                ratios = {symbol: highest[symbol] / n for symbol, n in corner.items()}
                relative = plan_at(Corner(corner, known.shrunk(ratios)))
                return None if relative is None else relative * fastest_us
        return None

    _make_best(cells, times_us, (fastest_us, slowest_us), make, worth)


def _stretched(
    subject: Subject, numbers: Symbols, budget_nbytes: int, known: Covered
) -> dict[Any, int]:
    """The sizes up to which nothing has to be recomputed, where that is so in a corner."""
    found, highest = dict(numbers), sizes_of(subject)

    def with_up_to(n: int, name: str) -> dict[Any, int]:
        named = (symbol for symbol in found if known.names[symbol] == name)
        return found | {symbol: max(found[symbol], min(n, highest[symbol])) for symbol in named}

    def fits(n: int, name: str) -> bool:
        problem = subject_at(subject, with_up_to(n, name)).lowered.problem
        return simulate(problem, as_written(problem)).peak_nbytes <= budget_nbytes

    for name in dict.fromkeys(known.names[symbol] for symbol in highest):
        low, high = (
            max(of[symbol] for symbol in found if known.names[symbol] == name)
            for of in (found, highest)
        )
        most = largest_between(low, high, functools.partial(fits, name=name))
        if most is None:
            return found
        found = with_up_to(most, name)
    return found


def _times(problem: Problem, plan: Plan, budget_nbytes: int) -> tuple[float, float, float]:
    """Of the step as it is written, by a plan, and by what would be found; in microseconds."""
    rich, lean = simulate(problem, as_written(problem)), simulate(problem, plan)
    spared_nbytes = rich.peak_nbytes - lean.peak_nbytes
    if rich.peak_nbytes <= budget_nbytes:
        return rich.time_us, lean.time_us, min(rich.time_us, lean.time_us)
    if spared_nbytes <= 0 or rich.time_us >= lean.time_us:
        return rich.time_us, lean.time_us, lean.time_us
    share = max(0.0, (budget_nbytes - lean.peak_nbytes) / spared_nbytes)
    mixed_us = lean.time_us - share * (lean.time_us - rich.time_us)
    return rich.time_us, lean.time_us, mixed_us


def _make_best(
    cells: list[Cell],
    times_us: Mapping[Cell, float],
    range_us: tuple[float, float],
    make: Callable[[Cell], float | None],
    worth: Worth,
) -> None:
    """Make plans, each of them worth it beside those before as these have turned out.

    Args:
        cells: all parts of the ranges; sizes are taken to be as likely in each.
        times_us: of a step by a plan for the sizes up to each, as is supposed.
        range_us: of a step without recompute, and of one by the plan for all sizes.
        make: makes the plan; returns what a step takes by it, or None if nothing comes of it.
        worth: of the time of the steps that it is for, what a plan has to save.
    """
    fastest_us, slowest_us = range_us
    now_us, supposed_us = dict.fromkeys(cells, slowest_us), dict(times_us)

    def gains(corner: Cell, us: float) -> dict[Cell, float]:
        within = (c for c in cells if all(a <= b for a, b in zip(c, corner, strict=True)))
        return {cell: now_us[cell] - us for cell in within if now_us[cell] > us}

    def saved_us(corner: Cell) -> float:
        """By the plan for a corner; 0 where that is too little for one."""
        gained = gains(corner, supposed_us[corner])
        saved, share = sum(gained.values()), worth.of(supposed_us[corner] / fastest_us - 1)
        return saved if saved > share * sum(now_us[cell] for cell in gained) else 0.0

    count = 0
    for _ in range(_MOST_TRIED):
        best = max(supposed_us, key=saved_us, default=None)
        if best is None or count == MOST or not saved_us(best):
            return
        us = make(best)
        del supposed_us[best]
        if us is not None:
            count += 1
            now_us |= dict.fromkeys(gains(best, us), us)
