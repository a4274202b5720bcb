"""What the user is told of one model's steps, each thing once.

Enters: why something runs without a plan, and peaks above the budget. Leaves: warnings, or errors
where the session is strict. Guarantees: while Dynamo compiles, a warning waits until the graph is
planned, since as an error it would end the compile.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections import Counter

from autoremat import _torch
from autoremat.call_stack import batch_finder, users_level
from autoremat.errors import Alone, FallbackError, InfeasibleBudget, OverBudgetWarning
from autoremat.fallbacks import fallback, in_words
from autoremat.reporting import Fallback
from autoremat.watch.ledger import SAME, is_news

_log = logging.getLogger("autoremat")

MUCH = 1.25  # peaks of texts that are generated differ by less: they grow token by token
_TOO_LATE = frozenset({"AR113", "AR114"})  # what is told of runs already


class Told:
    """What was told so far.

    Attributes:
        fallbacks: what runs without a plan, in the order in which it was found.
    """

    def __init__(self, *, is_strict: bool) -> None:
        """Nothing yet; if strict, a fallback is an error."""
        self.fallbacks: dict[Fallback, None] = {}
        self._is_strict = is_strict
        self._peak_nbytes = 0  # the highest above the budget
        self._was_to_pass = False  # whether that was said to be different from the next step on
        self._alone_nbytes = Counter[Alone]()  # the same of what no planned graph waits for
        self._due: OverBudgetWarning | None = None  # to be told when the graph is planned

    def fall_back(self, code: str, *, cause: Exception | None = None, **facts: object) -> None:
        """Tell what runs without a plan, why, and what to do; once for each reason.

        Raises:
            FallbackError: if strict, and there is something left to prevent.
        """
        told = Fallback(code, *in_words(code, **facts))
        if told in self.fallbacks:
            return
        if self._is_strict and code not in _TOO_LATE:
            error = FallbackError.of(fallback(code, **facts))
            if cause is not None:  # Dynamo drops the causes of what it lets through, not the notes
                error.add_note("".join(traceback.format_exception(cause)))
            raise error from cause
        self.fallbacks[told] = None
        warnings.warn(fallback(code, **facts), stacklevel=users_level())

    def peak(
        self,
        peak_nbytes: int,
        budget_nbytes: int,
        *,
        is_final: bool,
        is_planned_anew: bool,
        is_leanest: bool,
        is_planned: bool = True,
        alone: Alone = "",
        accumulates: bool = False,
        predicted_nbytes: int | None = None,
    ) -> None:
        """Warn of a step above the budget; again only of one that is higher still.

        Args:
            peak_nbytes: its peak.
            budget_nbytes: the budget.
            is_final: whether all of its forward has run.
            is_planned_anew: whether the next step will have another plan.
            is_leanest: whether no plan is known that takes less.
            is_planned: whether anything of the step has a plan.
            alone: as of `OverBudgetWarning`.
            accumulates: as of `Steps`.
            predicted_nbytes: what it takes by its plans, where the peak is one that was measured.
        """
        told_nbytes = self._alone_nbytes[alone] if alone else self._peak_nbytes
        if self._was_to_pass and not is_planned_anew and not alone:
            told_nbytes = 0  # another plan was promised, and none has come
        most_nbytes = int((MUCH if alone == "inference" else SAME) * told_nbytes)
        if peak_nbytes <= max(budget_nbytes, most_nbytes):
            return
        if not alone and not is_news(budget_nbytes, peak_nbytes, is_final=is_final):
            return
        if alone:
            self._alone_nbytes[alone] = peak_nbytes
        else:
            self._peak_nbytes, self._was_to_pass = peak_nbytes, is_planned_anew
        if predicted_nbytes is None:
            self._due = OverBudgetWarning(None, budget_nbytes, peak_nbytes)
        else:
            self._due = OverBudgetWarning(peak_nbytes, budget_nbytes, predicted_nbytes)
        self._due.is_planned_anew, self._due.is_leanest = is_planned_anew, is_leanest
        self._due.is_planned = is_planned
        self._due.alone, self._due.accumulates = alone, accumulates
        if not _torch.is_compiling():
            self.warn_if_due()

    def planned_anew(self) -> None:
        """What was told of peaks is no longer true: the graphs have other plans."""
        self._peak_nbytes, self._was_to_pass = 0, False

    def warn_if_due(self) -> None:
        """Give the warning that waits, if one does."""
        if self._due is not None:
            warnings.warn(self._taken(), stacklevel=users_level())

    def _taken(self) -> Warning:
        """The warning that is due. As an error it holds the frames, and no frame may hold it."""
        assert self._due is not None
        try:
            return self._due
        finally:
            self._due = None


def log_if_smaller_batch_follows(error: Exception) -> None:
    """A line of log, where a library takes a refused batch for a reason to take a smaller one.

    It says nothing itself, or not why. As a warning, which may be an error, it would end the run.
    """
    if not isinstance(error, InfeasibleBudget) or not error.may_fit_smaller_batch:
        return
    library = batch_finder()
    if library:
        _log.warning("autoremat: %s goes on with a smaller batch. %s", library, error.fact)
