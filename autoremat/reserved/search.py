"""The largest budget of what is allocated whose plan reserves no more than was asked for.

Enters: a limit, and what plans for a budget. Leaves: the plan that uses the limit best of those
that were tried, or None. Guarantees: what is returned was emulated to be within the limit. What is
reserved need not fall with what is allocated: so nothing is concluded from one budget for another,
and a better one may exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_PLANS = 6
GOOD_USE = 0.99  # of the limit: a plan that reserves so much is not loosened further
LEAST_STEP = 0.005  # of the limit, from the second failure on: twice as much each time

Made = TypeVar("Made")


@dataclass(frozen=True)
class Tried(Generic[Made]):
    """A plan for a budget.

    Attributes:
        budget_nbytes: of what is allocated.
        allocated_nbytes: its peak, as budgets count it.
        reserved_nbytes: its peak, as the device counts it.
        made: the plan, whatever it is.
    """

    budget_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    made: Made


def largest_within(
    limit_nbytes: int,
    plan: Callable[[int], Tried[Made]],
    smallest: Callable[[int], int | None],
) -> tuple[Tried[Made] | None, list[Tried[Made]]]:
    """The best plan that reserves no more than a limit, if any was found, and all that were tried.

    Args:
        limit_nbytes: of what is reserved.
        plan: for a budget of what is allocated, which some plan fits.
        smallest: for a budget, None if some plan fits it; else the smallest that one does.
    """
    budget_nbytes, floor_nbytes = limit_nbytes, 0
    tried: list[Tried[Made]] = []
    while len(tried) < MOST_PLANS:
        if any(one.budget_nbytes == budget_nbytes for one in tried):
            break
        least_nbytes = smallest(budget_nbytes)
        if least_nbytes is not None:
            # Known to be the leanest: it is tried once, if it can be within the limit at all.
            if floor_nbytes or least_nbytes > limit_nbytes:
                break
            budget_nbytes = floor_nbytes = least_nbytes
            continue
        found = plan(budget_nbytes)
        tried.append(found)
        next_nbytes = _next(limit_nbytes, found, tried)
        if next_nbytes is None:
            break
        budget_nbytes = max(next_nbytes, floor_nbytes)
    fitting = [one for one in tried if one.reserved_nbytes <= limit_nbytes]
    return max(fitting, key=lambda one: one.allocated_nbytes, default=None), tried


def _next(limit_nbytes: int, found: Tried[Made], tried: list[Tried[Made]]) -> int | None:
    """The budget to try after a plan; None where nothing is to be gained."""
    above_nbytes = found.reserved_nbytes - limit_nbytes
    failed = [one.budget_nbytes for one in tried if one.reserved_nbytes > limit_nbytes]
    if above_nbytes > 0:  # by more each time: what is idle need not shrink with the plan
        least_nbytes = int(LEAST_STEP * limit_nbytes) << len(failed)
        less_nbytes = max(above_nbytes, least_nbytes if len(failed) > 1 else 0)
        return min(found.budget_nbytes, found.allocated_nbytes) - less_nbytes
    is_full = found.reserved_nbytes >= GOOD_USE * limit_nbytes
    if not failed or is_full:
        return None
    middle_nbytes = (found.budget_nbytes + min(failed)) // 2
    return min(found.budget_nbytes - above_nbytes, middle_nbytes)
