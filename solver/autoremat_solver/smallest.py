"""The smallest peak that a plan reaches.

Enters: a `Search`. Leaves: the candidate of the smallest peak found, the faster one of two whose
peaks are nearly the same. It starts from the plans for all budgets alone, so the budgets asked for
before do not matter.
"""

from __future__ import annotations

import time

from autoremat_solver.front import Candidate, arranged, leaner
from autoremat_solver.local_search import squeeze
from autoremat_solver.portfolio import ChainPlans
from autoremat_solver.rearrange import lowered
from autoremat_solver.search import TRIALS, Search

SQUEEZE_STEP = 0.97
LEAN_TIME = 1.5  # of the fastest plan's time: what is called slow
SEARCHES = 6  # whole searches for the smallest peak
GOAL = 0.6  # of the distance to the floor, for each of them


def smallest_candidate(search: Search, deadline: float) -> Candidate:
    """The plan of the smallest peak reached by the portfolio, squeezing it, and lower goals.

    Args:
        search: all it finds is added to its front.
        deadline: `time.monotonic()` at which to stop.
    """
    if not search.is_prepared:
        return _squeezed(search, search.front.smallest, deadline)
    best = _from_lean_plan(search, deadline)
    best = leaner(best, _squeezed(search, search.portfolio[0], deadline))
    for chain in search.chains:
        if chain.is_plain:
            best = _smallest_of_chain(search, chain, best)
    searches = 0 if any(chain.is_plain for chain in search.chains) else SEARCHES
    for _ in range(searches):
        lower = _searched_below(search, best, GOAL, deadline)
        lower = lower or _searched_below(search, best, 1.0, deadline)
        if lower is None:
            break
        best = _squeezed(search, lower, deadline)
    return best


def _from_lean_plan(search: Search, deadline: float) -> Candidate:
    """The lowest peak reached from the leanest plan that is not slow yet.

    The leanest plan of all may recompute on many levels. Starting below it where little is
    recomputed gives nearly the same peak in a fraction of the time.
    """
    most_us = LEAN_TIME * search.portfolio[-1].time_us
    start = next(m for m in search.portfolio if m.time_us <= most_us)
    half = time.monotonic() + 0.5 * (deadline - time.monotonic())
    steps = lowered(search.indexed, start.steps, search.bounds.floor_nbytes, deadline=half)
    lower = arranged(search.indexed, steps, "rearranged")
    search.front.add(lower)
    return lower


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


def _squeezed(search: Search, best: Candidate, deadline: float) -> Candidate:
    """The plan with fewer saved values and more reruns, as long as that lowers its peak."""
    indexed, floor = search.indexed, search.bounds.floor_nbytes
    while best.peak_nbytes > floor:
        goal = max(floor, int(best.peak_nbytes * SQUEEZE_STEP))
        new = None
        if best.saved is not None:
            new = squeeze(indexed, best, goal, trials=TRIALS, deadline=deadline)
        if new is None:
            break
        best = new
    steps = lowered(indexed, best.steps, floor, deadline=deadline)
    lower = arranged(indexed, steps, "rearranged")
    for new in (best, lower):
        search.front.add(new)
    return lower if lower.peak_nbytes < best.peak_nbytes else best


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
