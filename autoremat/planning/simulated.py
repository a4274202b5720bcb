"""The choice where the simulator's peak is the real one: with the eager executor.

Enters: a stated graph, its solver and a budget. Leaves: a `Choice`. Guarantees: of the plans that
are known, none that fits is left for one that does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from autoremat_solver import Plan, Problem, ProblemError, Solution, Solver, simulate
from autoremat_solver.plan import Status
from autoremat_solver.policies import save_all_but

from autoremat.planning.choice import Baseline, Choice, as_proven, written_out
from autoremat.problem.lower import Lowered, as_written, without_spare_states
from autoremat.problem.subject import Peaks, Subject

# Known without a search.
FASTEST, SAVE_ALL, LEAN = "fastest", "save-all", "local search"


def choose_by_simulation(subject: Subject, solver: Solver, budget_nbytes: int) -> Choice:
    """The solver's answer, taken at its word: for executors that follow the plan to the byte."""
    solution = solver.solve(budget_nbytes)
    if solution.status is Status.INFEASIBLE:
        solution = _least_known(subject.lowered, solver, solution, budget_nbytes)
    peaks = simulated_peaks(subject.lowered, solution.plan)
    return as_simulated(subject, solution, budget_nbytes, peaks)


def _least_known(
    lowered: Lowered, solver: Solver, smallest: Solution, budget_nbytes: int
) -> Solution:
    """Of the plans known, the fastest whose real peak fits; if none does, the smallest.

    The solver counts the state of every draw, the real peak only those that are replayed: a plan
    that repeats nothing may take less than the smallest that a short search has found.
    """
    problem, fastest = lowered.problem, solver.fastest()
    found = [smallest, with_plan(fastest, problem, fastest.plan, FASTEST)]
    known = plans_at_once(problem)
    found += [with_plan(fastest, problem, plan, name) for name, plan in known.items()]
    peaks = [simulated_peaks(lowered, solution.plan).needed_nbytes for solution in found]
    fitting = [s for s, peak in zip(found, peaks, strict=True) if peak <= budget_nbytes]
    if fitting:
        best = min(fitting, key=lambda s: s.timeline.time_us)
        best = as_proven(best) if best is smallest else best
    else:
        best = replace(found[peaks.index(min(peaks))], status=Status.INFEASIBLE)
    return searched_by(best, [smallest, fastest])


def searched_by(solution: Solution, searches: Iterable[Solution]) -> Solution:
    """The solution with the stages of all the searches that it was chosen from."""
    searches = list(searches)
    tried = dict.fromkeys(name for search in searches for name in search.tried)
    left_out = dict.fromkeys(name for search in searches for name in search.left_out)
    is_late = solution.status is Status.FEASIBLE and left_out
    return replace(
        solution,
        status=Status.TIME_LIMIT if is_late else solution.status,
        tried=tuple(tried),
        left_out=tuple(left_out),
    )


def plans_at_once(problem: Problem) -> dict[str, Plan]:
    """Lean plans that need no search: a refusal may rest on them, so every search knows them."""
    found = {LEAN: Solver(problem, time_limit_s=0.0).lean_plan()}
    with suppress(ProblemError):  # some values may not be saved
        found[SAVE_ALL] = save_all_but(problem)
    return found


def leanest_at_once(subject: Subject, written: Callable[[Plan, str], Choice]) -> Choice:
    """The smallest real peak of the plans that need no search.

    Args:
        subject: the graph.
        written: a plan, and where it comes from, as a choice; asked only while a plan's simulated
            peak is below the smallest real one.
    """
    plans = plans_at_once(subject.lowered.problem)
    peaks = {
        name: simulated_peaks(subject.lowered, plan).needed_nbytes for name, plan in plans.items()
    }
    best: Choice | None = None
    for name in sorted(plans, key=lambda name: peaks[name]):
        if best is None or peaks[name] < best.needed_nbytes:  # generated code may take more
            new = written(plans[name], name)
            best = new if best is None or new.needed_nbytes < best.needed_nbytes else best
    assert best is not None, "there is a plan"
    return best


def with_plan(fastest: Solution, problem: Problem, plan: Plan, method: str) -> Solution:
    """Another plan, with what the solver proved of plans under any budget.

    What it proved for one budget would not hold for a plan whose modelled peak is above that.
    """
    found = replace(fastest, plan=plan, timeline=simulate(problem, plan), method=method)
    return found if fastest.status is Status.UNPROVEN else as_proven(found)


def simulated_peaks(lowered: Lowered, plan: Plan) -> Peaks:
    """Peaks of the plan, without the states of draws that it repeats nowhere."""
    needed_nbytes = _simulated_peak_nbytes(lowered.problem, plan)
    if not lowered.shell.free_nbytes:
        return Peaks(needed_nbytes, needed_nbytes)
    alone = replace(lowered, shell=replace(lowered.shell, room_nbytes=0))
    return Peaks(_simulated_peak_nbytes(alone.problem, plan), needed_nbytes)


def _simulated_peak_nbytes(problem: Problem, plan: Plan) -> int:
    return simulate(without_spare_states(problem, plan), plan).peak_nbytes


def as_simulated(subject: Subject, solution: Solution, budget_nbytes: int, peaks: Peaks) -> Choice:
    """A solution as a choice, its peaks being the simulator's."""
    modules = written_out(subject, solution.plan)
    fits = peaks.needed_nbytes <= budget_nbytes
    return Choice(
        *(*modules, solution.method, solution, *peaks, fits),
        baseline=functools.partial(simulated_baseline, subject),
        baseline_time_us=lambda: simulated_baseline(subject).time_us,
        is_read=False,
    )


def simulated_baseline(subject: Subject) -> Baseline:
    """What the step takes without a plan."""
    plain = without_plan(subject)
    peak_nbytes = simulated_peaks(subject.lowered, plain).nbytes
    return Baseline(peak_nbytes, simulate(subject.lowered.problem, plain).time_us)


def without_plan(subject: Subject) -> Plan:
    """Every operation once; where the graph itself says what to make again, that again.

    Such are checkpoints of the user's, and parameters that are gathered for each use. What was
    asked for with `recompute=` is part of a plan.
    """
    problem = subject.lowered.problem
    makes_again = any(value.must_recompute for value in problem.values)
    if makes_again and not subject.constraints.asked:
        with suppress(ProblemError):  # something may neither be saved nor made again
            return save_all_but(problem)
    return as_written(problem)
