"""One strategy of the solver at a time, so that a reader sees what each of them buys.

Enters: a problem and a budget in bytes. Leaves: the fastest plan within the budget that one
strategy finds alone, or None. All strategies share the solver's parts and its simulator; the
solver itself runs them together and improves what they find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autoremat_solver.chains.blocks import far_reaching, narrow_places
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.plans.greedy import greedy_candidate
from autoremat_solver.plans.heuristics import segment_ends, simple_recipes
from autoremat_solver.plans.realise import KEEP, Retention
from autoremat_solver.program.formulation import Formulation
from autoremat_solver.program.lazy_rows import LazyRows
from autoremat_solver.search.portfolio import (
    COARSE,
    FINE,
    chain_candidate,
    chain_plans,
    priced_save_sets,
)

ROUNDS = 12  # relaxations of an integer program, as the solver solves
INTEGER_SHARE = 0.25  # of the time limit, for each integer solve
FAR_SHARE = 0.25  # of the forward: what lives longer is no part of a block


@dataclass(frozen=True)
class Task:
    """What a strategy is asked for.

    Attributes:
        indexed: the step.
        budget_nbytes: the peak allowed, resident bytes included.
        time_limit_s: seconds that it may take.
        deadline: `time.monotonic()` at which to stop.
    """

    indexed: Indexed
    budget_nbytes: int
    time_limit_s: float
    deadline: float

    @classmethod
    def beginning_now(cls, indexed: Indexed, budget_nbytes: int, time_limit_s: float) -> Task:
        """A task whose time runs from now on."""
        return cls(indexed, budget_nbytes, time_limit_s, time.monotonic() + time_limit_s)


Strategy = Callable[[Task], Candidate | None]


def greedy(task: Task) -> Candidate | None:
    """Save all, then drop what is cheapest to recompute per byte at the peak until it fits."""
    plan = greedy_candidate(task.indexed, task.budget_nbytes, deadline=task.deadline)
    return plan if plan.peak_nbytes <= task.budget_nbytes else None


def uniform(task: Task) -> Candidate | None:
    """Save what crosses evenly spread cuts [Chen2016]; the best number of segments that fits."""
    recipes = (r for r in simple_recipes(task.indexed) if "segment" in r[0] or "sqrt" in r[0])
    return _fastest_within(
        task, (candidate(task.indexed, saved, name, kept) for name, saved, kept in recipes)
    )


def ilp_one_copy(task: Task) -> Candidate | None:
    """The integer program; what it recomputes is kept until its last read."""
    return _fastest_within(task, _program_plans(task, Formulation(task.indexed), [KEEP]))


def ilp_repeats(task: Task) -> Candidate | None:
    """The integer program; what it recomputes lives within its block and may be made again."""
    indexed = task.indexed
    far = far_reaching(indexed, FAR_SHARE)
    cuttings = dict.fromkeys(tuple(narrow_places(indexed, far, n)) for n in (COARSE, FINE))
    per_block = [
        Retention(segment_end=segment_ends(indexed, list(places))) for places in cuttings if places
    ]
    return _fastest_within(task, _program_plans(task, Formulation(indexed), per_block))


def hierarchical(task: Task) -> Candidate | None:
    """Dynamic programs over chains of blocks, which recompute on several levels [Beaumont2019]."""
    return _fastest_within(task, _chain_candidates(task))


STRATEGIES: dict[str, Strategy] = {
    "greedy": greedy,
    "uniform": uniform,
    "ILP, one copy": ilp_one_copy,
    "ILP, repeats": ilp_repeats,
    "hierarchical": hierarchical,
}


def _fastest_within(task: Task, plans: Iterable[Candidate]) -> Candidate | None:
    """The fastest plan within the budget of those that are found in time; ties to the lower."""
    best: Candidate | None = None
    for plan in plans:
        if plan.peak_nbytes <= task.budget_nbytes and (
            best is None or (plan.time_us, plan.peak_nbytes) < (best.time_us, best.peak_nbytes)
        ):
            best = plan
        if time.monotonic() >= task.deadline:
            break
    return best


def _program_plans(
    task: Task, formulation: Formulation, retentions: list[Retention]
) -> Iterator[Candidate]:
    """Plans of the integer program, an equal share of the time for each retention."""
    for left, retention in zip(range(len(retentions), 0, -1), retentions, strict=True):
        now = time.monotonic()
        yield from LazyRows(formulation, retention, "ILP").candidates(
            task.budget_nbytes,
            rounds=ROUNDS,
            integer_s=INTEGER_SHARE * task.time_limit_s / len(retentions),
            deadline=now + (task.deadline - now) / left,
        )


def _chain_candidates(task: Task) -> Iterator[Candidate]:
    """Plans spread over all memory sizes, then those nearest to the budget, for each cutting."""
    save_sets = priced_save_sets(Formulation(task.indexed), task.deadline)
    for chain in chain_plans(task.indexed, save_sets, task.deadline):
        yield from chain.candidates(task.indexed)
        for table in chain.tables:
            slots = table.distinct_slots()
            low, high = 0, len(slots) - 1
            while low <= high:
                middle = (low + high) // 2
                plan = chain_candidate(task.indexed, table, slots[middle], chain.name)
                yield plan
                if plan.peak_nbytes <= task.budget_nbytes:
                    low = middle + 1
                else:
                    high = middle - 1
