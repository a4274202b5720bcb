"""For how many runs of a block a step is planned."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import pytest

from autoremat.planning.ran import Ran, with_spare
from autoremat.planning.repeats import STEADY, Repeats, Seen, granted


def seen(*runs: int) -> Seen:
    """Steps with so many runs each."""
    found = Seen(runs[0], runs[0])
    for count in runs[1:]:
        found = found.and_of(Seen(count, count))
    return found


@pytest.mark.parametrize(
    ("runs", "blocks", "expected"),
    [
        ([7], 8, 8),
        ([7] * STEADY, 8, 7),
        ([7] * STEADY + [6], 8, 8),
        ([8], 8, 8),
        ([14], 8, 16),  # two calls of each before a backward
        ([6], 1, 6),
        ([6, 4], 1, 12),
        ([6, 6], 0, 6),
        ([4, 6], 0, 12),
        ([1], 1, 1),
    ],
)
def test_as_many_runs_are_planned_for_as_there_may_be(runs, blocks, expected):
    """As many as there are blocks; in a loop, twice as many as there were."""
    assert seen(*runs).expected(blocks) == expected


def after(*steps: list[str], blocks: int = 8) -> Repeats:
    """What is known after steps that run these graphs, all of one kind of block."""
    repeats = Repeats(lambda _: blocks)
    repeats.kinds |= {graph: "block" for runs in steps for graph in runs}
    for runs in steps:
        repeats.step_is_over()
        repeats.note([runs])
    return repeats


def test_as_many_runs_are_planned_for_as_there_are_blocks_now():
    """However many there were before, and however often each has run."""
    assert Seen(4, 4, blocks=4).expected(5) == 5
    assert Seen(7, 7, blocks=4).expected(5) == 10
    assert Seen(8, 6, blocks=8).expected(5) == 5
    assert Seen(7, 7, STEADY, blocks=8).expected(9) == 9
    assert Seen(7, 7, STEADY, blocks=8).and_of(Seen(9, 9, blocks=9)) == Seen(9, 9, blocks=9)


def test_graphs_of_one_kind_of_block_count_together():
    """The first block's graph is another one: its input needs no gradient."""
    order = ["first", *["other"] * 5]
    for repeats in (after(order), after(["first", *["other"] * 7])):
        assert repeats.spare(order, repeats.rooms) == {"other": 2}


def test_steps_that_run_none_of_a_kind_say_nothing_of_it():
    repeats = after(["block"] * 4, [], ["block"] * 4, blocks=1)
    assert not repeats.is_unclear
    assert repeats.spare(["block"] * 4, repeats.rooms) == {}


def test_parts_of_a_step_are_counted_apart():
    """Reentrant checkpoints: what they take again is there in the backward of its part only."""
    repeats = Repeats(lambda _: 8)
    repeats.note([["block"] * 8, ["block"] * 2])
    assert repeats.spare(["block"] * 8, repeats.rooms) == {}


def test_a_loop_is_unclear_until_two_steps_are_known():
    assert after(["block"] * 4, blocks=1).is_unclear
    assert not after(["block"] * 4, ["block"] * 5, blocks=1).is_unclear
    assert not after(["block"] * 4, ["block"] * 4, blocks=1).is_unclear
    assert not after(["block"], blocks=1).is_unclear
    assert not after(["block"] * 4, blocks=0).is_unclear  # nobody knows of a loop
    assert not after(["block"] * 4, blocks=4).is_unclear


def test_room_is_needed_once_a_number_varies():
    repeats = after(["block"] * 4, ["block"] * 4, blocks=1)
    repeats.planned()
    assert not repeats.needs_room
    repeats.step_is_over()
    repeats.note([["block"] * 3])
    assert repeats.needs_room
    repeats.planned()
    assert not repeats.needs_room


def test_plans_are_outgrown_by_half_of_their_room():
    """A number that grows with each step is planned for now and then, not in each."""
    repeats = after(["block"] * 8, ["block"] * 7, blocks=1)
    repeats.planned()
    due = []
    for count in range(9, 33):
        repeats.step_is_over()
        repeats.note([["block"] * count])
        if repeats.is_outgrown:
            due.append(count)
            repeats.planned()
    assert due == [12, 18, 27]


def test_room_that_is_needed_no_more_is_given_back():
    repeats = after(*[["block"] * 7] * (STEADY - 1))
    repeats.planned()
    assert not repeats.is_outgrown
    repeats.step_is_over()
    repeats.note([["block"] * 7])
    assert repeats.is_outgrown


def test_runs_more_stand_behind_the_last_and_return_what_is_new():
    """A parameter of a loop has its gradient from the last run's backward on: there is one."""
    order = [Ran("block", again_nbytes=5, adding_nbytes=3), Ran("block"), Ran("head")]
    found = with_spare(order, {"block": 2})
    assert [(ran.name, ran.again_nbytes, ran.adding_nbytes, ran.is_spare) for ran in found] == [
        ("block", 5, 3, False),
        ("block", 5, 3, False),
        ("block", 5, 3, True),
        ("block", 0, 0, True),
        ("head", 0, 0, False),
    ]


def test_room_is_needed_for_each_block_that_is_new():
    """Again and again, also where there is some room left."""
    blocks = 4
    repeats = Repeats(lambda _: blocks)
    for count in (4, 5, 6, 7):
        repeats.step_is_over()
        repeats.note([["block"] * count])
        repeats.planned()
        assert not repeats.needs_room
        blocks = count + 1
        assert repeats.needs_room


def test_what_needs_little_gets_all_of_its_room_before_what_needs_much():
    """And that gets what is left, to the last run of it."""
    needs = {"small": 1, "large": 10}

    def fits(rooms: Mapping[Hashable, int]) -> bool:
        return sum(needs[kind] * count for kind, count in rooms.items()) <= 79

    assert granted({"small": 8, "large": 8}, fits) == {"small": 8, "large": 7}
    assert granted({"small": 8, "large": 1}, fits) == {"small": 8, "large": 1}
    assert granted({"large": 8}, lambda _: False) == {"large": 0}
