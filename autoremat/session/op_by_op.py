"""A step that Inductor cannot compile by its plan: whether torch's own partition will do instead.

Enters: a planned graph that could not be compiled. Leaves: word for whoever plans later steps, or
this one once more, op by op. Guarantees: no call begins again of which anything may have run.
"""

from __future__ import annotations

import torch
from autoremat_solver import simulate

from autoremat import _torch
from autoremat.planning.choice import as_chosen
from autoremat.planning.part import Part, Planned
from autoremat.planning.plain import own_partition
from autoremat.planning.simulated import simulated_baseline
from autoremat.session.steps import Steps


class NotCompiled(Exception):
    """Inductor could not compile a graph with which a call begins: nothing of the call has run."""


class Uncompiled:
    """Of one session: whether its steps had better be planned op by op.

    Attributes:
        is_heeded: whether somebody takes calls again that are not compiled.
        why: what Inductor said; "" as long as steps may go on as they are.
    """

    def __init__(self) -> None:
        """All could be compiled."""
        self.is_heeded = False
        self.why = ""

    def note(self, error: _torch.InductorError, *, has_run: bool) -> None:
        """A graph could not be compiled, and torch's own partition of it is no way out.

        Args:
            error: Inductor's.
            has_run: whether anything of its step has, or may have.

        Raises:
            NotCompiled: if the call is to begin again.
            OutOfMemoryError: if that is what happened.
        """
        if isinstance(error.inner_exception, torch.OutOfMemoryError):
            raise error.inner_exception from None
        self.why = str(error)
        if self.is_heeded and not has_run:
            raise NotCompiled(self.why)


def let_go(error: BaseException | None) -> None:
    """Let an error hold no frames, of a compile that goes on without it, nor those before it."""
    while error is not None:
        error.__traceback__ = None
        error.__context__, error = None, error.__context__


def needs_its_plan(part: Part | None, steps: Steps) -> bool:
    """Whether the step is above its budget where torch's own partition runs one of its graphs.

    By the model of both: no code is read for that, which may be what cannot be compiled.
    """
    if part is None or not isinstance(part.planned, Planned):
        return False
    own = own_partition(part.subject)
    if own is None:
        plain_nbytes = simulated_baseline(part.subject).peak_nbytes
    else:
        plain_nbytes = simulate(own.problem, own.torchs.plan).peak_nbytes
    problem = as_chosen(part.subject, part.choice).lowered.problem
    planned_nbytes = simulate(problem, part.choice.solution.plan).peak_nbytes
    return steps.peak_nbytes + plain_nbytes - planned_nbytes > steps.budget_nbytes
