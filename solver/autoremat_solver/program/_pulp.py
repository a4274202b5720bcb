"""Runs a `LinearProgram`; the only importer of pulp.

Enters: columns and rows. Leaves: the point of an optimum, or None where there is none, or the
library fails (a warning says why; the caller has its portfolio). pulp states the integer program,
HiGHS solves it: the model stays in memory, so that later rows, costs and bounds continue from the
last basis. One thread, a fixed seed and limits in counts: same program, same answer.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from autoremat_solver.program import _library
from autoremat_solver.program._library import highs
from autoremat_solver.program.formulation import Formulation, LinearProgram

pulp = _library.pulp()

PIVOTS = 50_000  # simplex iterations of one relaxation
NODES = 50  # of the tree of an integer search


@dataclass(frozen=True)
class Answer:
    """A point of a linear program.

    Attributes:
        values: per column.
        objective: its cost.
    """

    values: list[float]
    objective: float


class LinearSolver:
    """One program that grows by rows; each call continues from the last basis.

    New rows reach HiGHS together, right before it needs them: one call for each of many thousand
    rows costs more than the solve.
    """

    def __init__(self, program: LinearProgram) -> None:
        """State the program."""
        self._columns, self._rows = len(program.costs), len(program.rows)
        self._new: list[tuple[dict[int, float], float]] = []
        self._model = _stated(program)

    def copy(self) -> LinearSolver:
        """An independent solver of the same program, without stating it again."""
        copy = object.__new__(LinearSolver)
        copy._columns, copy._rows, copy._new = self._columns, self._rows, list(self._new)
        copy._model = highspy.Highs()  # type: ignore[no-untyped-call]
        copy._model.passOptions(self._model.getOptions())
        copy._model.passModel(self._model.getModel())
        return copy

    def add_row(self, by_column: dict[int, float], upper: float) -> int:
        """Add `sum of coefficients times columns <= upper`; its number is for `set_upper`."""
        self._new.append((by_column, upper))
        return self._rows + len(self._new) - 1

    def set_upper(self, row: int, upper: float) -> None:
        """Change the right-hand side of a row that was added."""
        if row < self._rows:
            self._model.changeRowBounds(row, -math.inf, upper)
        else:
            self._new[row - self._rows] = (self._new[row - self._rows][0], upper)

    def set_costs(self, costs: list[float]) -> None:
        """Change the objective."""
        self._model.changeColsCost(len(costs), list(range(len(costs))), costs)

    def relax(self) -> Answer | None:
        """The linear relaxation's optimum; None if infeasible or not reached in `PIVOTS`."""
        return self._run(highspy.HighsVarType.kContinuous)

    def integer(self, gap: float, gap_cost: float = 0.0) -> Answer | None:
        """The best integer point found within `NODES`.

        Args:
            gap: stop when objective and bound are this close, as a fraction.
            gap_cost: the same, as a cost; whichever comes first.
        """
        self._model.setOptionValue("mip_rel_gap", gap)
        self._model.setOptionValue("mip_abs_gap", gap_cost)
        return self._run(highspy.HighsVarType.kInteger)

    def _run(self, kind: Any) -> Answer | None:
        try:
            self._add_new_rows()
            self._model.changeColsIntegrality(
                self._columns, list(range(self._columns)), [kind] * self._columns
            )
            self._model.run()
            return self._answer(is_integer=kind is highspy.HighsVarType.kInteger)
        except Exception as error:
            warnings.warn(
                f"The linear solver failed ({type(error).__name__}: {error}); the plan comes "
                "from the other strategies. Is highspy installed correctly?",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

    def _answer(self, *, is_integer: bool) -> Answer | None:
        info, status = self._model.getInfo(), self._model.getModelStatus()
        optimal = status == highspy.HighsModelStatus.kOptimal
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not optimal and not (is_integer and feasible):
            return None
        return Answer(list(self._model.getSolution().col_value), self._model.getObjectiveValue())

    def _add_new_rows(self) -> None:
        rows, self._new = self._new, []
        if not rows:
            return
        starts = np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int32)
        columns = np.fromiter((c for row, _ in rows for c in row), np.int32, starts[-1])
        numbers = np.fromiter((x for row, _ in rows for x in row.values()), float, starts[-1])
        lowers, uppers = np.full(len(rows), -np.inf), np.array([upper for _, upper in rows])
        self._model.addRows(len(rows), lowers, uppers, len(columns), starts[:-1], columns, numbers)
        self._rows += len(rows)


def solver_of(formulation: Formulation) -> LinearSolver:
    """A new solver of a formulation's program; it is stated once and copied."""
    return formulation.derived(_template).copy()


def _template(formulation: Formulation) -> LinearSolver:
    return LinearSolver(formulation.program)


def _stated(program: LinearProgram) -> Any:
    """The program as HiGHS has it, stated with pulp."""
    problem = pulp.LpProblem("autoremat", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"x{i:07d}", 0, upper, pulp.LpInteger)
        for i, upper in enumerate(program.uppers)
    ]
    problem += pulp.LpAffineExpression(list(zip(variables, program.costs, strict=True)))
    for coefficients, lower, upper in program.rows:
        row = [(variables[column], value) for column, value in coefficients.items()]
        if lower == upper:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), 0, rhs=lower)
            continue
        if lower > -math.inf:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), 1, rhs=lower)
        if upper < math.inf:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), -1, rhs=upper)
    highs()
    solver = pulp.HiGHS(mip=False, msg=False, threads=1, random_seed=0)
    solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    model: Any = problem.solverModel
    model.setOptionValue("simplex_iteration_limit", PIVOTS)
    model.setOptionValue("mip_max_nodes", NODES)
    model.setOptionValue("mip_detect_symmetry", False)  # it watches the clock
    return model


def require_solver() -> str:
    """The library that answers, found by asking it: HiGHS with its version.

    Raises:
        RuntimeError: if it does not solve the smallest integer program.
    """
    row = ({0: 1.0, 1: 1.0}, 1.0, 2.0)
    answer = LinearSolver(LinearProgram([1.0, 1.5], [1.0, 1.0], [row])).integer(gap=0.0)
    if answer is None or abs(answer.objective - 1.0) > 1e-6:
        raise RuntimeError("HiGHS does not solve an integer program: pip install highspy")
    return "HiGHS"
