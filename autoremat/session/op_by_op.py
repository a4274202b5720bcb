"""A step that Inductor cannot compile by its plan: it is planned op by op in its place.

Enters: why a planned graph could not be compiled. Leaves: whether torch's own partition runs it, or
the call begins again, or the next step does, planned for code that runs op by op. Guarantees: that
is where torch's partition would be above the budget, or fails as well, and in one process only; a
call of which anything has run is not taken again.
"""

from __future__ import annotations

from collections.abc import Callable

from autoremat.planning.choice import as_chosen
from autoremat.planning.part import Part, Planned
from autoremat.planning.simulated import simulated_baseline
from autoremat.session.steps import Steps


class NotCompiled(Exception):
    """Inductor could not compile a planned graph; nothing of the call has run yet."""


class Uncompiled:
    """What became of the graphs of one session.

    Attributes:
        is_heeded: whether somebody plans op by op once it is found that this is due.
        may_begin_again: whether the call at hand can be taken again as if it had not begun.
        found: why steps are to be planned op by op; None as long as they are not.
    """

    def __init__(self) -> None:
        """All could be compiled."""
        self.is_heeded = False
        self.may_begin_again: Callable[[], bool] = _never
        self.found: NotCompiled | None = None

    def note(self, error: Exception) -> None:
        """A graph could not be compiled, and what torch saves of it is no way out.

        Args:
            error: Inductor's.

        Raises:
            NotCompiled: if the call is to begin again.
        """
        if self.is_heeded:
            self.found = NotCompiled(str(error))
            if self.may_begin_again():
                raise self.found

    def call_ends(self) -> None:
        """What ran of it has run."""
        self.may_begin_again = _never


def _never() -> bool:
    return False


def needs_its_plan(part: Part | None, steps: Steps) -> bool:
    """Whether the step is above its budget where torch's own partition runs one of its graphs.

    Its code is not read for that: it may be what cannot be compiled.
    """
    if part is None or not isinstance(part.planned, Planned):
        return False
    subject, plan = as_chosen(part.subject, part.choice), part.choice.solution.timeline
    more_nbytes = simulated_baseline(subject).peak_nbytes - plan.peak_nbytes
    return steps.peak_nbytes + more_nbytes > steps.budget_nbytes
