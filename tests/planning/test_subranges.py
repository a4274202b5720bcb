"""Parts of a range that are worth a plan of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from autoremat_solver import Plan, simulate

from autoremat.planning.ranges import covered
from autoremat.planning.sizes import Symbols, subject_at
from autoremat.planning.subranges import MOST, Cell, Corner, Worth, _make_best, plan_parts
from autoremat.planning.subranges import WORTH as SHIPPED
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from tests.planning.test_formula import planned
from tests.planning.test_ranges import largest
from tests.sizing.test_fit import Words, words

FASTEST = 69.0
WORTH = Worth(0.002, 0.03)
SUPPOSED = {(1,): 70.0, (2,): 70.0, (3,): 85.0, (4,): 90.0, (5,): 94.0, (6,): 98.0, (7,): 99.0}


def tried(times: dict[Cell, float], slowest: float, turned_out: dict[Cell, float | None]):
    """Cells in the order in which they are planned for; plans take what is supposed by default."""
    found: list[Cell] = []

    def make(cell: Cell) -> float | None:
        found.append(cell)
        return turned_out.get(cell, times[cell])

    _make_best([*times, (len(times) + 1,)], times, (FASTEST, slowest), make, WORTH)
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
def test_a_plan_has_to_save_what_it_is_worth(slower: float, count: int):
    assert len(tried({(1,): 100.0}, 100.0 * slower, {})) == count


def test_a_plan_that_recomputes_nothing_is_worth_it_sooner():
    """Op by op, where it takes no search; kernels would be compiled anew for it."""
    assert len(tried({(1,): FASTEST}, 1.004 * FASTEST, {})) == 1
    assert SHIPPED["eager"].of(0.0) < SHIPPED["eager"].of(0.1) == SHIPPED["inductor"].of(0.0)


@dataclass(frozen=True)
class Ranged:
    """A small model, planned for the largest sizes of its ranges.

    Attributes:
        subject: stated there.
        plan: its plan, which recomputes.
        names: of its sizes.
        budget_nbytes: what the plan takes.
    """

    subject: Subject
    plan: Plan
    names: Mapping[Any, str]
    budget_nbytes: int

    @property
    def lows(self) -> dict[Any, int]:
        """The smallest sizes."""
        return dict.fromkeys(self.names, 2)

    def corners(
        self,
        plan_at: Callable[[Corner], float | None],
        plan: Plan | None = None,
        budget_nbytes: int = 0,
        lows: Symbols | None = None,
    ) -> list[Symbols]:
        """Those that are planned for, in this order."""
        found: list[Symbols] = []

        def noted(corner: Corner) -> float | None:
            assert corner.shrunk > 1
            found.append(corner.numbers)
            return plan_at(corner)

        plan, known = plan or self.plan, covered(self.subject, self.plan, self.names)
        budget_nbytes, lows = budget_nbytes or self.budget_nbytes, lows or self.lows
        plan_parts(self.subject, plan, budget_nbytes, lows, known, noted, worth=WORTH)
        return found


@pytest.fixture(scope="module")
def ranged() -> Ranged:
    part = planned(Words(), words(6), 140_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (16, 48))
    plan = part.choice.solution.plan
    found = Ranged(subject, plan, names, simulate(subject.lowered.problem, plan).peak_nbytes)
    assert rich_nbytes(subject, subject.sizes) > found.budget_nbytes
    return found


def test_a_part_that_saves_enough_comes_before_a_larger_one_that_does_not():
    """All of (2,) is 2.5 % faster, which would be the most in sum."""
    assert tried({(1,): 100.0, (2,): 100.6}, 103.2, {}) == [(1,)]


def test_the_smallest_sizes_have_room_for_all_values(ranged: Ranged):
    """What is found lies within the ranges, and something of it needs to recompute nothing."""
    found = ranged.corners(lambda _: 1.0)
    assert 1 <= len(found) <= MOST
    for numbers in found:
        assert all(2 <= n <= ranged.subject.sizes[symbol] for symbol, n in numbers.items())
    # With room for all at the largest sizes, or of a single size, none is worth it.
    rich = as_written(ranged.subject.lowered.problem)
    assert ranged.corners(lambda _: 1.0, rich, 1 << 40) == []
    assert ranged.corners(lambda _: 1.0, lows=ranged.subject.sizes) == []


def test_a_part_is_as_large_as_nothing_has_to_be_recomputed(ranged: Ranged):
    found, budget = ranged.corners(lambda _: 1.0), ranged.budget_nbytes
    fitting = [numbers for numbers in found if rich_nbytes(ranged.subject, numbers) <= budget]
    assert fitting
    for numbers in fitting:
        for symbol, most in ranged.subject.sizes.items():
            more = {**numbers, symbol: numbers[symbol] + 1}
            assert numbers[symbol] == most or rich_nbytes(ranged.subject, more) > budget


def test_no_part_is_planned_for_twice(ranged: Ranged):
    """The largest that has room is the same of many; where nothing comes of it, they have less."""
    found = ranged.corners(lambda _: None)
    assert len(found) == len({tuple(numbers.values()) for numbers in found}) > 1
    for one, other in itertools.pairwise(found):
        assert any(other[symbol] < n for symbol, n in one.items())


def test_a_part_is_never_all_of_the_range(ranged: Ranged):
    """Though the simulator has room there: the plan for all sizes knows what else it takes."""
    assert all(n != ranged.subject.sizes for n in ranged.corners(lambda _: 1.0, None, 1 << 40))


def test_a_size_that_is_always_the_same_is_no_range(ranged: Ranged):
    """The other one is divided as finely as if it were alone."""
    symbol, other = ranged.subject.sizes
    fixed = {symbol: ranged.subject.sizes[symbol], other: 2}
    found = ranged.corners(lambda _: None, lows=fixed)
    assert found
    assert all(numbers[symbol] == fixed[symbol] for numbers in found)


def rich_nbytes(subject: Subject, numbers: Symbols) -> int:
    """The peak of the step that recomputes nothing, at sizes."""
    problem = subject_at(subject, numbers).lowered.problem
    return simulate(problem, as_written(problem)).peak_nbytes
