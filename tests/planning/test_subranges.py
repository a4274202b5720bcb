"""Parts of a range that are worth a plan of their own."""

from __future__ import annotations

import pytest
from autoremat_solver import simulate

from autoremat.planning.ranges import covered
from autoremat.planning.subranges import MOST, _best, corners_worth_a_plan
from autoremat.problem.lower import as_written
from tests.planning.test_formula import planned
from tests.planning.test_ranges import largest
from tests.sizing.test_fit import Words, words


def test_the_part_that_saves_most_comes_first():
    """Of eight, each as likely as the others, and nothing is saved in the last."""
    times = {(1,): 70.0, (2,): 70.0, (3,): 85.0, (4,): 90.0, (5,): 94.0, (6,): 98.0, (7,): 99.0}
    assert list(_best([(n,) for n in range(1, 9)], times, 100.0)) == [(2,), (4,), (5,)]


@pytest.mark.parametrize(("slower", "count"), [(1.02, 0), (1.04, 1)])
def test_three_percent_are_worth_a_plan(slower: float, count: int):
    found = list(_best([(1,), (2,)], {(1,): 100.0}, 100.0 * slower))
    assert len(found) == count


def test_the_smallest_sizes_have_room_for_all_values():
    """What is found lies within the ranges, and something of it needs to recompute nothing."""
    part = planned(Words(), words(6), 140_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (16, 48))
    plan, problem = part.choice.solution.plan, subject.lowered.problem
    known = covered(subject, plan, names)
    lows = dict.fromkeys(names, 2)
    budget = simulate(problem, plan).peak_nbytes
    assert simulate(problem, as_written(problem)).peak_nbytes > budget
    corners = corners_worth_a_plan(subject, plan, budget, known, lows)
    assert 1 <= len(corners) <= MOST
    for corner in corners:
        assert all(2 <= n <= subject.sizes[symbol] for symbol, n in corner.numbers.items())
        assert corner.shrunk > 1
    # With room for all at the largest sizes, or of a single size, none is worth it.
    assert corners_worth_a_plan(subject, as_written(problem), 1 << 40, known, lows) == []
    assert corners_worth_a_plan(subject, plan, budget, known, subject.sizes) == []
