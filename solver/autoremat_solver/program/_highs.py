"""Lower bounds from linear programs, by HiGHS, that do not rest on its tolerances.

Enters: a `LinearProgram`. Leaves: a point, a bound and each row's price. The bound is computed
here from the prices: for any prices y of the rows and columns within [0, u],

    c x >= sum of y_i b_i + sum over columns of min(0, c_j - (y A)_j) u_j

so a stop at the iteration limit, or rounding inside the library, makes it lower, never wrong. The
simplex method goes on from its last basis when rows were added: for these programs it takes a third
of the time of the interior point method, which begins anew. One thread, a fixed seed and a limit in
iterations: same program, same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.program._library import highs
from autoremat_solver.program.formulation import LinearProgram, Row

Vector = NDArray[np.float64]
Fixed = dict[int, float]  # columns and the one value that each may have

OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "random_seed": 0,
    "solver": "simplex",
    "presolve": "off",
}
FEWEST_ITERATIONS = 500  # with fewer left, none are begun
CLEARLY = 1e-6  # above 0, where prices of at most 1 prove that there is no point
FEWEST_COUNTED = 50  # however soon a run ends, it takes its time


@dataclass(frozen=True)
class Relaxed:
    """What one run leaves.

    Attributes:
        values: per column; empty unless solved.
        bound: no point of the program costs less.
        solved: whether the run ended at the optimum.
        basis: where a later run may go on from.
    """

    values: list[float]
    bound: float
    solved: bool
    basis: Any = None


NO_POINT = Relaxed([], math.inf, solved=False)


class Relaxation:
    """A linear program in memory; each run continues from the last basis."""

    def __init__(self, program: LinearProgram, *, work: int) -> None:
        """Hand the program over.

        Args:
            program: columns within [0, upper].
            work: what all runs together may take: iterations times the program's numbers.
        """
        self._costs = np.array(program.costs)
        self._uppers = np.array(program.uppers)
        self._lowers = np.zeros(len(self._costs))
        self._blocks = [_Rows.of(program.rows)]
        self.work = work
        self._model: Any = highs().Highs()
        for option, setting in OPTIONS.items():
            self._model.setOptionValue(option, setting)
        self._model.passModel(_linear_program(program, self._blocks[0]))

    def add_rows(self, rows: list[Row]) -> None:
        """Add rows to those of the program; each has one side."""
        new = _Rows.of([row for row in rows if not self._forces(row)])
        self._blocks.append(new)
        self._model.addRows(
            len(new.lower),
            new.lower,
            new.upper,
            len(new.columns),
            new.starts[:-1],
            new.columns,
            new.numbers,
        )

    def _forces(self, row: Row) -> bool:
        """Whether a row leaves its columns one value each; they are fixed then."""
        by_column, lower, upper = row
        sign = 1.0 if math.isinf(lower) else -1.0
        least = [
            (c, sign * x, self._lowers[c] if sign * x > 0 else self._uppers[c])
            for c, x in by_column.items()
        ]
        if sum(x * at for _, x, at in least) < (upper if sign > 0 else -lower) - 1e-9:
            return False
        for column, _, at in least:
            self._lowers[column] = self._uppers[column] = at
            self._model.changeColBounds(column, at, at)
        return True

    @property
    def costs(self) -> Vector:
        """Per column."""
        return self._costs

    def run(self, fixed: Fixed | None = None, basis: Any = None) -> Relaxed:
        """Solve, or stop at the limit with what is proven by then.

        Args:
            fixed: columns that have one value, in this run only.
            basis: of an earlier run, to go on from; the last one's if not given.

        Returns:
            With a bound of infinity if it is proven that there is no point.
        """
        lowers, uppers = self._lowers.copy(), self._uppers.copy()
        for column, value in (fixed or {}).items():
            self._set_limits(column, max(value, lowers[column]), min(value, uppers[column]))
        if basis is not None:
            self._continue_from(basis)
        answer = self._run() if (self._lowers <= self._uppers).all() else NO_POINT
        for column in fixed or ():
            self._set_limits(column, lowers[column], uppers[column])
        return answer

    def _run(self) -> Relaxed:
        import highspy

        numbers = 1 + sum(len(block.columns) for block in self._blocks) + len(self._costs)
        iterations = self.work // numbers
        if iterations < FEWEST_ITERATIONS:
            self.work = 0
            return Relaxed([], -math.inf, solved=False)
        self._model.setOptionValue("simplex_iteration_limit", iterations)
        self._model.run()
        done = self._model.getInfo().simplex_iteration_count
        self.work -= numbers * max(FEWEST_COUNTED, done)
        status, solution = self._model.getModelStatus(), self._model.getSolution()
        if status == highspy.HighsModelStatus.kInfeasible:
            return self._without_point()
        if not solution.dual_valid:
            return Relaxed([], -math.inf, solved=False)
        bound = self._bound(np.array(solution.row_dual))
        if status != highspy.HighsModelStatus.kOptimal:
            return Relaxed([], bound, solved=False)
        return Relaxed(list(solution.col_value), bound, solved=True, basis=self._model.getBasis())

    def _without_point(self) -> Relaxed:
        """No point, if the prices that the library gives for it prove it."""
        _, has_ray, ray = self._model.getDualRay()
        if has_ray:
            for prices in (np.array(ray), -np.array(ray)):
                largest = float(np.abs(prices).max(initial=0.0)) or 1.0
                if self._bound(prices / largest, free=True) > CLEARLY:
                    return NO_POINT
        return Relaxed([], -math.inf, solved=False)

    def _set_limits(self, column: int, lower: float, upper: float) -> None:
        self._lowers[column], self._uppers[column] = lower, upper
        if lower <= upper:
            self._model.changeColBounds(column, lower, upper)

    def _continue_from(self, basis: Any) -> None:
        """Go on from a basis; rows that were added since are basic."""
        import highspy

        missing = self._model.getNumRow() - len(basis.row_status)
        if missing:
            basis.row_status = [*basis.row_status, *[highspy.HighsBasisStatus.kBasic] * missing]
        self._model.setBasis(basis)

    def _bound(self, prices: Vector, *, free: bool = False) -> float:
        """The bound of any prices; those that lean on an infinite side count as 0.

        If all is free, no point costs anything: a bound above 0 proves that there is none.
        """
        reduced = np.zeros_like(self._costs) if free else self._costs.copy()
        earned, first = 0.0, 0
        for block in self._blocks:
            price = prices[first : first + len(block.lower)]
            first += len(block.lower)
            side = np.where(price > 0, block.lower, block.upper)
            price = np.where(np.isfinite(side), price, 0.0)
            earned += float((np.where(np.isfinite(side), side, 0.0) * price).sum())
            per_number = np.repeat(price, np.diff(block.starts)) * block.numbers
            reduced -= np.bincount(block.columns, per_number, len(reduced))
        return earned + float(np.minimum(reduced * self._lowers, reduced * self._uppers).sum())


@dataclass(frozen=True)
class _Rows:
    """Rows as arrays: where each begins, its columns and their numbers, its two sides."""

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    numbers: Vector
    lower: Vector
    upper: Vector

    @classmethod
    def of(cls, rows: list[Row]) -> _Rows:
        lengths = [len(row[0]) for row in rows]
        starts = np.array([0, *accumulate(lengths)], dtype=np.int32)
        count = int(starts[-1])
        return cls(
            starts,
            np.fromiter((c for row in rows for c in row[0]), np.int32, count),
            np.fromiter((x for row in rows for x in row[0].values()), float, count),
            np.array([row[1] for row in rows], dtype=float),
            np.array([row[2] for row in rows], dtype=float),
        )


def _linear_program(program: LinearProgram, rows: _Rows) -> Any:
    import highspy

    result = highspy.HighsLp()
    result.num_col_, result.num_row_ = len(program.costs), len(program.rows)
    result.col_cost_ = np.array(program.costs, dtype=float)
    result.col_lower_ = np.zeros(len(program.costs))
    result.col_upper_ = np.array(program.uppers, dtype=float)
    result.row_lower_, result.row_upper_ = rows.lower, rows.upper
    result.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    result.a_matrix_.start_ = rows.starts
    result.a_matrix_.index_ = rows.columns
    result.a_matrix_.value_ = rows.numbers
    return result
