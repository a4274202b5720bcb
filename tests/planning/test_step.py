"""What is held beside the graphs of one step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoremat.planning.nesting import (
    Beside,
    Crossing,
    Kept,
    Region,
    Returned,
    beside_each,
    highest,
)


def beside(
    order: Sequence[int],
    number: int,
    kept: Sequence[Kept],
    returned: Sequence[Returned],
    existing_nbytes: int = 0,
) -> Beside:
    """What a graph finds in those of its runs that find the most."""
    each = list(beside_each(kept, returned, existing_nbytes))
    return highest(found for n, found in zip(order, each, strict=True) if n == number)


@pytest.mark.parametrize(
    ("order", "number", "held", "gradients"),
    [
        # forward 0, forward 1, forward 2, backward 2, backward 1, backward 0
        ([0, 1, 2], 0, 0, 20 + 40),
        ([0, 1, 2], 1, 100, 40),
        ([0, 1, 2], 2, 100 + 200, 0),
        # 1 runs in every layer: its last run finds the most in the forward
        ([0, 1, 1, 2], 1, 100 + 200, 40),
        ([0, 1, 2, 1, 2], 2, 100 + 200 + 400 + 200, 0),
        ([1, 1, 1], 1, 400, 0),
        ([0], 0, 0, 0),
    ],
)
def test_what_earlier_runs_hold_and_later_ones_have_returned(order, number, held, gradients):
    """Graphs keep 100, 200 and 400 bytes for their backward and return 10, 20 and 40."""
    crossing = [Kept((100, 200, 400)[n]) for n in order]
    returned = [Returned((10, 20, 40)[n]) for n in order]
    assert beside(order, number, crossing, returned) == Beside(held, gradients)


def test_the_first_run_may_find_the_most_in_its_backward():
    """Where later gradients are larger than what crosses: the sum is that of the first run."""
    returned = [Returned(100), Returned(1000), Returned(100)]
    found = beside([0, 1, 0], 0, [Kept(5)] * 3, returned)
    assert found == Beside(held_nbytes=10, gradients_nbytes=1100 - 10)
    assert found.most_nbytes == 1100


def test_existing_gradients_are_no_new_ones():
    """What later runs return is added to gradients that are resident already."""
    kept, returned = [Kept(7), Kept(7)], [Returned(10), Returned(50)]
    assert beside([0, 1], 0, kept, returned, 20) == Beside(0, 30)
    assert beside([0, 1], 0, kept, returned, 80) == Beside(0, 0)


def test_gradients_of_a_parameter_that_several_runs_read_are_there_once():
    """Three runs return 100 each: the second finds those of the last, and adds up one by one."""
    returned = [Returned(0, 60), Returned(0, 60), Returned(100)]
    kept = [Kept(0)] * 3
    assert beside([0, 1, 2], 0, kept, returned) == Beside(0, 160)
    assert beside([0, 1, 2], 1, kept, returned) == Beside(0, 160)
    assert beside([0, 1, 2], 2, kept, returned) == Beside(0, 0)


@pytest.mark.parametrize(
    ("number", "held", "most"),
    [
        (0, 0, 0),
        (1, 100 + 3, 100),  # the first of a checkpoint, which keeps a state of 3 until then
        (2, 100 + 3 + 20, 100 + 3 + 200),  # goes forward beside what the other has returned
        (3, 100 + 3 + 20, 100 + 3),  # after the checkpoint
        (4, 100 + 3 + 200, 100 + 3 + 200),
    ],
)
def test_what_a_checkpoint_drops_is_there_again_in_its_backward(number, held, most):
    """Beside its own later runs only; of what it returns, that of the last one is passed on."""
    first, second = Region(7, is_gone=True, state_nbytes=3), Region(7, is_gone=True)
    kept = [
        Kept.of(Region(), Crossing(100), 10),
        Kept.of(first, Crossing(200), 20),
        Kept.of(second, Crossing(200), 20),
        Kept.of(Region(), Crossing(200), 20),
        Kept.of(Region(), Crossing(200), 20),
    ]
    found = list(beside_each(kept, [Returned(0)] * 5))
    assert found[number] == (held, most)


def test_a_layer_in_eager_mode_does_not_part_the_checkpoint_that_it_is_in():
    """What the runs on both sides of it drop is there again together."""
    region = Region(7)
    kept = [Kept.of(region, Crossing(200), 20), Kept.of(region), Kept.of(region, Crossing(200), 20)]
    found = list(beside_each(kept, [Returned(0)] * 3))
    assert found[-1] == (20, 20 + 200)


def test_parameters_that_stay_gathered_wait_in_a_checkpoint_and_outside():
    assert Kept.of(Region(), Crossing(200), 20, 5).waiting_nbytes == 205
    assert Kept.of(Region(), Crossing(200), 20, 5).known_nbytes == 200  # beside code in eager mode
    assert Kept.of(Region(7, is_gone=True), Crossing(200), 20, 5).waiting_nbytes == 5


def test_what_runs_of_a_checkpoint_return_waits_if_somebody_holds_it():
    """As hidden states do that a model collects."""
    kept = [
        Kept.of(Region(7), Crossing(200), 20),
        Kept.of(Region(7), Crossing(200), 20),
        Kept.of(Region(), Crossing(50), 5),
    ]
    found = list(beside_each(kept, [Returned(0)] * 3))
    assert found == [(0, 0), (20, 20 + 200), (40, 40)]
