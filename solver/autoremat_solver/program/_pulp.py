"""Runs a `LinearProgram`; the only importer of pulp.

Enters: columns and rows. Leaves: values and a proven bound, or None when the library fails or
finds nothing (a warning says why; the caller has its portfolio). pulp builds the model; with
HiGHS the built model stays in memory, so that later rows, costs and bounds continue from the last
basis. CBC, through pulp alone, is the fallback. One thread and a fixed seed: same model, same
answer.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from autoremat_solver.program.formulation import Formulation, LinearProgram


@dataclass(frozen=True)
class Answer:
    """A point of a linear program.

    Attributes:
        values: per column.
        objective: its cost.
        bound: no point is cheaper (equal to `objective` for a solved relaxation).
        optimal: whether the search ended by itself.
    """

    values: list[float]
    objective: float
    bound: float
    optimal: bool


class LinearSolver:
    """One program that grows by rows; each call continues from the last basis.

    New columns and rows reach HiGHS together, right before it needs them: one call for each of
    many thousand rows costs more than the solve.
    """

    def __init__(self, program: LinearProgram) -> None:
        """Build the model."""
        self._program = program
        self._new_columns = 0
        self._new_rows = 0
        self._model = _highs_model(_build(program)[0])

    def copy(self) -> LinearSolver:
        """An independent solver of the same program, without translating it again."""
        self._flush()
        copy = object.__new__(LinearSolver)
        costs, uppers, rows = self._program.costs, self._program.uppers, self._program.rows
        copy._program = LinearProgram(list(costs), list(uppers), list(rows))
        copy._new_columns = copy._new_rows = 0
        copy._model = None if self._model is None else _copy(self._model)
        return copy

    @property
    def row_count(self) -> int:
        """Rows so far."""
        return len(self._program.rows)

    def add_row(
        self, coefficients: dict[int, float], upper: float, lower: float = -math.inf
    ) -> int:
        """Add `lower <= sum coefficients x <= upper`; its number is for `set_upper`."""
        self._program.rows.append((coefficients, lower, upper))
        self._new_rows += 1
        return self.row_count - 1

    def set_upper(self, row: int, upper: float) -> None:
        """Change the right-hand side of a row."""
        self._program.rows[row] = (self._program.rows[row][0], -math.inf, upper)
        if self._model is not None and row < self.row_count - self._new_rows:
            self._model.changeRowBounds(row, -math.inf, upper)

    def set_costs(self, costs: list[float]) -> None:
        """Change the objective."""
        self._program.costs[:] = costs
        self._flush()
        if self._model is not None:
            self._model.changeColsCost(len(costs), list(range(len(costs))), costs)

    def _flush(self) -> None:
        """Hand the new columns and rows to HiGHS."""
        columns, rows = self._new_columns, self._program.rows[self.row_count - self._new_rows :]
        self._new_columns = self._new_rows = 0
        if self._model is None:
            return
        if columns:
            zeros, ones = np.zeros(columns), np.ones(columns)
            none = np.zeros(0, dtype=np.int32)
            starts = np.zeros(columns, dtype=np.int32)
            self._model.addCols(columns, zeros, zeros, ones, 0, starts, none, np.zeros(0))
        if rows:
            starts = np.cumsum([0, *(len(row[0]) for row in rows)], dtype=np.int32)
            indices = np.fromiter((c for row in rows for c in row[0]), np.int32, starts[-1])
            values = np.fromiter((x for row in rows for x in row[0].values()), float, starts[-1])
            lowers = np.array([row[1] for row in rows])
            uppers = np.array([row[2] for row in rows])
            self._model.addRows(
                len(rows), lowers, uppers, len(indices), starts[:-1], indices, values
            )

    def relax(self, time_limit_s: float) -> Answer | None:
        """The linear relaxation's optimum; None if infeasible or not solved in time."""
        return self._run(integer=False, time_limit_s=time_limit_s, gap=0.0)

    def integer(
        self, time_limit_s: float, gap: float, start: list[float] | None = None
    ) -> Answer | None:
        """The best integer point found.

        Args:
            time_limit_s: stop then.
            gap: stop when objective and bound are this close, as a fraction.
            start: a feasible point to begin with.
        """
        return self._run(integer=True, time_limit_s=time_limit_s, gap=gap, start=start)

    def _run(
        self,
        *,
        integer: bool,
        time_limit_s: float,
        gap: float,
        start: list[float] | None = None,
    ) -> Answer | None:
        if time_limit_s <= 0:
            return None
        try:
            self._flush()
            if self._model is not None:
                return self._run_highs(integer, time_limit_s, gap, start)
            return self._run_cbc(integer, time_limit_s, gap)
        except Exception as error:
            warnings.warn(
                f"The linear solver failed ({type(error).__name__}: {error}); the plan comes "
                "from the other strategies. Is highspy or CBC installed correctly?",
                RuntimeWarning,
                stacklevel=3,
            )
            return None

    def _run_highs(
        self, integer: bool, time_limit_s: float, gap: float, start: list[float] | None
    ) -> Answer | None:
        import highspy

        model, count = self._model, len(self._program.costs)
        kind = highspy.HighsVarType.kInteger if integer else highspy.HighsVarType.kContinuous
        model.changeColsIntegrality(count, list(range(count)), [kind] * count)
        model.setOptionValue("mip_rel_gap", gap)
        model.setOptionValue("time_limit", model.getRunTime() + time_limit_s)
        if start is not None:
            model.setSolution(count, list(range(count)), start)
        model.run()
        info, status = model.getInfo(), model.getModelStatus()
        optimal = status == highspy.HighsModelStatus.kOptimal
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        if not optimal and not (integer and feasible):
            return None
        values = list(model.getSolution().col_value)
        objective = model.getObjectiveValue()
        bound = info.mip_dual_bound if integer else objective
        return Answer(values, objective, bound, optimal)

    def _run_cbc(self, integer: bool, time_limit_s: float, gap: float) -> Answer | None:
        problem, variables = _build(self._program)
        began = time.monotonic()
        solver = pulp.PULP_CBC_CMD(
            mip=integer, msg=False, timeLimit=max(1, int(time_limit_s)), gapRel=gap, threads=1
        )
        problem.solve(solver)
        if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return None
        values = [float(variable.varValue or 0.0) for variable in variables]
        objective = math.fsum(c * x for c, x in zip(self._program.costs, values, strict=True))
        in_time = time.monotonic() - began < time_limit_s
        optimal = problem.sol_status == pulp.LpSolutionOptimal and in_time
        if not optimal and not integer:
            return None
        bound = objective - gap * abs(objective) if optimal else -math.inf
        return Answer(values, objective, bound, optimal)


def solver_of(formulation: Formulation) -> LinearSolver:
    """A new solver of a formulation's program; its translation is made once and copied."""
    return formulation.derived(_template).copy()


def _template(formulation: Formulation) -> LinearSolver:
    return LinearSolver(formulation.program)


def _build(program: LinearProgram) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("autoremat", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"x{i:07d}", 0, upper, pulp.LpInteger)
        for i, upper in enumerate(program.uppers)
    ]
    pairs = zip(variables, program.costs, strict=True)
    problem += pulp.LpAffineExpression([(variable, cost) for variable, cost in pairs])
    for coefficients, lower, upper in program.rows:
        row = [(variables[column], value) for column, value in coefficients.items()]
        if lower == upper:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), 0, rhs=lower)
            continue
        if lower > -math.inf:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), 1, rhs=lower)
        if upper < math.inf:
            problem += pulp.LpConstraint(pulp.LpAffineExpression(row), -1, rhs=upper)
    return problem, variables


def _highs_model(problem: Any) -> Any:
    """Pulp's translation of the problem into HiGHS; None if HiGHS is not there."""
    solver = pulp.HiGHS(mip=False, msg=False, threads=1, random_seed=0)
    if not solver.available():
        return None
    solver.createAndConfigureSolver(problem)
    solver.buildSolverModel(problem)
    return problem.solverModel


def _copy(model: Any) -> Any:
    """A model of its own with the same columns, rows and options."""
    import highspy

    copy: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    copy.passOptions(model.getOptions())
    copy.passModel(model.getModel())
    return copy


def backend() -> str:
    """The library that answers, found by asking it: "HiGHS" or "CBC".

    Raises:
        RuntimeError: if neither solves the smallest integer program.
    """
    solver = LinearSolver(LinearProgram([1.0, 1.5], [1.0, 1.0], [({0: 1.0, 1: 1.0}, 1.0, 2.0)]))
    answer = solver.integer(time_limit_s=10.0, gap=0.0)
    if answer is None or abs(answer.objective - 1.0) > 1e-6:
        raise RuntimeError("neither HiGHS nor CBC solves an integer program: pip install highspy")
    return "CBC" if solver._model is None else "HiGHS"
