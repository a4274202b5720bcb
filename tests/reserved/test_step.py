"""Several steps, one after the other, as the caching allocator sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoremat.reserved.replay import COLLECTING, compare, replay
from autoremat.reserved.settings import MIB
from autoremat.reserved.step import Event, GraphEvents, StepMemory, Update

# A weight of 16 MiB, a batch of 2, an activation of 32 that crosses to the backward, a gradient of
# 16, and a loss.
GRAPH = GraphEvents.of(
    forward=[[1, 32 * MIB], [2, 512]],
    backward=[[3, 16 * MIB], [1, 0]],
    gradients=[3],
)
# AdamW in its multi-tensor form: two states of 16, and 16 for as long as it steps.
TEMPORARY = (Event("root", 16 * MIB), Event("root", 0))
ADAMW = Update((Event("first", 16 * MIB), Event("second", 16 * MIB), *TEMPORARY), TEMPORARY)
STEP = StepMemory(before=(16 * MIB,), batch=(2 * MIB,), graphs=(GRAPH,))


def live_after(step: StepMemory, steps: int) -> int:
    """Bytes that are asked for and not freed."""
    live: dict[object, int] = {}
    for block, nbytes in step.events(steps):
        assert (block in live) is not bool(nbytes), "allocated once, freed once"
        if nbytes:
            live[block] = nbytes
        else:
            del live[block]
    return sum(live.values())


def test_a_step_leaves_its_weights_its_batch_and_its_gradients():
    """16 + 2 + 16 MiB, after each step."""
    for steps in (1, 2, 5):
        assert live_after(STEP, steps) == 34 * MIB


def test_the_optimizer_makes_its_state_in_the_first_step():
    """32 MiB more, from then on."""
    for steps in (1, 2, 5):
        assert live_after(replace(STEP, update=ADAMW), steps) == 66 * MIB


def test_gradients_that_exist_are_added_to():
    """They stay: the backward's own go as it ends."""
    kept = replace(STEP, gradients=(16 * MIB,))
    assert live_after(kept, 3) == 34 * MIB
    peak = replay(kept.events()).peak_allocated_nbytes
    # In the backward: weight, both gradients, batch of this step, activation, loss.
    assert peak == (16 + 16 + 16 + 2 + 32) * MIB + 512


def test_gradients_that_are_added_go_with_their_graph():
    """Of two graphs the first one's backward finds no new gradient of the second's."""
    second = GraphEvents.of([[1, 2 * MIB], [2, 512]], [[3, 16 * MIB], [1, 0]], [3])
    kept = replace(STEP, graphs=(GRAPH, second), gradients=(16 * MIB, 16 * MIB))
    peak = replay(kept.events()).peak_allocated_nbytes
    # In the second's backward: weight, both gradients and the new one, batch, activations, losses.
    assert peak == (16 + 32 + 16 + 2 + 32 + 2) * MIB + 2 * 512
    assert live_after(kept, 2) == (16 + 32 + 2) * MIB


def test_the_peak_is_where_the_second_step_has_the_state():
    """Worked out by segments, in MiB.

    Step 1: A of 16 for the weight, B of 20 for the batch, C of 32 for the activation, S of 2 for
    the loss. The gradient of 16 takes what is left of B but for 2. The activation is free as the
    state is made, which takes both halves of C; the temporary needs D of 16.
    Step 2: the gradient is gone, the new batch takes 2 of D (the smallest that fits), the old one
    goes, so B is free: 20. The activation fits nowhere: E of 32. That is the peak of what is
    reserved: 16 + 20 + 32 + 2 + 16 + 32 = 118, with weight 16, state 32, batch 2 and activation 32
    allocated, 82. B's 20, D's 14 and S's 2 are free. At the backward's end the gradient, in B, and
    the loss, in S, make 98 and 512 bytes allocated: the peak of that.
    """
    replayed = replay(replace(STEP, update=ADAMW).events(2))
    assert replayed.peak_allocated_nbytes == 98 * MIB + 512
    assert replayed.peak_reserved_nbytes == 118 * MIB
    assert replayed.at_peak.reserved_nbytes == 118 * MIB
    assert replayed.at_peak.allocated_nbytes == 82 * MIB
    assert replayed.at_peak.free_nbytes == (20 * MIB, 14 * MIB, 2 * MIB)
    assert replayed.at_peak.segments == 6


def test_more_steps_reserve_nothing_more_once_they_are_alike():
    """What the third step reserves, the tenth does."""
    step = replace(STEP, update=ADAMW)
    assert (
        replay(step.events(10)).peak_reserved_nbytes == replay(step.events(3)).peak_reserved_nbytes
    )


def test_backwards_go_the_other_way_round():
    """Two graphs: what the first keeps lives through the second's backward."""
    names = [block for block, _ in replace(STEP, graphs=(GRAPH, GRAPH)).events(1)]
    order = [name[1] for name in names if isinstance(name[0], int) and name[2] in (1, 3)]
    assert order == [0, 1, 1, 1, 0, 0]


def test_settings_are_held_against_each_other():
    """Growing sizes: pages help; and each case is replayed alone."""
    sizes = (64, 66, 70, 76, 84)
    events = [Event(n, size * MIB) for n, size in enumerate(sizes) for size in (size, 0)]
    step = StepMemory((), (), (GraphEvents(tuple(events), ()),))
    found = compare(step, 1 << 40)
    assert found[""].peak_reserved_nbytes == sum(sizes) * MIB
    assert found["expandable_segments:True"].peak_reserved_nbytes == 100 * MIB
    assert found["max_split_size_mb:64"].peak_reserved_nbytes == sum(sizes) * MIB
    # A segment is collected once more than 0.8 x 0.95 of the device is taken.
    small = compare(step, 250 * MIB)[COLLECTING]
    assert small.peak_reserved_nbytes < 250 * MIB
    assert not small.is_out


def test_a_device_without_room_ends_the_replay():
    """And says so."""
    replayed = replay(STEP.events(), device_nbytes=60 * MIB)
    assert replayed.is_out
    assert replayed.peak_reserved_nbytes <= 60 * MIB


def test_what_is_not_allocated_cannot_be_freed():
    """Nor allocated twice."""
    with pytest.raises(KeyError):
        replay([Event("x", 0)])
    with pytest.raises(KeyError, match="already"):
        replay([Event("x", 1), Event("x", 1)])


def test_state_that_is_made_anew_takes_the_place_of_what_the_step_before_has_made():
    """As of an optimizer that assigns `state["rms"] = ...`; nothing is left behind."""
    update = Update((Event(0, 1024),), (Event(1, 1024), Event(0, 0)))
    step = StepMemory(before=(512,), batch=(512,), graphs=(), update=update)
    assert live_after(step, 5) == live_after(step, 1) == 512 + 512 + 1024
