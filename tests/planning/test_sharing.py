"""How runs share a budget: which plan each gets, in numbers alone."""

from __future__ import annotations

import itertools

import pytest

from autoremat.planning.nesting import Around, Region, Returned
from autoremat.planning.sharing import Member, Share, Shared, Way, divide

LEAN, MIDDLE, RICH = Way(10, 20, 60, 130.0), Way(20, 30, 60, 110.0), Way(50, 50, 60, 100.0)


def step(
    order: list[int],
    *members: Member,
    is_nested: bool = True,
    gradient_nbytes: int = 0,
    checkpoints: list[int] | None = None,
    **around: int,
) -> Shared:
    """A step of these graphs, each run of which returns gradients of its own."""
    gradients = [Returned(gradient_nbytes)] * len(order)
    regions = [Region(number) for number in checkpoints or [0] * len(order)]
    spare = [False] * len(order)
    return Shared(members, order, gradients, regions, Around(**around), 0, spare, is_nested)


def block(*ways: Way, resident_nbytes: int = 100, has_one_plan: bool = False) -> Member:
    """A graph that could run in these ways."""
    return Member(resident_nbytes, ways, has_one_plan=has_one_plan)


def test_what_a_run_keeps_is_beside_the_later_runs_only():
    """The last run's own peak has it already; code in eager mode finds all of it."""
    shared = step([0, 0, 0], block(LEAN, RICH))
    assert shared.peak_nbytes([Share(0)]) == 100 + 2 * 10 + 60
    assert shared.peak_nbytes([Share(0, 1, 1)]) == 100 + 2 * 10 + 60
    assert shared.peak_nbytes([Share(0, 1, 2)]) == 100 + 10 + 50 + 60
    assert step([0, 0], block(RICH, LEAN), eager_nbytes=90).peak_nbytes([Share(0)]) == 100 + 190


def test_gradients_of_later_runs_are_there_in_the_backward_of_earlier_ones():
    """The first run finds seven of them, and nothing that crosses."""
    shared = step([0] * 8, block(LEAN), gradient_nbytes=30)
    assert shared.peak_nbytes([Share(0)]) == 100 + 60 + 7 * 30


@pytest.mark.parametrize("budget_nbytes", [240, 290, 350, 420, 600])
def test_no_pair_of_ways_is_faster_within_the_budget(budget_nbytes: int):
    """Against all pairs and all numbers of rich runs."""
    shared = step([0] * 8, block(LEAN, MIDDLE, RICH))
    (found,) = divide(shared, budget_nbytes)
    assert shared.peak_nbytes([found]) <= budget_nbytes
    every = itertools.product(range(3), range(3), range(9))
    fitting = [[Share(*share)] for share in every]
    fitting = [share for share in fitting if shared.peak_nbytes(share) <= budget_nbytes]
    assert shared.time_us([found]) == min(map(shared.time_us, fitting))


@pytest.mark.parametrize("budget_nbytes", [240, 290, 350, 420, 600])
def test_runs_that_have_to_be_alike_get_the_fastest_way_that_all_can_go(budget_nbytes: int):
    """What the last runs could have of their own goes to a graph whose runs may differ."""
    shared = step([0, 1] * 4, block(LEAN, MIDDLE, RICH, has_one_plan=True), block(LEAN, RICH))
    found = divide(shared, budget_nbytes)
    assert shared.peak_nbytes(found) <= budget_nbytes
    alike = [[Share(way)] for way in range(3)]
    pairs = [[Share(0, 1, runs)] for runs in range(5)]
    fitting = [
        [*first, *second]
        for first, second in itertools.product(alike, pairs)
        if shared.peak_nbytes([*first, *second]) <= budget_nbytes
    ]
    assert shared.time_us(found) == min(map(shared.time_us, fitting))
    assert found[0].rich_runs in (0, 4)


def test_bytes_go_where_they_save_the_most():
    """Of two graphs, the one that recomputes more cheaply does."""
    dear = block(Way(10, 20, 60, 500.0), Way(50, 50, 60, 100.0))
    shared = step([0, 1, 0, 1, 0, 1], block(LEAN, RICH), dear)
    cheap_share, dear_share = divide(shared, 350)
    assert dear_share.rich_runs == 3 or dear_share == Share(1)
    assert cheap_share.rich_runs < 3


def test_all_runs_are_alike_where_their_backwards_are_not_nested():
    """In a pipeline no run is the last."""
    shared = step([0, 0, 0], block(LEAN, RICH), is_nested=False)
    assert divide(shared, 190) == [Share(0)]


def test_what_cannot_be_kept_is_exceeded_by_the_least():
    """The runs that are above the budget decide, not the time."""
    shared = step([0, 1], block(LEAN, RICH), block(Way(0, 10, 90, 10.0), Way(5, 10, 70, 99.0)))
    assert divide(shared, 120) == [Share(0), Share(1)]


def test_the_leanest_has_the_smallest_peak_not_the_smallest_sum():
    """Against all pairs; and asked for what it takes, it is given again."""
    shared = step([0, 0, 0], block(Way(10, 20, 120, 100.0), Way(40, 50, 50, 100.0)))
    every = itertools.product(range(2), range(2), range(4))
    least_nbytes = min(shared.peak_nbytes([Share(*share)]) for share in every)
    for budget_nbytes in (0, 150, least_nbytes):
        assert shared.peak_nbytes(divide(shared, budget_nbytes)) == least_nbytes


def test_what_checkpoints_drop_is_free_but_for_the_rest_of_each():
    """Two regions of two runs each: only the first run of a region is beside another."""
    one_plan = block(LEAN, RICH, has_one_plan=True)
    shared = step([0, 0, 0, 0], one_plan, checkpoints=[1, 1, 2, 2])
    assert shared.peak_nbytes([Share(1)]) == 100 + 50 + 60
    assert divide(shared, 210) == [Share(1)]
    assert divide(shared, 200) == [Share(0)]
    assert divide(step([0, 0, 0, 0], one_plan, checkpoints=[1, 2, 3, 4]), 160) == [Share(1)]
