"""No plan repeats what nobody reads."""

from __future__ import annotations

from autoremat_solver import Op, Phase, Plan, Problem, Value, simulate
from autoremat_solver.check import check
from autoremat_solver.solve import without_unread

from tests.reporting.test_report_timeline import AGAIN, SAVE_ALL, chain


def test_a_repeat_that_nobody_reads_is_left_out() -> None:
    """And with it what only that repeat read; the others stay."""
    wasteful = Plan.of(("fa", "fb", "fc", "bc", "fa", "fb", "fa", "ba"))
    assert without_unread(chain(), wasteful) == AGAIN
    assert without_unread(chain(), AGAIN) == AGAIN
    assert without_unread(chain(), SAVE_ALL) == SAVE_ALL


def test_a_mask_that_the_backward_makes_anew_is_not_made_in_the_forward() -> None:
    """Its rerun is its first run then; one that somebody reads, or that is a result, stays."""
    wasteful, late = (Plan.of(names.split()) for names in ("f mask b mask c", "f b mask c"))
    early = Plan.of(["f", "mask", "b", "c"])
    assert without_unread(masked(), wasteful) == late
    assert not check(masked(), late)
    assert simulate(masked(), late).time_us < simulate(masked(), wasteful).time_us
    assert without_unread(masked(), early) == early
    assert without_unread(masked("m"), wasteful) == early


def masked(*outputs: str) -> Problem:
    """A step whose backward reads a mask that the forward need not make."""
    values = tuple(Value(name, 10) for name in "xmg")
    ops = (
        Op("f", (), ("x",), 1.0),
        Op("mask", ("x",), ("m",), 2.0, phase=Phase.EITHER),
        Op("b", (), ("g",), 4.0, 0, Phase.BACKWARD, recomputable=False),
        Op("c", ("m", "g"), (), 4.0, 0, Phase.BACKWARD, recomputable=False),
    )
    return Problem(values, ops, outputs)
