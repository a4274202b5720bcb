"""Parts of a range that are worth a plan of their own."""

from __future__ import annotations

import pytest
from autoremat_solver import Plan, simulate

from autoremat.planning.ranges import covered
from autoremat.planning.sizes import Symbols, subject_at
from autoremat.planning.subranges import MOST, Cell, Corner, _make_best, plan_parts
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from tests.planning.test_formula import planned
from tests.planning.test_ranges import largest
from tests.sizing.test_fit import Words, words

SUPPOSED = {(1,): 70.0, (2,): 70.0, (3,): 85.0, (4,): 90.0, (5,): 94.0, (6,): 98.0, (7,): 99.0}


def tried(times: dict[Cell, float], slowest: float, turned_out: dict[Cell, float | None]):
    """Cells in the order in which they are planned for; plans take what is supposed by default."""
    found: list[Cell] = []

    def took_us(cell: Cell) -> float | None:
        found.append(cell)
        return turned_out.get(cell, times[cell])

    _make_best([*times, (len(times) + 1,)], times, slowest, took_us)
    return found


def test_the_part_that_saves_most_comes_first():
    """Of eight, each as likely as the others, and nothing is saved in the last."""
    assert tried(SUPPOSED, 100.0, {}) == [(2,), (4,), (5,)]


def test_where_a_plan_is_dropped_another_part_is_tried():
    """Without (4,), (3,) is worth it beside (5,)."""
    assert tried(SUPPOSED, 100.0, {(4,): None}) == [(2,), (4,), (5,), (3,)]


def test_a_plan_counts_as_it_has_turned_out():
    """It is slower than supposed, so that parts within it are worth plans of their own."""
    assert tried({(1,): 90.0, (2,): 90.0}, 100.0, {(2,): 96.0}) == [(2,), (1,)]


def test_what_is_dropped_is_not_tried_for_ever():
    assert len(tried(SUPPOSED, 100.0, dict.fromkeys(SUPPOSED))) == 5


@pytest.mark.parametrize(("slower", "count"), [(1.02, 0), (1.04, 1)])
def test_three_percent_are_worth_a_plan(slower: float, count: int):
    assert len(tried({(1,): 100.0}, 100.0 * slower, {})) == count


def test_the_smallest_sizes_have_room_for_all_values():
    """What is found lies within the ranges, and something of it needs to recompute nothing."""
    part = planned(Words(), words(6), 140_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (16, 48))
    plan, problem = part.choice.solution.plan, subject.lowered.problem
    known = covered(subject, plan, names)
    lows = dict.fromkeys(names, 2)
    budget = simulate(problem, plan).peak_nbytes
    assert rich_nbytes(subject, subject.sizes) > budget

    def corners(plan: Plan, budget_nbytes: int, lows: Symbols) -> list[Corner]:
        found: list[Corner] = []
        plan_parts(subject, plan, budget_nbytes, lows, known, lambda c: found.append(c) or 1.0)
        return found

    found = corners(plan, budget, lows)
    assert 1 <= len(found) <= MOST
    for corner in found:
        assert all(2 <= n <= subject.sizes[symbol] for symbol, n in corner.numbers.items())
        assert corner.shrunk > 1
    # With room for all at the largest sizes, or of a single size, none is worth it.
    assert corners(as_written(problem), 1 << 40, lows) == []
    assert corners(plan, budget, subject.sizes) == []


def test_a_part_is_as_large_as_nothing_has_to_be_recomputed():
    part = planned(Words(), words(6), 140_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (16, 48))
    plan = part.choice.solution.plan
    budget = simulate(subject.lowered.problem, plan).peak_nbytes
    found: list[Corner] = []
    known = covered(subject, plan, names)
    lows = dict.fromkeys(names, 2)
    plan_parts(subject, plan, budget, lows, known, lambda c: found.append(c) or 1.0)
    fitting = [c.numbers for c in found if rich_nbytes(subject, c.numbers) <= budget]
    assert fitting
    for numbers in fitting:
        for symbol, most in subject.sizes.items():
            more = {**numbers, symbol: numbers[symbol] + 1}
            assert numbers[symbol] == most or rich_nbytes(subject, more) > budget


def rich_nbytes(subject: Subject, numbers: Symbols) -> int:
    """The peak of the step that recomputes nothing, at sizes."""
    problem = subject_at(subject, numbers).lowered.problem
    return simulate(problem, as_written(problem)).peak_nbytes
