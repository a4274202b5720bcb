"""The largest budget of what is allocated whose plan stays within one of what is reserved."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autoremat.reserved.search import MOST_PLANS, Tried, largest_within

FLOOR = 300  # no plan allocates less


def search(limit: int, reserved: Callable[[int], int]) -> tuple[Tried[int] | None, int]:
    """Where a plan uses all of its budget up to 1,000, and reserves what a function says."""

    def plan(budget: int) -> Tried[int]:
        allocated = min(budget, 1000)
        return Tried(budget, allocated, reserved(allocated), budget)

    best, tried = largest_within(limit, plan, lambda budget: FLOOR if budget < FLOOR else None)
    assert len(tried) <= MOST_PLANS
    return best, len(tried)


def test_one_plan_is_enough_where_it_is_within():
    """A budget of what is allocated as large as that of what is reserved."""
    best, plans = search(1200, lambda allocated: allocated + 100)
    assert best is not None
    assert best.allocated_nbytes == 1000
    assert plans == 1


@pytest.mark.parametrize("limit", [420, 600, 777, 999])
@pytest.mark.parametrize(
    "reserved",
    [
        lambda allocated: allocated + 100,
        lambda allocated: int(1.2 * allocated),
        lambda allocated: allocated + (allocated * 7919) % 101,  # not monotone
        lambda allocated: -(-(allocated + 40) // 20) * 20,
    ],
)
def test_what_is_found_is_within(limit: int, reserved: Callable[[int], int]):
    """And uses most of it."""
    best, _ = search(limit, reserved)
    assert best is not None
    assert reserved(best.allocated_nbytes) == best.reserved_nbytes <= limit
    assert best.reserved_nbytes >= 0.9 * limit


def test_the_leanest_plan_is_tried_before_nothing_is_found():
    """300 are allocated at least and reserve 390, all else 600: 395 are enough, 380 are not."""

    def reserved(allocated: int) -> int:
        return 390 if allocated == FLOOR else 600

    assert search(395, reserved)[0] == Tried(FLOOR, FLOOR, 390, FLOOR)
    assert search(380, reserved)[0] is None


def test_where_no_plan_allocates_so_little_none_is_made():
    """Nothing is tried."""
    assert search(200, lambda allocated: allocated) == (None, 0)
