"""One graph, one plan on all ranks of a job: the first that one of them has found.

Enters: a stated graph, what is asked of its plan, and a search. Leaves: a `Choice`. Guarantees:
nobody waits for another rank; ranks that state the same problem get the same plan, however much
time load or a late start has left to each search. Without a job, every search counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat_solver import check
from autoremat_solver.plan import Status

from autoremat.ask.plan_file import StoredGraph
from autoremat.planning.asked import choose_stored, fingerprint, store
from autoremat.planning.choice import Choice
from autoremat.problem.shell import closed
from autoremat.problem.subject import Subject
from autoremat.ranks.figures import known_figures, settled
from autoremat.ranks.store import shared_store


@dataclass(frozen=True)
class Found:
    """What a search has found: a `StoredGraph` without its nodes, and what is proven of it."""

    schedule: list[str]
    saved: list[str]
    method: str
    is_own: bool
    status: str
    bound_us: float
    floor_nbytes: int
    tried: list[str]
    left_out: list[str]

    @classmethod
    def of(cls, subject: Subject, choice: Choice) -> Found:
        """The plan of a choice."""
        graph, solution = store(subject, choice), choice.solution
        return cls(
            schedule=list(graph.schedule),
            saved=list(graph.saved),
            method=graph.method,
            is_own=graph.is_own,
            status=solution.status.value,
            bound_us=solution.bound_us,
            floor_nbytes=solution.floor_nbytes,
            tried=list(solution.tried),
            left_out=list(solution.left_out),
        )


def choose_once(
    subject: Subject, budget_nbytes: int, asked: str, search: Callable[[], Choice], *, reads: bool
) -> Choice:
    """What a rank of the job has found for this question, or what this one finds.

    Args:
        subject: the graph.
        budget_nbytes: of the whole step.
        asked: what else decides the plan, in words.
        search: finds a plan.
        reads: whether peaks are read from generated code.
    """
    if shared_store() is None:
        return search()
    problem = subject.lowered.problem
    key = repr((fingerprint(subject.joint), problem, budget_nbytes, asked, reads))
    known = known_figures([key], Found)
    choice = _applied(subject, known[key], budget_nbytes, reads=reads) if known else None
    if choice is not None:
        return choice
    own = search()
    found = Found.of(subject, own)
    counting = settled({key: found}, Found)[key]
    if counting == found:
        return own
    return _applied(subject, counting, budget_nbytes, reads=reads) or own


def _applied(subject: Subject, found: Found, budget_nbytes: int, *, reads: bool) -> Choice | None:
    """Another rank's plan; None where it is none of this rank's graph."""
    schedule, saved = tuple(found.schedule), tuple(found.saved)
    problem = subject.lowered.problem
    if found.is_own and check(problem, closed(problem, schedule)):
        return None
    graph = StoredGraph((), schedule, saved, found.method, found.is_own)
    choice = choose_stored(subject, graph, budget_nbytes, reads=reads)
    if choice is None:
        return None
    solution = replace(
        choice.solution,
        status=Status(found.status),
        bound_us=found.bound_us,
        floor_nbytes=found.floor_nbytes,
        tried=tuple(found.tried),
        left_out=tuple(found.left_out),
    )
    return replace(choice, solution=solution)
