"""What no plan can beat: a lower bound on the time at a budget and on the reachable peak.

Enters: an `Indexed` problem. Leaves: microseconds and bytes. Both hold for every plan that `check`
accepts: every FORWARD operation runs exactly once in the forward, in the problem's order; every
BACKWARD operation exactly once, in the problem's order; FORWARD and EITHER operations may run
again (EITHER ones also for the first time) at any point after the first backward operation, any
number of times; EITHER operations anywhere in the forward. For a graph without phases, of which
any order is allowed, the bounds are those of one run of each operation.

The time is the optimum of a linear program that every plan is a point of (`intervals` says why,
row by row), with more and more cuts: the first program has one, at position 0, and says what runs
again at least once. Where the point breaks the budget most, the next one has cuts. Rows that the
point breaks in between are added to each. Any of these programs is a bound; the best one counts.
The peak is that of `floor`.
"""

from __future__ import annotations

import math
import time
import warnings

from autoremat_solver.bounds.floor import floor_nbytes
from autoremat_solver.bounds.intervals import IntervalProgram
from autoremat_solver.bounds.spine import spine_of
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.program._highs import Relaxation
from autoremat_solver.program.formulation import LinearProgram

STAGES = 7  # sets of cuts
ROUNDS = (12, 4)  # of adding rows, with one cut and with more
ROWS_PER_ROUND = 6
MOST_COLUMNS = 20_000
MOST_COLUMNS_ALL_WINDOWS = 6_000
SIMPLEX_STEPS = 40_000  # per set of cuts
LOOSE = 1e-6  # a load this far below the budget binds nothing: no further row would
TOLERANCE = 1e-6


class Bounds:
    """Lower bounds of one problem.

    Attributes:
        floor_nbytes: no plan has a smaller peak.
    """

    def __init__(self, indexed: Indexed) -> None:
        """Compute what no budget changes, and the floor."""
        self._spine = spine_of(indexed)
        self._scale = max(1, sum(indexed.nbytes))
        self._proven: dict[int, float] = {}
        self.floor_nbytes = floor_nbytes(self._spine)

    def time_us(
        self, budget_nbytes: int, time_limit_s: float, *, target_us: float | None = None
    ) -> float:
        """No plan whose peak is at most the budget takes less time.

        What was proven for a larger budget counts, so asking again never gives less.

        Args:
            budget_nbytes: the peak allowed.
            time_limit_s: stop then; less time may give a lower, still proven bound.
            target_us: stop as soon as the bound reaches it.
        """
        enough = math.inf if target_us is None else target_us
        best = max((us for n, us in self._proven.items() if n >= budget_nbytes), default=0.0)
        if best < enough:
            search = _Search(self, budget_nbytes, time.monotonic() + time_limit_s, enough)
            best = max(best, search.best_us)
        self._proven[budget_nbytes] = best
        return best


class _Search:
    """One budget's programs, one after the other.

    Attributes:
        best_us: the best bound.
    """

    def __init__(self, bounds: Bounds, budget_nbytes: int, until: float, enough: float) -> None:
        """Run until a limit, or until nothing is left to refine."""
        self._spine = bounds._spine
        self._scale = bounds._scale
        self._budget_nbytes = budget_nbytes
        self._until = until
        self._enough = enough
        self._forward_slots: set[int] = set()
        self.best_us = self._spine.constant_us * (1 - TOLERANCE)
        try:
            if self._spine.ops:
                self._refine()
        except Exception as error:
            warnings.warn(
                f"The linear solver failed ({type(error).__name__}: {error}); the bound is the one "
                f"proven by then, {self.best_us:.1f} us. Is highspy installed correctly?",
                RuntimeWarning,
                stacklevel=3,
            )

    def _refine(self) -> None:
        cuts, columns = [0], 0
        for stage in range(STAGES):
            all_windows = columns * len(cuts) ** 2 <= 6 * MOST_COLUMNS_ALL_WINDOWS
            program = IntervalProgram(self._spine, cuts, all_windows=all_windows)
            columns = columns or program.column_count
            loads = self._converge(program, ROUNDS[min(stage, 1)])
            if loads is None or self.best_us >= self._enough:
                return
            new = self._new_cuts(cuts, loads)
            if not new or columns * (len(cuts) + len(new)) > MOST_COLUMNS:
                return
            cuts = sorted([*cuts, *new])

    def _converge(self, program: IntervalProgram, rounds: int) -> list[float] | None:
        """Add broken rows until there are none; loads before the first of them, None to stop."""
        budget, scale = self._budget_nbytes, self._scale
        rows = list(program.program.rows)
        at_start = program.budget_rows + [
            program.budget_row(slot, []) for slot in sorted(self._forward_slots)
        ]
        for constant, by_column in at_start:
            rows.append((_scaled(by_column, scale), -math.inf, (budget - constant) / scale))
        linear = LinearProgram(program.program.costs, program.program.uppers, rows)
        relaxation = Relaxation(linear, iterations=SIMPLEX_STEPS)
        first: list[float] | None = None
        for _ in range(rounds):
            answer = relaxation.run(self._until - time.monotonic())
            bound = self._spine.constant_us + answer.bound
            self.best_us = max(self.best_us, bound - TOLERANCE * abs(bound))
            if not answer.solved:
                return None
            loads = program.loads(answer.values)
            first = first or loads
            broken = self._broken(loads)
            for slot in broken:
                constant, by_column = program.budget_row(slot, answer.values)
                relaxation.add_row(_scaled(by_column, scale), (budget - constant) / scale)
            if not broken:
                return first if max(loads) >= budget * (1 - LOOSE) else None
        return first

    def _broken(self, loads: list[float]) -> list[int]:
        """Slots to add rows for."""
        slack = self._scale * 1e-7
        over = [s for s, load in enumerate(loads) if load > self._budget_nbytes + slack]
        chosen = _spread(over, loads, ROWS_PER_ROUND, max(1, len(loads) // 200))
        steps = len(self._spine.forward.nbytes)
        self._forward_slots.update(slot for slot in chosen if slot < steps)
        return chosen

    def _new_cuts(self, cuts: list[int], loads: list[float]) -> list[int]:
        """Positions over the budget, the worst first; or the middles of the longest windows."""
        steps = len(self._spine.forward.nbytes)
        here = loads[steps:]
        slack = self._budget_nbytes * 1e-4
        over = [
            k for k, load in enumerate(here) if load > self._budget_nbytes + slack and k not in cuts
        ]
        count = max(4, len(cuts) // 2)
        if over:
            apart = max(1, len(here) // (8 * len(cuts) + 16))
            return _spread(over, here, count, apart, cuts) or over[:1]
        ends = [*cuts[1:], len(here)]
        windows = [(end - cut, cut, end) for cut, end in zip(cuts, ends, strict=True)]
        windows = [window for window in sorted(windows, reverse=True)[:4] if window[0] > 1]
        load = self._spine.load_nbytes
        return [max(range(cut + 1, end), key=lambda k: (load[k], -k)) for _, cut, end in windows]


def _scaled(by_column: dict[int, int], scale: int) -> dict[int, float]:
    return {column: nbytes / scale for column, nbytes in by_column.items()}


def _spread(
    slots: list[int], loads: list[float], count: int, apart: int, taken: list[int] | None = None
) -> list[int]:
    """The worst slots, no two of them close: neighbours hold nearly the same values."""
    chosen: list[int] = []
    for slot in sorted(slots, key=lambda s: (-loads[s], s)):
        if all(abs(slot - other) >= apart for other in (*chosen, *(taken or ()))):
            chosen.append(slot)
        if len(chosen) == count:
            break
    return chosen
