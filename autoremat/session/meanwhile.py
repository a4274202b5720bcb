"""What runs while graphs of a step wait for their backward.

Enters: calls without gradients, code in eager mode between graphs, and models that take part in the
same step. Leaves: the most that was live meanwhile, which the graphs are planned for. Guarantees:
only situations are looked into that are new; what they take is told of if it is above the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from autoremat import _torch
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import with_peak
from autoremat.planning.step import Step
from autoremat.session.surroundings import Surroundings
from autoremat.watch import between
from autoremat.watch.audit import Audit, names_of, sizes_of_runs
from autoremat.watch.ledger import note_without_gradients
from autoremat.watch.open_run import Owner, Run

T = TypeVar("T")


class Stepping(Owner, Protocol):
    """A session's steps."""

    audit: Audit
    graphs: Step
    surroundings: Surroundings
    device: torch.device

    @property
    def is_open(self) -> bool:
        """Whether a backward through its graphs is still to come."""

    @property
    def open_runs(self) -> list[Run]:
        """Runs that wait for their backward on its device, also of others' graphs."""

    def looking(self) -> AbstractContextManager[None]:
        """What goes wrong in this context is told, and the step goes on."""

    def tell_if_above(self, predicted_nbytes: int) -> None:
        """Warn of a step above the budget."""


class Meanwhile:
    """In the steps of one session."""

    def __init__(self, steps: Stepping) -> None:
        """Nothing has run yet."""
        self._steps = steps

    def run_plain(self, run: Callable[[], T]) -> T:
        """A graph runs that keeps nothing."""
        with self.during_inference() as made:
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
    def during_inference(self) -> Iterator[LiveStorages | None]:
        """A call without gradients: between forward and backward it adds to what waits there.

        Where that is looked into, what counts it is given: compiled code is not seen by it.
        """
        self._inference_begins()
        steps = self._steps
        runs = steps.open_runs if steps.is_open else []
        if not runs or steps.audit.situations.is_known(
            ("inference", *names_of(runs)), sizes_of_runs(runs)
        ):
            yield None
        else:
            before_nbytes = 0
            with steps.looking():
                before_nbytes = steps.audit.live_nbytes(runs, steps.device)
            with LiveStorages(steps.device, ignores_given=True) as made:
                yield made
            self.note(before_nbytes + made.peak_nbytes, runs)
        self.eager_code_goes_on()

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
        resident_nbytes = max((part.resident_nbytes for part in steps.graphs.current), default=0)
        crossing_nbytes = sum(run.held_nbytes for run in runs if run.owner is steps)
        steps.surroundings.note_waiting(peak_nbytes - resident_nbytes - crossing_nbytes)
        steps.tell_if_above(peak_nbytes)
