"""What runs while graphs of a step wait for their backward.

Enters: calls without gradients, code in eager mode between graphs, and models that take part in the
same step. Leaves: the most that was live meanwhile, which the graphs are planned for. Guarantees:
only situations are looked into that are new; what they take is told of if it is above the budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from autoremat import _torch
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import with_peak
from autoremat.memory.storage_sizes import tensors_in
from autoremat.planning.step import Step
from autoremat.session.surroundings import Surroundings
from autoremat.watch import between
from autoremat.watch.audit import Audit, names_of, sizes_of_runs
from autoremat.watch.ledger import note_without_gradients
from autoremat.watch.open_run import Owner, Run
from autoremat.watch.situations import about

PER_OCTAVE = 4  # sizes of what is given: text is generated token by token

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

    @property
    def is_planned(self) -> bool:
        """Whether any graph was planned."""

    def tell_if_above(self, predicted_nbytes: int, *, is_inference: bool = False) -> None:
        """Warn of a step above the budget."""


class Meanwhile:
    """In the steps of one session."""

    def __init__(self, steps: Stepping) -> None:
        """Nothing has run yet."""
        self._steps = steps

    def run_plain(self, run: Callable[[], T], given: Sequence[Any]) -> T:
        """A graph runs that keeps nothing."""
        with self.during_inference(given) as made:
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
    def during_inference(self, given: Any) -> Iterator[LiveStorages | None]:
        """A call without gradients: between forward and backward it adds to what waits there.

        Where that is looked into, what counts it is given: compiled code is not seen by it.

        Args:
            given: the arguments of the call, with tensors anywhere in it.
        """
        self._inference_begins()
        steps = self._steps
        runs = steps.open_runs if steps.is_open else []
        if self._is_known(runs, given):
            yield None
        else:
            before_nbytes = 0
            with steps.looking():
                alone = () if runs else tensors_in(given)
                before_nbytes = steps.audit.live_nbytes(runs, steps.device, alone)
            with LiveStorages(steps.device, ignores_given=True) as made:
                yield made
            if runs:
                self.note(before_nbytes + made.peak_nbytes, runs)
            else:
                steps.tell_if_above(before_nbytes + made.peak_nbytes, is_inference=True)
        self.eager_code_goes_on()

    def _is_known(self, runs: Sequence[Run], given: Any) -> bool:
        """Whether a call without gradients needs no look now, while these wait for their backward.

        Of calls while nothing waits, only those of a model that is trained are of interest.
        """
        steps, situations = self._steps, self._steps.audit.situations
        if runs:
            return situations.is_known(("inference", *names_of(runs)), sizes_of_runs(runs))
        if not steps.is_planned or steps.open_runs or _torch.is_in_backward():
            return True
        sizes = tuple(about(tensor.numel(), PER_OCTAVE) for tensor in tensors_in(given))
        return situations.is_known(("inference alone", len(sizes)), sizes)

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
