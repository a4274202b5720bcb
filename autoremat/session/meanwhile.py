"""What runs while graphs of a step wait for their backward.

Enters: calls without gradients, code in eager mode between graphs, and models that take part in the
same step. Leaves: the most that was live meanwhile, which the graphs are planned for. Guarantees:
only situations are looked into that are new; what they take is told of if it is above the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from autoremat import _torch
from autoremat.errors import Alone
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import with_peak
from autoremat.planning.step import Step
from autoremat.session.alone import Waiting, live_before
from autoremat.session.surroundings import Surroundings
from autoremat.watch import between
from autoremat.watch.audit import names_of, sizes_of_runs
from autoremat.watch.ledger import note_without_gradients
from autoremat.watch.open_run import Run

T = TypeVar("T")


class Stepping(Waiting, Protocol):
    """A session's steps."""

    graphs: Step
    surroundings: Surroundings

    @property
    def is_open(self) -> bool:
        """Whether a backward through its graphs is still to come."""

    def looking(self) -> AbstractContextManager[None]:
        """What goes wrong in this context is told, and the step goes on."""

    def tell_if_above(self, predicted_nbytes: int, *, alone: Alone = "") -> None:
        """Warn of a step above the budget."""


class Meanwhile:
    """In the steps of one session."""

    def __init__(self, steps: Stepping) -> None:
        """Nothing has run yet."""
        self._steps = steps

    def run_plain(self, name: str, run: Callable[[], T], given: Sequence[Any]) -> T:
        """A graph runs that keeps nothing."""
        with self.during_inference(name, given) as made:
            if made is None:
                result = run()
            else:
                result, peak_nbytes = with_peak(run, self._steps.device)
                made.peak_nbytes = max(made.peak_nbytes, peak_nbytes)
            self._steps.audit.made.note(result)
            return result

    def _inference_begins(self) -> None:
        """What a call without gradients makes may be what a loss in eager mode is of."""
        between.close()
        with self._steps.looking():
            note_without_gradients(self._steps)
            self._steps.audit.at_inference()

    @contextlib.contextmanager
    def during_inference(self, of: Hashable, given: Any) -> Iterator[LiveStorages | None]:
        """A call without gradients: between forward and backward it adds to what waits there.

        Where that is looked into, what counts it is given: compiled code is not seen by it.

        Args:
            of: tells models, and graphs, apart.
            given: the arguments of the call.
        """
        self._inference_begins()
        steps = self._steps
        runs = steps.open_runs if steps.is_open else []
        before_nbytes = self._live_before(runs) if runs else live_before(steps, of, given)
        if before_nbytes is None:
            yield None
        else:
            with LiveStorages(steps.device, ignores_given=True) as made:
                yield made
            peak_nbytes = before_nbytes + made.peak_nbytes
            if runs:
                self.note(peak_nbytes, runs)
            else:
                steps.tell_if_above(peak_nbytes, alone="inference")
        self.eager_code_goes_on()

    def _live_before(self, runs: Sequence[Run]) -> int | None:
        """What is live as a call begins while these wait; None where that needs no look now."""
        steps, audit = self._steps, self._steps.audit
        if audit.situations.is_known(("inference", *names_of(runs)), sizes_of_runs(runs)):
            return None
        with steps.looking():
            return audit.live_nbytes(runs, steps.device)
        return 0

    def eager_code_goes_on(self) -> None:
        """A graph has run, or a call without gradients; others may wait for their backward."""
        if _torch.is_in_backward() or not between.may_begin():
            return
        steps = self._steps
        audit, runs = steps.audit, steps.open_runs
        if not runs:
            return
        last, audit.between.number = runs[-1], audit.between.number + 1
        situation = ("between", audit.between.number, len(runs), id(last.owner), last.name)
        if not audit.situations.is_known(situation, last.sizes):
            with steps.looking():
                if audit.present.units:  # FSDP gathers there, which is known in other ways
                    return
                live_nbytes = audit.live_nbytes(runs, steps.device)
                audit.between.begin(live_nbytes, steps.device, last)

    def note(self, peak_nbytes: int, runs: Sequence[Run]) -> None:
        """So much was live at most while these runs waited; 0 if nobody has looked."""
        if not peak_nbytes:
            return
        steps = self._steps
        own = {run: run.graph for run in runs if run.owner is steps and run.graph is not None}
        # At the largest sizes, what graphs have returned meanwhile is as much more as they are.
        grown = max((part.shrunk for part in own.values()), default=1.0) - 1
        parts = own.values() if grown else steps.graphs.current
        resident_nbytes = max((part.resident_nbytes for part in parts), default=0)
        more_nbytes = peak_nbytes - resident_nbytes - sum(run.held_nbytes for run in own)
        gone = (p.figures.crossing.passed_nbytes for run, p in own.items() if run.is_let_go)
        more_nbytes += int(grown * max(0, min(more_nbytes, sum(gone))))
        steps.surroundings.note_waiting(more_nbytes)
        steps.tell_if_above(peak_nbytes)
