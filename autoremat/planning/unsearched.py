"""Plans that nobody has to search for: given ones, torch's own, and the leanest that is known.

Enters: a stated graph, and what was asked for. Leaves: a `Choice`, whether it fits or not.
"""

from __future__ import annotations

from autoremat_solver import Plan

from autoremat.planning.choice import Choice, given
from autoremat.planning.offloaded import with_copies
from autoremat.planning.reader import Reader
from autoremat.planning.simulated import as_simulated, leanest_at_once, simulated_peaks
from autoremat.problem.subject import Subject


def choose_fixed(
    subject: Subject,
    plan: Plan,
    method: str,
    budget_nbytes: int,
    *,
    reads: bool,
    in_order: bool | None = None,
) -> Choice:
    """A given plan, whether it fits or not.

    Args:
        subject: the graph.
        plan: a valid plan of it.
        method: where the plan comes from.
        budget_nbytes: what it should fit.
        reads: whether the real peak is read from the code that Inductor generates.
        in_order: how it is written out then; None for the better of both ways.
    """
    problem = subject.lowered.problem
    solution = given(problem, plan, method)
    if reads:
        reader = Reader(subject, budget_nbytes)
        if in_order is None:
            return reader.read(solution)
        return with_copies(reader.written(solution, in_order=in_order), problem)
    peaks = simulated_peaks(subject.lowered, plan)
    return as_simulated(subject, solution, budget_nbytes, peaks)


def choose_torch(subject: Subject, budget_nbytes: int) -> Choice | None:
    """Torch's own partition; None if it is not safe."""
    reader = Reader(subject, budget_nbytes)
    return reader.read_own() if reader.unplanned.own is not None else None


def choose_without_search(subject: Subject, budget_nbytes: int, *, reads: bool) -> Choice:
    """The leanest plan that is known at once, for a budget that no plan can fit.

    Args:
        subject: the graph.
        budget_nbytes: below what is resident.
        reads: whether the real peak is read from the code that Inductor generates.
    """
    return leanest_at_once(
        subject,
        lambda plan, method: choose_fixed(subject, plan, method, budget_nbytes, reads=reads),
    )
