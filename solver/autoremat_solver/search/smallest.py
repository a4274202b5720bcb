"""The smallest peak that a plan reaches.

Enters: a `Search`. Leaves: the candidate of the smallest peak found, the faster one of two whose
peaks are nearly the same. It starts from the plans for all budgets alone, so the budgets asked for
before do not matter.
"""

from __future__ import annotations

import time

from autoremat_solver.plans.front import Candidate, arranged, leaner
from autoremat_solver.plans.local_search import squeeze
from autoremat_solver.search.portfolio import ChainPlans
from autoremat_solver.search.rearrange import lowered
from autoremat_solver.search.stages import TRIALS, Search

SQUEEZE_STEP = 0.97
LEAN_TIME = 1.5  # of the fastest plan's time: what is called slow
SLOW_TIME = 3.0  # the same: what is too slow to start from
LEAN_SHARE = 0.6  # of the time, for the start that is not slow
SEARCHES = 6  # whole searches for the smallest peak
GOAL = 0.6  # of the distance to the floor, for each of them


def smallest_candidate(search: Search, deadline: float) -> Candidate:
    """The plan of the smallest peak: lowered from lean plans, then searched for at lower goals.

    Args:
        search: all it finds is added to its front.
        deadline: `time.monotonic()` at which to stop.
    """
    if not search.is_prepared:
        return _lowest_from(search, search.front.smallest, deadline)
    # The leanest plan of all may recompute on many levels. Starting below it where little is
    # recomputed gives nearly the same peak in a fraction of the time.
    now = time.monotonic()
    lean = _leanest(search, LEAN_TIME)
    best = _lowest_from(search, lean, now + LEAN_SHARE * (deadline - now))
    leanest = _leanest(search, SLOW_TIME)
    if leanest is not lean:
        best = leaner(best, _lowest_from(search, leanest, deadline))
    plain = search.plain_chains
    for chain in plain:
        best = _smallest_of_chain(search, chain, best)
    for _ in range(0 if plain else SEARCHES):
        lower = _searched_below(search, best, GOAL, deadline)
        lower = lower or _searched_below(search, best, 1.0, deadline)
        if lower is None:
            break
        best = _lowest_from(search, lower, deadline)
    return best


def _leanest(search: Search, times: float) -> Candidate:
    """The plan of the smallest peak among those that take so many times the fastest one's time."""
    most_us = times * search.portfolio[-1].time_us
    return next(m for m in search.portfolio if m.time_us <= most_us)


def _smallest_of_chain(search: Search, chain: ChainPlans, best: Candidate) -> Candidate:
    """The smallest peak of a chain's exact tables, or the plan given, by bisection."""
    low, high = search.bounds.floor_nbytes, best.peak_nbytes
    while low < high:
        middle = (low + high) // 2
        search.from_chain(chain, middle)
        new = search.front.fastest_within(middle)
        if new is None:
            low = middle + 1
        else:
            best, high = new, new.peak_nbytes
    return best


def _lowest_from(search: Search, best: Candidate, deadline: float) -> Candidate:
    """The lowest plan that saving fewer values, and then more reruns, lead to."""
    indexed, floor = search.indexed, search.bounds.floor_nbytes
    while best.peak_nbytes > floor and best.saved is not None:
        goal = max(floor, int(best.peak_nbytes * SQUEEZE_STEP))
        new = squeeze(indexed, best, goal, trials=TRIALS, deadline=deadline)
        if new is None:
            break
        best = new
        search.front.add(best)
    for steps in lowered(indexed, best.steps, floor, deadline=deadline):
        best = arranged(indexed, steps, "rearranged")
        search.front.add(best)
    return best


def _searched_below(
    search: Search, best: Candidate, share: float, deadline: float
) -> Candidate | None:
    """A plan below a peak that a search finds at that share of its distance to the floor."""
    floor = search.bounds.floor_nbytes
    above_floor = best.peak_nbytes - floor
    if above_floor <= 0 or time.monotonic() >= deadline:
        return None
    apart = search.apart()
    apart.at_budget(floor + int(above_floor * share), deadline)
    found = apart.front.members
    for new in found:
        search.front.add(new)
    lower = found[0] if found else None
    return lower if lower is not None and lower.peak_nbytes < best.peak_nbytes else None
