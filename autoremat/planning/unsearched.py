"""Plans that nobody has to search for: given ones, torch's own, and the leanest that is known.

Enters: a stated graph, and what was asked for. Leaves: a `Choice`, whether it fits or not.
"""

from __future__ import annotations

from contextlib import suppress

from autoremat_solver import Plan, ProblemError, Solver
from autoremat_solver.policies import save_all_but

from autoremat.planning import remembered
from autoremat.planning.choice import Choice, given
from autoremat.planning.read import Reader
from autoremat.planning.simulated import REMEMBERED, SAVE_ALL, as_simulated, simulated_peaks
from autoremat.problem.subject import Subject

AT_ONCE_S = 2.0  # for the plan that a budget below the resident bytes is refused with


def choose_fixed(
    subject: Subject, plan: Plan, method: str, budget_nbytes: int, *, reads: bool
) -> Choice:
    """A given plan, whether it fits or not.

    Args:
        subject: the graph.
        plan: a valid plan of it.
        method: where the plan comes from.
        budget_nbytes: what it should fit.
        reads: whether the real peak is read from the code that Inductor generates.
    """
    problem = subject.lowered.problem
    solution = given(problem, plan, method)
    if reads:
        return Reader(subject, budget_nbytes).read(solution)
    peaks = simulated_peaks(subject.lowered, plan)
    return as_simulated(subject, solution, budget_nbytes, peaks)


def choose_torch(subject: Subject, budget_nbytes: int) -> Choice | None:
    """Torch's own partition; None if it is not safe."""
    reader = Reader(subject, budget_nbytes)
    return reader.read_own() if reader.unplanned.own is not None else None


def choose_without_search(subject: Subject, budget_nbytes: int, *, reads: bool) -> Choice:
    """The leanest plan that is known at once, for a budget that no plan can fit.

    What an earlier search has left, or else what is lean among the plans that nothing has to be
    solved for. It is remembered, so that its peak is accepted as a budget.

    Args:
        subject: the graph.
        budget_nbytes: below what is resident.
        reads: whether the real peak is read from the code that Inductor generates.
    """
    problem = subject.lowered.problem
    known = remembered.recall(problem)
    plans = {"local search": Solver(problem, time_limit_s=AT_ONCE_S).lean_plan()}
    with suppress(ProblemError):  # some values may not be saved
        plans[SAVE_ALL] = save_all_but(problem)
    peaks = {
        name: simulated_peaks(subject.lowered, plan).needed_nbytes for name, plan in plans.items()
    }
    if known is not None:
        plans[REMEMBERED], peaks[REMEMBERED] = known.plan, known.peak_nbytes
    best: Choice | None = None
    for name in sorted(plans, key=lambda name: peaks[name]):
        if best is None or peaks[name] < best.needed_nbytes:  # generated code may take more
            new = choose_fixed(subject, plans[name], name, budget_nbytes, reads=reads)
            best = new if best is None or new.needed_nbytes < best.needed_nbytes else best
    assert best is not None, "there is a plan"
    remembered.remember(problem, best.solution.plan, best.needed_nbytes)
    return best
