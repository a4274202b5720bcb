"""The smallest peak that a plan reaches.

Enters: a `Search` with the plans for all budgets. Leaves: the candidate of the smallest peak found,
the faster one of two whose peaks are nearly the same. The budgets asked for before do not matter.
"""

from __future__ import annotations

from autoremat_solver.effort import Effort
from autoremat_solver.plans.front import Candidate, arranged, leaner
from autoremat_solver.search.portfolio import ChainPlans, chain_candidate
from autoremat_solver.search.rearrange import lowered, rearranged
from autoremat_solver.search.state import Search

LEAN_TIME = 1.5  # of the fastest plan's time: what is called slow
SLOW_TIME = 3.0  # the same: what is too slow to start from
LEAN_SHARE = 0.4  # of the effort, for the start that is not slow
SLOW_SHARE = 0.3  # of what is left of it, for the slow one
SEARCHES = 6  # whole searches for the smallest peak
GOALS = (0.6, 1.0)  # of the distance to the floor, for each of them


def smallest_candidate(search: Search, effort: Effort) -> Candidate:
    """The plan of the smallest peak: lowered from lean plans, then searched for at lower goals.

    Args:
        search: all it finds is added to its front.
        effort: for the simulations.
    """
    # The leanest plan of all may recompute on many levels. Starting below it where little is
    # recomputed gives nearly the same peak in a fraction of the time.
    lean = _leanest(search, LEAN_TIME)
    best = _lowest_from(search, lean, effort.part(LEAN_SHARE))
    leanest = _leanest(search, SLOW_TIME)
    if leanest is not lean:
        best = leaner(best, _lowest_from(search, leanest, effort.part(SLOW_SHARE)))
    plain = search.plain_chains
    for chain in plain:
        best = _smallest_of_chain(search, chain, best)
    for left in range(0 if plain else SEARCHES, 0, -1):
        lower = _searched_below(search, best, effort.part(1 / left))
        if lower is None:
            break
        best = _lowest_from(search, lower, effort.part(1 / left))
    return best


def _leanest(search: Search, times: float) -> Candidate:
    """The plan of the smallest peak among those that take so many times the fastest one's time."""
    most_us = times * search.fastest.time_us
    return next(m for m in search.front.members if m.time_us <= most_us)


def _smallest_of_chain(search: Search, chain: ChainPlans, best: Candidate) -> Candidate:
    """The smallest peak of a chain's exact tables, or the plan given, by bisection."""
    low, high = search.bounds.floor_nbytes, best.peak_nbytes
    while low < high:
        middle = (low + high) // 2
        table = chain.table_for(middle)
        if table is not None and table.smallest_slot() <= table.slots:
            search.front.add(chain_candidate(search.indexed, table, table.slots, chain.name))
        new = search.front.fastest_within(middle)
        if new is None:
            low = middle + 1
        else:
            best, high = new, new.peak_nbytes
    return best


def _lowest_from(search: Search, best: Candidate, effort: Effort) -> Candidate:
    """The lowest plan that more reruns lead to."""
    indexed, floor = search.indexed, search.bounds.floor_nbytes
    for steps in lowered(indexed, best.steps, floor, effort):
        best = arranged(indexed, steps, "rearranged")
        search.front.add(best)
    return best


def _searched_below(search: Search, best: Candidate, effort: Effort) -> Candidate | None:
    """A plan below a peak that a search finds part of the way down to the floor."""
    floor = search.bounds.floor_nbytes
    above_floor = best.peak_nbytes - floor
    starts = [member.steps for member in search.front.members[:3]]
    for share in GOALS if above_floor > 0 else ():
        goal_nbytes = min(best.peak_nbytes - 1, floor + int(above_floor * share))
        for steps in rearranged(search.indexed, starts, goal_nbytes, effort.part(0.5)):
            search.front.add(arranged(search.indexed, steps, "rearranged"))
        if search.front.smallest.peak_nbytes < best.peak_nbytes:
            return search.front.smallest
    return None
