"""An answer is kept for runs that are as others were, and found anew for all others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoremat.planning.nesting import Region
from autoremat.planning.peaks import KnownPeaks, Peaks
from autoremat.planning.ran import Ran

PLAN: Any = object()  # peaks are not asked what plans are like


def asked(known: KnownPeaks, part: list[Ran], plan: Any = PLAN, beside: int = 0) -> bool:
    """Whether the peaks of a part were found anew."""
    found = []

    def find() -> Peaks:
        found.append(part)
        return Peaks(1, 2, 3)

    assert known.of(part, {"a": plan}, beside, find) == Peaks(1, 2, 3)
    return bool(found)


def test_runs_as_they_were_are_known():
    """Whichever objects stand for them."""
    known = KnownPeaks()
    assert asked(known, [Ran("a"), Ran("a")])
    assert not asked(known, [Ran("a"), Ran("a")])
    assert asked(known, [Ran("a")])
    assert not asked(known, [Ran("a"), Ran("a")])


@pytest.mark.parametrize(
    "change",
    [
        lambda ran: replace(ran, name="b"),
        lambda ran: replace(ran, region=Region(is_gone=True)),
        lambda ran: replace(ran, held=0.0),
        lambda ran: replace(ran, lasting=0.5),
        lambda ran: replace(ran, is_kept=True),
        lambda ran: replace(ran, again_nbytes=4),
        lambda ran: replace(ran, adding_nbytes=4),
        lambda ran: replace(ran, is_spare=True),
    ],
)
def test_whatever_is_known_of_a_run_may_change_its_peak(change: Callable[[Ran], Ran]):
    """As it does while the step runs."""
    known = KnownPeaks()
    assert asked(known, [Ran("a")])
    assert asked(known, [change(Ran("a"))])


def test_another_plan_or_more_beside_it_is_another_question():
    """And what was found for plans that are gone is gone with them."""
    known, other = KnownPeaks(), object()
    assert asked(known, [Ran("a")])
    assert asked(known, [Ran("a")], beside=1)
    assert not asked(known, [Ran("a")])
    assert asked(known, [Ran("a")], plan=other)
    assert asked(known, [Ran("a")])
