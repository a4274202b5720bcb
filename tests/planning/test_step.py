"""What is held beside the graphs of one step."""

from __future__ import annotations

import pytest

from autoremat.planning.nesting import Beside, Returned, beside


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
    crossing = [(100, 200, 400)[n] for n in order]
    returned = [Returned((10, 20, 40)[n]) for n in order]
    assert beside(order, number, crossing, returned) == Beside(held, gradients)


def test_the_first_run_may_find_the_most_in_its_backward():
    """Where later gradients are larger than what crosses: the sum is that of the first run."""
    returned = [Returned(100), Returned(1000), Returned(100)]
    found = beside([0, 1, 0], 0, (5, 5, 5), returned)
    assert found == Beside(held_nbytes=10, gradients_nbytes=1100 - 10)
    assert found.most_nbytes == 1100


def test_existing_gradients_are_no_new_ones():
    """What later runs return is added to gradients that are resident already."""
    assert Beside(7, 50).beyond(20) == Beside(7, 30)
    assert Beside(7, 50).beyond(80) == Beside(7, 0)


def test_gradients_of_a_parameter_that_several_runs_read_are_there_once():
    """Three runs return 100 each: the second finds those of the last, and adds up one by one."""
    returned = [Returned(0, 60), Returned(0, 60), Returned(100)]
    assert beside([0, 1, 2], 0, (0, 0, 0), returned) == Beside(0, 160)
    assert beside([0, 1, 2], 1, (0, 0, 0), returned) == Beside(0, 160)
    assert beside([0, 1, 2], 2, (0, 0, 0), returned) == Beside(0, 0)
