"""Lower bounds from linear programs, by HiGHS, that do not rest on its tolerances.

Enters: a `LinearProgram`. Leaves: a point, a bound and each row's price. The bound is computed
here from the prices: for any prices y of the rows and columns within [0, u],

    c x >= sum of y_i b_i + sum over columns of min(0, c_j - (y A)_j) u_j

so a stop at the iteration limit, or rounding inside the library, makes it lower, never wrong. One
thread, a fixed seed and a limit in iterations: same program, same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.program.formulation import LinearProgram

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Relaxed:
    """What one run leaves.

    Attributes:
        values: per column; empty unless solved.
        bound: no point of the program costs less.
        solved: whether the run ended at the optimum.
        infeasible: whether the program was proven to have no point.
    """

    values: list[float]
    bound: float
    solved: bool
    infeasible: bool = False


class Relaxation:
    """A linear program in memory; each run continues from the last basis."""

    def __init__(self, program: LinearProgram, *, iterations: int) -> None:
        """Hand the program over.

        Args:
            program: columns within [0, upper].
            iterations: simplex steps of all runs together.
        """
        import highspy

        self._costs = np.array(program.costs)
        self._uppers = np.array(program.uppers)
        self._rows = list(program.rows)
        self._left = iterations
        new_model: Any = highspy.Highs
        self._model = new_model()
        for option, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._model.setOptionValue(option, setting)
        self._model.passModel(_linear_program(program))

    def add_row(self, by_column: dict[int, float], upper: float) -> None:
        """Add `sum of coefficients times columns <= upper`."""
        self._rows.append((by_column, -math.inf, upper))
        columns = np.array(list(by_column), dtype=np.int32)
        numbers = np.array(list(by_column.values()), dtype=np.float64)
        self._model.addRow(-math.inf, upper, len(columns), columns, numbers)

    def run(self, time_limit_s: float) -> Relaxed:
        """Solve, or stop at a limit with what is proven by then."""
        import highspy

        if time_limit_s <= 0 or self._left <= 0:
            return Relaxed([], -math.inf, solved=False)
        self._model.setOptionValue("time_limit", self._model.getRunTime() + time_limit_s)
        self._model.setOptionValue("simplex_iteration_limit", self._left)
        self._model.run()
        self._left -= max(1, self._model.getInfo().simplex_iteration_count)
        status, solution = self._model.getModelStatus(), self._model.getSolution()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Relaxed([], -math.inf, solved=False, infeasible=True)
        solved = status == highspy.HighsModelStatus.kOptimal
        bound = self._bound(np.array(solution.row_dual)) if solution.dual_valid else -math.inf
        return Relaxed(list(solution.col_value) if solved else [], bound, solved)

    def _bound(self, prices: Vector) -> float:
        """The bound of any prices; those that lean on an infinite side count as 0."""
        lower = np.array([row[1] for row in self._rows])
        upper = np.array([row[2] for row in self._rows])
        side = np.where(prices > 0, lower, upper)
        prices = np.where(np.isfinite(side), prices, 0.0)
        earned = np.where(np.isfinite(side), side, 0.0) * prices
        reduced = self._costs.copy()
        starts, columns, numbers = _sparse(self._rows)
        np.subtract.at(reduced, columns, np.repeat(prices, np.diff(starts)) * numbers)
        return float(earned.sum() + (np.minimum(0.0, reduced) * self._uppers).sum())


def _sparse(rows: list[Any]) -> tuple[NDArray[np.int32], NDArray[np.int32], Vector]:
    lengths = [len(row[0]) for row in rows]
    starts = np.array([0, *accumulate(lengths)], dtype=np.int32)
    columns = np.fromiter((c for row in rows for c in row[0]), np.int32, int(starts[-1]))
    numbers = np.fromiter((x for row in rows for x in row[0].values()), float, int(starts[-1]))
    return starts, columns, numbers


def _linear_program(program: LinearProgram) -> Any:
    import highspy

    result = highspy.HighsLp()
    result.num_col_, result.num_row_ = len(program.costs), len(program.rows)
    result.col_cost_ = np.array(program.costs, dtype=float)
    result.col_lower_ = np.zeros(len(program.costs))
    result.col_upper_ = np.array(program.uppers, dtype=float)
    result.row_lower_ = np.array([row[1] for row in program.rows], dtype=float)
    result.row_upper_ = np.array([row[2] for row in program.rows], dtype=float)
    starts, columns, numbers = _sparse(program.rows)
    result.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    result.a_matrix_.start_ = starts
    result.a_matrix_.index_ = columns
    result.a_matrix_.value_ = numbers
    return result
