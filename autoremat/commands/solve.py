"""`autoremat solve`: a graph from a file, a budget, and what the solver says.

Enters: the command's arguments. Leaves: a table or one JSON object on stdout, messages on stderr,
perhaps a plan file, and the exit code. Guarantees: the input file is never written to, and a
file that cannot be written is found before the solver starts where that is possible.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoremat_solver import (
    Problem,
    ProblemError,
    Solution,
    Solver,
    Status,
    Timeline,
    read_problem,
    unrolled,
)
from autoremat_solver.node_link import is_node_link
from autoremat_solver.plan_document import (
    curve_document,
    peak_step,
    plan_document,
    without_recompute,
)
from rich.console import Console

from autoremat.ask.budget import Budget, budget_argument
from autoremat.commands.arguments import Refusal
from autoremat.commands.exits import BAD_INPUT, INFEASIBLE
from autoremat.commands.files import read_text
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.solve_tables import curve_table, plan_table
from autoremat.errors import reason_of
from autoremat.units import format_nbytes, format_nbytes_apart

_LARGEST = 5


@dataclass(frozen=True)
class _Task:
    """A problem from a file.

    Attributes:
        problem: what the file states.
        name: the file's.
        time_unit: of the file's times; None if it does not say.
        baseline: the step without recompute.
    """

    problem: Problem
    name: str
    time_unit: str | None
    baseline: Timeline


def run(
    path: Path,
    budget: str | None,
    *,
    pareto: bool,
    out: Path | None,
    as_json: bool,
    time_limit: float,
) -> int:
    """Do what the command says and return its exit code.

    Args:
        path: the problem's file.
        budget: as the user wrote it; None with `pareto`.
        pareto: the curve in place of one plan.
        out: where to write the plan.
        as_json: one JSON object in place of tables.
        time_limit: seconds for the solver.
    """
    try:
        if pareto == (budget is not None):
            raise Refusal("Give either --budget, for one plan, or --pareto, for the curve.")
        if not 0 <= time_limit < float("inf"):
            raise Refusal(f"The time limit is {time_limit}: give a finite number of seconds.")
        task = _read(path)
        if out is not None:
            _require_writable(out, path)
        if budget is None:
            return _curve(task, time_limit, out, as_json)
        return _plan(task, _budget_nbytes(budget, task), time_limit, out, as_json)
    except (Refusal, ProblemError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT


def _plan(task: _Task, budget_nbytes: int, limit: float, out: Path | None, as_json: bool) -> int:
    with leaving_at_once(), _progress(task, limit):
        began = time.monotonic()
        solver = Solver(task.problem, time_limit_s=limit)
        solution = solver.solve(budget_nbytes)
        seconds = time.monotonic() - began
    document = plan_document(task.problem, task.name, budget_nbytes, solution, task.time_unit)
    document["seconds"] = seconds
    if solution.status is Status.INFEASIBLE:
        _tell_infeasible(task, budget_nbytes, solution, document, as_json)
        return INFEASIBLE
    if out is not None:
        _write(out, document)
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return 0
    Console().print(plan_table(document, task.problem, solution.status))
    if out is not None:
        print(f"Plan written to {out}")
    return 0


def _curve(task: _Task, limit: float, out: Path | None, as_json: bool) -> int:
    with leaving_at_once(), _progress(task, limit):
        began = time.monotonic()
        solved = (0, 0)

        def count(done: int, asked: int) -> None:
            nonlocal solved
            solved = (done, asked)

        solutions = Solver(task.problem, time_limit_s=limit).pareto(progress=count)
        seconds = time.monotonic() - began
    document = curve_document(task.problem, task.name, solutions, seconds, task.time_unit, solved)
    if out is not None:
        _write(out, document)
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return 0
    console = Console()
    console.print(curve_table(document, task.problem, console.width))
    if out is not None:
        print(f"Curve written to {out}")
    return 0


def _read(path: Path) -> _Task:
    text = read_text(path)
    try:
        problem = unrolled(read_problem(text))
    except ProblemError as error:
        raise Refusal(f"{path}: {error}") from error
    if not problem.ops:
        raise Refusal(f"{path} has no operations: there is nothing to plan.")
    time_unit = None if is_node_link(text) else "us"
    return _Task(problem, path.name, time_unit, without_recompute(problem))


def _budget_nbytes(budget: str, task: _Task) -> int:
    try:
        asked = Budget.parse(budget_argument(budget), whole="the peak without recompute")
        return asked.nbytes(task.baseline.peak_nbytes)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _require_writable(out: Path, problem: Path) -> None:
    """Find before the solver starts what would keep the plan from being written."""
    try:
        same = out.exists() and os.path.samefile(out, problem)
        directory, parent = out.is_dir(), out.resolve().parent
        missing = not parent.is_dir()
    except (OSError, ValueError) as error:
        raise Refusal(f"{out} cannot be written: {reason_of(error)}.") from error
    if same:
        raise Refusal(f"--out {out} is the problem's own file: give another name.")
    if directory:
        raise Refusal(f"--out {out} is a directory: give a file in it.")
    if missing:
        raise Refusal(f"--out {out} cannot be written: there is no directory {parent}.")


def _write(out: Path, document: dict[str, Any]) -> None:
    try:
        out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{out} cannot be written: {reason_of(error)}.") from error


def _progress(task: _Task, limit: float) -> AbstractContextManager[object]:
    """A line on the terminal while the solver runs; none where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return nullcontext()
    return console.status(f"Solving {task.name}, up to {limit:g} s")


def _tell_infeasible(
    task: _Task, budget_nbytes: int, solution: Solution, document: dict[str, Any], as_json: bool
) -> None:
    message = _infeasible(task, budget_nbytes, solution)
    if as_json:
        peak = peak_step(task.problem, solution.plan, _LARGEST)
        document |= {
            "message": message,
            "peak_op": peak.op,
            "peak_largest": [{"value": name, "nbytes": nbytes} for name, nbytes in peak.largest],
        }
        print(json.dumps(document, allow_nan=False))
        return
    print(f"autoremat: {message}", file=sys.stderr)


def _infeasible(task: _Task, budget_nbytes: int, solution: Solution) -> str:
    """Fact, cause, remedies."""
    smallest, floor = solution.timeline.peak_nbytes, solution.floor_nbytes
    budget_text, smallest_text = format_nbytes_apart(budget_nbytes, smallest)
    if floor >= smallest:
        proof = "which is proven to be the smallest possible"
    elif budget_nbytes < floor:
        proof = f"and no plan can go below {format_nbytes(floor)} (proven)"
    else:
        proof = f"though only a peak below {format_nbytes(floor)} is proven impossible"
    peak = peak_step(task.problem, solution.plan, _LARGEST)
    parts = [f"{name!r} {format_nbytes(nbytes)}" for name, nbytes in peak.largest]
    if peak.workspace_nbytes:
        parts.append(f"workspace {format_nbytes(peak.workspace_nbytes)}")
    if peak.resident_nbytes:
        parts.append(f"resident {format_nbytes(peak.resident_nbytes)}")
    longer = "" if budget_nbytes < floor or floor >= smallest else ", allow a longer --time-limit,"
    return (
        f"No plan found fits the budget of {budget_text} ({budget_nbytes} bytes). The smallest "
        f"peak found is {smallest_text} ({smallest} bytes), {proof}.\n"
        f"It occurs at {peak.op!r}, where the largest of what is live are {', '.join(parts)}.\n"
        f"Raise the budget to --budget {smallest}{longer} or make what is live there smaller: a "
        "smaller batch, lower precision, or an operation split in two."
    )
