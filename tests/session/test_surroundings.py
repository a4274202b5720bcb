"""What looks into a step have shown, of all its situations."""

from __future__ import annotations

from dataclasses import replace

from autoremat.planning.nesting import Around
from autoremat.session.surroundings import Surroundings
from autoremat.watch.look import Look
from autoremat.watch.present import Present


def surroundings() -> Surroundings:
    """Of a step with two backwards, the second with gradients beside it."""
    found = Surroundings(Present)
    found.learn(Look(0, 100, situation="forward"), is_final=False)
    found.learn(Look(0, 300, 40, situation="backward"), is_final=True)
    found.learn(Look(0, 500, 20, situation="backward, gradients"), is_final=True)
    return found


def test_of_several_backwards_the_highest_counts():
    """Whichever was looked into last."""
    found = surroundings()
    assert found.found == Around(100, 400, 40)
    found.learn(Look(0, 300, 40, situation="backward"), is_final=True)
    assert found.found == Around(100, 400, 40)
    found.learn(Look(0, 350, 20, situation="backward, gradients"), is_final=True)
    assert found.found == Around(100, 250, 40)


def test_what_was_planned_for_stays_known_until_a_backward_shows_otherwise():
    """A forward says nothing of it."""
    found = surroundings()
    found.settled()
    found.learn(Look(0, 120, situation="forward"), is_final=False)
    assert found.found == Around(120, 400, 40)
    found.learn(Look(0, 130, 0, situation="backward"), is_final=True)
    assert found.found == Around(120, 10, 0)


def test_a_look_that_could_not_see_all_takes_nothing_back():
    """Of a backward through checkpoints that have not run again yet; a look at all of it counts."""
    found = surroundings()
    partial = Look(0, 600, 10, situation="backward, gradients", is_partial=True)
    found.learn(partial, is_final=True)
    assert found.found == Around(100, 500, 40)
    found.learn(partial._replace(beside_nbytes=200, eager_nbytes=60), is_final=True)
    assert found.found == Around(100, 500, 60)
    found.learn(Look(0, 200, 10, situation="backward, gradients"), is_final=True)
    assert found.found == Around(100, 200, 40)


def test_what_no_backward_shows_passes():
    """It is beside forwards alone, once a look has seen all of each backward, but for scalars."""
    found = Surroundings(Present)
    found.learn(Look(0, 100_000, situation="forward"), is_final=False)
    partial = Look(0, 30_000, 40, situation="backward", is_partial=True)
    found.learn(partial, is_final=True)
    assert found.found == Around(100_000, 0, 40)
    found.learn(partial._replace(is_partial=False), is_final=True)
    passing = Around(31_024, 0, 40, passing_nbytes=68_976)
    assert found.found == passing
    found.learn(partial, is_final=True)
    assert found.found == passing
    found.settled()
    assert found.now == passing
    found.learn(Look(0, 120_000, situation="forward"), is_final=False)
    assert found.found == replace(passing, held_nbytes=51_024)
