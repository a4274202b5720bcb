"""No plan repeats what nobody reads."""

from __future__ import annotations

from autoremat_solver import Plan
from autoremat_solver.solve import without_unread

from tests.reporting.test_report_timeline import AGAIN, SAVE_ALL, chain


def test_a_repeat_that_nobody_reads_is_left_out() -> None:
    """And with it what only that repeat read; the others stay."""
    wasteful = Plan.of(("fa", "fb", "fc", "bc", "fa", "fb", "fa", "ba"))
    assert without_unread(chain(), wasteful) == AGAIN
    assert without_unread(chain(), AGAIN) == AGAIN
    assert without_unread(chain(), SAVE_ALL) == SAVE_ALL
