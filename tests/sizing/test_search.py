"""The search for sizes, on made-up answers: no model, no torch."""

from __future__ import annotations

import random

import pytest

from autoremat.sizing.model import FitPoint, Refused, Way
from autoremat.sizing.search import (
    Answer,
    Sizes,
    find_fastest,
    find_largest,
    first_that_fits,
)

BUDGET = 1_000_000


def linear(fixed: int, lean: float, plain: float, noise: int = 0):
    """Peaks that grow with the size; a smallest peak may be missed by some noise."""

    def ask(size: int) -> Answer:
        jitter = random.Random(size).randrange(noise + 1)
        needs, free = fixed + int(lean * size) + jitter, fixed + int(plain * size)
        if needs > BUDGET:
            return Refused(size, needs, "too much")
        share = 0.0 if free <= BUDGET else 1 - BUDGET / free
        time_us = 50 + size * (1 + 2 * share**2)
        peak = min(free, BUDGET)
        return FitPoint(
            size, Way(peak, time_us, share, True), Way(free, 50.0 + size, 0.0, free <= BUDGET)
        )

    return ask


def exhaustive(ask, step: int = 1, most: int = 2000) -> int:
    return max(n for n in range(step, most + 1, step) if isinstance(ask(n), FitPoint))


@pytest.mark.parametrize("fixed", [0, 10_000, 900_000])
@pytest.mark.parametrize("lean", [700.0, 12_345.0])
@pytest.mark.parametrize("step", [1, 8])
def test_the_largest_is_that_of_an_exhaustive_search(fixed: int, lean: float, step: int):
    ask = linear(fixed, lean, plain=7 * lean)
    sizes = Sizes(ask, step, None, BUDGET)
    first = first_that_fits(sizes, step)
    if first is None:
        assert fixed + lean * step > BUDGET
        return
    assert find_largest(sizes, first).size == exhaustive(ask, step)
    assert len(sizes.refused) <= 3
    assert len(sizes.answers) <= 10


@pytest.mark.parametrize("noise", [3_000, 30_000])
def test_what_ends_it_is_a_size_that_fits_beside_one_that_does_not(noise: int):
    """A search of plans is not monotone: then the answer fits, and the next one does not."""
    ask = linear(50_000, 800.0, 5_000.0, noise)
    sizes = Sizes(ask, 1, None, BUDGET)
    first = first_that_fits(sizes, 1)
    assert first is not None
    found = find_largest(sizes, first)
    assert isinstance(ask(found.size), FitPoint)
    assert isinstance(ask(found.size + 1), Refused)
    assert len(sizes.answers) <= 20


@pytest.mark.parametrize("off_nbytes", [-10_000, -3_000, 3_000, 10_000])
def test_lines_that_are_off_by_little_cost_a_few_sizes_more(off_nbytes: int):
    """What a size that does not fit would need is itself a plan, and not the smallest there is.

    From the end of those lines a row of halves would begin at twice the size.
    """
    ask = linear(20_000, 1_600.0, 8_000.0)

    def with_less_or_more(size: int) -> Answer:
        answer = ask(size)
        if isinstance(answer, Refused) and answer.smallest_peak_nbytes is not None:
            return Refused(size, answer.smallest_peak_nbytes + off_nbytes, answer.reason)
        return answer

    sizes = Sizes(with_less_or_more, 1, None, BUDGET)
    first = first_that_fits(sizes, 1)
    assert first is not None
    assert find_largest(sizes, first).size == exhaustive(ask)
    assert len(sizes.answers) <= 12


@pytest.mark.parametrize("most", [1, 7, 64])
def test_no_size_is_above_the_most(most: int):
    sizes = Sizes(linear(0, 100.0, 1000.0), 1, most, BUDGET)
    first = first_that_fits(sizes, 1)
    assert first is not None
    assert find_largest(sizes, first).size == most == max(sizes.answers)


def test_a_size_that_the_model_does_not_accept_ends_it_too():
    """As positions of a sequence do: nobody knows what more would need."""
    ask = linear(0, 10.0, 100.0)
    sizes = Sizes(
        lambda size: ask(size) if size <= 257 else Refused(size, None, "no"), 1, None, BUDGET
    )
    first = first_that_fits(sizes, 1)
    assert first is not None
    assert find_largest(sizes, first).size == 257


def test_a_batch_of_one_may_be_refused_where_two_are_not():
    """Batch normalisation needs two."""
    ask = linear(0, 10.0, 100.0)
    sizes = Sizes(lambda n: ask(n) if n > 1 else Refused(n, None, "no"), 1, None, BUDGET)
    first = first_that_fits(sizes, 1)
    assert first is not None
    assert first.size == 2


def test_the_fastest_is_within_two_percent_of_the_best_of_all_sizes():
    ask = linear(20_000, 2_000.0, 20_000.0)
    sizes = Sizes(ask, 1, None, BUDGET)
    first = first_that_fits(sizes, 1)
    assert first is not None
    largest = find_largest(sizes, first)
    found = find_fastest(sizes, largest, 8)
    every = [ask(n) for n in range(1, largest.size + 1)]
    best = max(one.per_second for one in every if isinstance(one, FitPoint))
    assert found.per_second >= 0.98 * best
    assert found.size < largest.size
