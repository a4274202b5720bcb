"""What is held beside the graphs of one step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoremat.memory.spread import Traffic
from autoremat.planning.nesting import (
    Around,
    Beside,
    Crossing,
    Kept,
    Region,
    Returned,
    beside_each,
    highest,
)
from autoremat.planning.ran import Ran
from autoremat.planning.repeats import STEADY
from autoremat.planning.step import Step


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


def test_what_passes_is_beside_the_next_forward_alone():
    """As logits are beside the loss that is made of them, and gone as the backward begins."""
    kept, returned = [Kept(100), Kept(0, passing_nbytes=50), Kept(7)], [Returned(0)] * 3
    assert beside([0, 1, 2], 2, kept, returned) == Beside(100, 0, passing_nbytes=50)
    assert beside([0, 1, 2], 1, kept, returned) == Beside(100)
    found = Beside(100, 20, passing_nbytes=50)
    assert (found.first_nbytes, found.most_nbytes) == (150, 120)
    assert found.stated == Beside(100, 20)
    assert found.throughout == Beside(150, 0)


def test_what_passes_adds_to_no_backward_of_another_run():
    """One run finds the most in its forward, another one in its backward."""
    kept = [Kept(10, passing_nbytes=500), Kept(300), Kept(0)]
    found = beside([0, 1, 1], 1, kept, [Returned(0), Returned(0), Returned(40)])
    assert (found.first_nbytes, found.most_nbytes) == (510, 310)


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
    stays = Traffic(run_nbytes=5)
    assert Kept.of(Region(), Crossing(200), 20, stays).waiting_nbytes == 205
    assert Kept.of(Region(), Crossing(200), 20, stays).known_nbytes == 200  # beside eager code
    assert Kept.of(Region(7, is_gone=True), Crossing(200), 20, stays).waiting_nbytes == 5


def test_what_is_returned_and_held_by_nobody_is_beside_the_next_forward_only():
    """Of what crosses, the part that the backward does not need."""
    kept = [Kept.of(Region(is_gone=gone), Crossing(100, 30)) for gone in (True, False, True)]
    found = list(beside_each(kept, [Returned(0)] * 3))
    assert found == [(0, 0), (70 + 30, 70), (70 + 100, 70 + 100)]


def test_what_is_known_of_one_run_counts_in_place_of_what_its_graph_takes_at_most():
    """One that gathers less, in forward and backward, and one that finds its unit gathered."""
    most, own = Traffic(50, 10, run_nbytes=20), Traffic(30, 5, run_nbytes=20, unit=1)
    assert own.after(own) == Traffic(10, 5, unit=1)
    assert own.after(most) == own
    runs = [Region(traffic=own), Region(traffic=own.after(own)), Region()]
    found = list(beside_each([Kept.of(r, traffic=most) for r in runs], [Returned(0)] * 3))
    assert found == [(-25, -20), (20 - 45, 20 - 40), (20, 20)]


def test_gradients_are_reduced_from_a_buffer_once_a_later_run_has_returned_some():
    """As large as the largest of those; what the root returns is reduced at the very end."""
    returned = [Returned(0, reduced_nbytes=nbytes) for nbytes in (9, 5, 7, 0)]
    assert [most for _, most in beside_each([Kept(0)] * 4, returned)] == [7, 7, 0, 0]


def test_what_runs_of_a_checkpoint_return_waits_if_somebody_holds_it():
    """As hidden states do that a model collects."""
    kept = [
        Kept.of(Region(7), Crossing(200), 20),
        Kept.of(Region(7), Crossing(200), 20),
        Kept.of(Region(), Crossing(50), 5),
    ]
    found = list(beside_each(kept, [Returned(0)] * 3))
    assert found == [(0, 0), (20, 20 + 200), (40, 40)]


def step_after(*steps: str) -> Step:
    """What is known after steps that run these graphs, whose leanest plans need nothing."""
    found = Step()
    run(found, *steps)
    return found


def run(step: Step, *steps: str) -> None:
    """Steps that run these graphs."""
    for graphs in steps:
        step.begin()
        step._ran = [Ran(graph) for graph in graphs]
        step.note_longest()


@pytest.mark.parametrize("others", [["AC"], ["AC", "AD"]])
def test_plans_for_kinds_that_have_come_to_be_apart_are_outgrown(
    others: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Also where they turned out to have room for kinds that came later, so many as these are."""
    monkeypatch.setattr(Step, "_leanest_nbytes", lambda *_: 0)
    step = step_after("AB", "AC")
    step.room.leave(1, Around())
    run(step, *others)
    assert step.room.suffices(1, Around())
    assert not step.room.is_needed
    assert not step.room.is_outgrown(1, Around())
    run(step, *["AB", *others] * (STEADY + 1))
    assert step.room.is_outgrown(1, Around())
    step.room.leave(1, Around())
    assert not step.room.is_outgrown(1, Around())


def test_plans_that_were_made_for_one_kind_are_not_outgrown_where_others_come_apart(
    monkeypatch: pytest.MonkeyPatch,
):
    """They were never as lean as both together need: no other plans would be better."""
    monkeypatch.setattr(Step, "_leanest_nbytes", lambda *_: 0)
    step = step_after("AB")
    step.room.leave(1, Around())
    run(step, "AC")
    assert step.room.is_needed
    assert step.room.suffices(1, Around())
    run(step, *["AB", "AC"] * (STEADY + 1))
    assert not step.room.is_needed
    assert not step.room.is_outgrown(1, Around())
