"""One process that takes one figure of `solver_benchmarks.md`.

Started by `solver_benchmarks.py` with a `Job` as JSON in its last argument. Leaves one JSON line on
its standard output: the row. A process for each keeps solves apart, and lets a crash or one that
does not end cost one row only. Every plan passes the independent `check` before it is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

from autoremat_solver import Plan, Problem, Solution, Solver, check, simulate
from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import index
from autoremat_solver.model.reduce import reduce
from autoremat_solver.node_link import read_problem
from autoremat_solver.program.formulation import Formulation
from autoremat_solver.search.anneal import annealed
from autoremat_solver.simulate import measure
from solver_benchmark_cells import share_name

Row = dict[str, Any]
T = TypeVar("T")

GROWTH = 40_000  # operations that are counted per operation of a graph whose annealing is looked at


@dataclass(frozen=True)
class Job:
    """What one worker does.

    Attributes:
        section: "size" of a captured graph, "published" for an instance whose file states its
            baseline, "growth" for how its annealing improves, or any other section of the page: a
            solve.
        graph: its name.
        path: its file.
        share: the budget as percent of the baseline's peak above what is resident; None for the
            smallest peak that the solver finds.
        without: the stage to leave out.
        effort: factor of what each stage may count up to.
        time_limit: for the solver, in seconds: so long that it never cuts anything off.
    """

    section: str
    graph: str
    path: str
    share: float | None = None
    without: str = ""
    effort: float = 1.0
    time_limit: float = 1000.0

    @property
    def key(self) -> str:
        """A name that is unique within the page."""
        parts = [self.section, self.graph]
        if self.section != "size":
            parts.append(share_name(self.share))
        if self.section == "effort":
            parts.append(f"{self.effort:g}")
        return "/".join([*parts, *([self.without] * bool(self.without))])


def main() -> None:
    """Do the job and print its row, with what was warned of."""
    job = Job(**json.loads(sys.argv[-1]))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        row = row_of(job)
    if raised:
        row["warnings"] = [str(warning.message) for warning in raised]
    print(json.dumps(row))


def row_of(job: Job) -> Row:
    """The row of a job.

    Raises:
        ValueError: if a plan fails the independent check, or a published instance's baseline is
            not what its file states.
    """
    text = Path(job.path).read_text()
    problem = read_problem(text)
    baseline = simulate(problem, Plan.of(op.name for op in problem.ops))
    row: Row = {
        "digest": digest(text),
        "resident_nbytes": problem.resident_nbytes,
        "baseline_peak_nbytes": baseline.peak_nbytes,
        "baseline_us": baseline.time_us,
    }
    if job.section == "published":
        _require_stated(json.loads(text)["graph"], row)
    if job.section == "size":
        return {**row, **_sizes(problem)}
    above_nbytes = baseline.peak_nbytes - problem.resident_nbytes
    budget_nbytes = problem.resident_nbytes + int(above_nbytes * (job.share or 0.0) / 100)
    row |= {"time_limit": job.time_limit, "effort": job.effort, "without": job.without}
    if job.share is not None:
        row["budget_nbytes"] = budget_nbytes
    if job.section == "growth":
        return {**row, **_improvements(problem, budget_nbytes, job.effort)}
    return {**row, **_solved(problem, None if job.share is None else budget_nbytes, job)}


def digest(text: str) -> str:
    """What tells one version of a problem from another."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _require_stated(stated: Row, row: Row) -> None:
    ours, theirs = row["baseline_peak_nbytes"], stated["baseline_peak_nbytes"]
    if ours != theirs:
        raise ValueError(
            f"The baseline's peak is {ours:,} bytes here and {theirs:,} in the file: the two count "
            "live bytes differently, so results would not compare."
        )


def _sizes(problem: Problem) -> Row:
    reduced = reduce(problem).problem
    indexed = index(reduced)
    program = Formulation(indexed).program
    return {
        "ops": len(problem.ops),
        "values": len(problem.values),
        "reduced_ops": len(reduced.ops),
        "reduced_values": len(reduced.values),
        "candidates": len(indexed.candidates),
        "columns": len(program.costs),
        "rows": len(program.rows),
    }


def _solved(problem: Problem, budget_nbytes: int | None, job: Job) -> Row:
    def solve() -> Solution:
        without = [job.without] * bool(job.without)
        solver = Solver(problem, time_limit_s=job.time_limit, effort=job.effort, without=without)
        return solver.smallest_peak() if budget_nbytes is None else solver.solve(budget_nbytes)

    solution, times = _timed(solve)
    _require_valid(problem, solution.plan)
    return {
        **times,
        "outcome": solution.status.name,
        "peak_nbytes": solution.timeline.peak_nbytes,
        "time_us": solution.timeline.time_us,
        "bound_us": solution.bound_us,
        "floor_nbytes": solution.floor_nbytes,
        "gap": solution.gap,
        "method": solution.method,
        "tried": list(solution.tried),
        "left_out": list(solution.left_out),
        "plan": plan_digest(solution.plan),
        "status": "ok",
    }


def _improvements(problem: Problem, budget_nbytes: int, effort: float) -> Row:
    """What annealing counts up to its first plan within the budget, and beyond, for better ones."""
    indexed = index(problem)
    left = Effort(int(effort * GROWTH * len(problem.ops)))
    whole, counted = left.operations, []
    for steps in annealed(indexed, [], budget_nbytes, left):
        if measure(indexed, steps).peak_nbytes <= budget_nbytes:
            counted.append(whole - left.operations)
    first = counted[0] if counted else None
    beyond = whole - left.operations - (first or 0) if counted else 0
    improvements = max(0, len(counted) - 1)
    return {"status": "ok", "operations": beyond, "first": first, "improvements": improvements}


def plan_digest(plan: Plan) -> str:
    """What tells one plan from another: each step counts, and their order."""
    return digest("\n".join(f"{step.kind.name} {step.target}" for step in plan.steps))


def _timed(work: Callable[[], T]) -> tuple[T, Row]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return result, {"seconds": seconds, "cpu_seconds": cpu_seconds}


def _require_valid(problem: Problem, plan: Plan) -> None:
    violations = check(problem, plan)
    if violations:
        raise ValueError(f"The plan fails the independent check: {violations[0]}")


if __name__ == "__main__":
    main()
