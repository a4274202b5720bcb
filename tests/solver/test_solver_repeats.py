"""One problem, one plan: whatever the clock shows, whatever else runs, however Python hashes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoremat_solver import Phase, Plan, Problem, Solution, Solver, Status, check, simulate
from autoremat_solver.program._pulp import LinearSolver
from autoremat_solver.search.stages import STAGES

from tests.solver.test_solver_networks import mlp, transformer, unet

ROOT = Path(__file__).parents[2]
NEVER_S = 1e9  # a limit that no clock here reaches
NAMES = [stage.name for stage in STAGES]

Clock = Callable[[], float]


def without_phases(problem: Problem) -> Problem:
    """The same operations, in any order."""
    return replace(problem, ops=tuple(replace(op, phase=Phase.ANY) for op in problem.ops))


# With budgets as shares of the peak without recompute; most are searched to the last stage.
PROBLEMS: dict[str, tuple[Callable[[], Problem], float]] = {
    "lean transformer": (lambda: transformer(2), 0.6),
    "no phases": (lambda: without_phases(unet(2)), 0.5),
    "transformer": (lambda: transformer(2), 0.7),
    "mlp": (lambda: mlp(6), 0.6),
}


def solved(name: str, **settings: Any) -> Solution:
    """A solve by a solver of its own."""
    make, share = PROBLEMS[name]
    problem = make()
    baseline = simulate(problem, Plan.of(op.name for op in problem.ops))
    settings = {"time_limit_s": NEVER_S, "effort": 0.3, **settings}
    return Solver(problem, **settings).solve(int(share * baseline.peak_nbytes))


def steps_of(solution: Solution) -> str:
    """A plan, byte for byte."""
    return "\n".join(f"{step.kind.name} {step.target}" for step in solution.plan.steps)


def all_plans() -> str:
    """The plans of all problems here; what other processes are asked for."""
    return "\n\n".join(steps_of(solved(name)) for name in PROBLEMS)


@pytest.fixture(scope="module")
def plans() -> dict[str, str]:
    """The plans that this process finds by its own clock."""
    return {name: steps_of(solved(name)) for name in PROBLEMS}


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], None]:
    """Gives every module of the solver another clock."""

    def set_to(clock: Clock) -> None:
        class OtherTime:
            monotonic = perf_counter = time = process_time = staticmethod(clock)

        for name, module in list(sys.modules.items()):
            if name.startswith("autoremat_solver") and getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", OtherTime)

    return set_to


def jumping(by_s: float) -> Clock:
    """A clock that jumps each time it is read."""
    readings: list[float] = []

    def read() -> float:
        readings.append(by_s)
        return sum(readings)

    return read


CLOCKS: dict[str, Clock] = {
    "a thousand times slower": lambda: time.monotonic() / 1000,
    "a thousand times faster": lambda: time.monotonic() * 1000,
    "stands still": lambda: 7.0,
    "jumps by hours": jumping(7200.0),
    "runs backwards": jumping(-1.0),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_no_clock_changes_a_plan(
    clock: str, set_clock: Callable[[Clock], None], plans: dict[str, str]
) -> None:
    """As long as the time limit is not reached, nothing that is searched for looks at it."""
    set_clock(CLOCKS[clock])
    for name in ("lean transformer", "no phases"):
        solution = solved(name)
        assert "rearrange" in solution.tried
        assert solution.left_out == ()
        assert steps_of(solution) == plans[name]


@pytest.mark.parametrize("reached", [2, 4, 6])
def test_a_time_limit_only_keeps_stages_from_beginning(
    reached: int, set_clock: Callable[[Clock], None]
) -> None:
    """What began before the limit runs to its end; what did not is named."""

    def cut_off() -> Solution:
        set_clock(jumping(10.0))
        return solved("no phases", time_limit_s=10.0 * reached)

    whole, cut = solved("no phases"), cut_off()
    assert cut.tried == whole.tried[: reached - 1]
    assert cut.left_out[0] == whole.tried[reached - 1]
    assert set(whole.tried) - set(cut.tried) <= set(cut.left_out)
    assert cut.status in (Status.TIME_LIMIT, Status.INFEASIBLE)
    assert steps_of(cut) == steps_of(cut_off())


def test_without_time_every_stage_is_left_out() -> None:
    """The simple strategies need no stage, so there is a plan."""
    solution = solved("transformer", time_limit_s=0.0)
    assert solution.tried == ()
    assert set(solution.left_out) <= set(NAMES)
    assert solution.left_out[0] == NAMES[0]
    assert solution.plan.steps


def test_a_stage_without_a_name_is_refused() -> None:
    """The message says which names there are."""
    with pytest.raises(ValueError, match=f"No stage is called 'polish'; there are: {NAMES[0]}, "):
        Solver(mlp(2), without=["polish"])


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_can_be_left_out(name: str) -> None:
    """None of them rests on another: there is a plan that passes the check, and it is not tried."""
    problem = transformer(2)
    solution = Solver(problem, without=[name], effort=0.1).smallest_peak()
    assert name not in solution.tried
    assert check(problem, solution.plan) == []


def test_other_processes_find_the_same_plans(plans: dict[str, str]) -> None:
    """Two at once, each with its own seed of Python's hashes and another count of threads."""
    command = [
        sys.executable,
        "-c",
        "from tests.solver.test_solver_repeats import all_plans; print(all_plans())",
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONHASHSEED": seed,
                "OMP_NUM_THREADS": threads,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, threads in (("1", "1"), ("2", "4"))
    ]
    answers = [process.communicate()[0].strip() for process in running]
    assert answers == ["\n\n".join(plans.values())] * 2


@pytest.mark.parametrize("calls", [0, 9])
def test_a_linear_solver_that_fails_costs_plans_not_the_answer(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at once, or in the middle: a warning says so, and the plan is the same each time."""
    answer = LinearSolver._answer

    def with_failures() -> str:
        left = calls

        def failing(self: LinearSolver, *, is_integer: bool) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("out of luck")
            return answer(self, is_integer=is_integer)

        monkeypatch.setattr(LinearSolver, "_answer", failing)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            solution = solved("transformer")
        assert any("The linear solver failed" in str(w.message) for w in raised)
        assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
        return steps_of(solution)

    assert with_failures() == with_failures()


def test_what_no_stage_solves_says_what_was_tried() -> None:
    """Above the floor, so nothing proves that there is no plan: the smallest peak found is told."""
    problem = without_phases(mlp(5))
    budget_nbytes = Solver(problem, effort=0.0).smallest_peak().floor_nbytes + 1
    solution = Solver(problem, effort=0.01).solve(budget_nbytes)
    assert solution.status is Status.INFEASIBLE
    assert solution.timeline.peak_nbytes > budget_nbytes > solution.floor_nbytes
    assert {"smallest", "rearrange"} <= set(solution.tried)
    assert solution.left_out == ()
    assert steps_of(solution) == steps_of(Solver(problem, effort=0.01).solve(budget_nbytes))
