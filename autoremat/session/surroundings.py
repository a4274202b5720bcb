"""What a model's steps hold beside its planned graphs, as looks into them have shown.

Enters: looks, as steps run, and what becomes resident. Leaves: the `Around` that the next plan is
made for. Guarantees: what an earlier step showed stays until a step shows otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoremat.planning.nesting import Around
from autoremat.watch.audit import Audit, Look, Present
from autoremat.watch.eager_code import Results


class Surroundings:
    """Of the steps of one session.

    Attributes:
        found: what steps have shown.
        planned: of it, what the graphs were planned for.
        eager_results: what code in eager mode has returned in this step.
        audit: looks into steps.
    """

    def __init__(self, find_present: Callable[[], Present | None]) -> None:
        """Nothing is known."""
        self.found = self.planned = Around()
        self.eager_results = Results()
        self.audit = Audit(find_present, self.eager_results)
        self.grown_nbytes = 0  # what has become resident since the graphs were planned
        self._has_looked = False  # at this step
        self._has_gone_back = False  # in this step, and was looked at
        self._inference_nbytes = 0  # as `Around.eager_nbytes`, of calls before the backward

    @property
    def now(self) -> Around:
        """What steps have shown, with what has become resident since."""
        return replace(self.found, held_nbytes=self.found.held_nbytes + self.grown_nbytes)

    def begin_step(self, *, is_open: bool) -> None:
        """A training call begins; open, if a backward of earlier ones is to come."""
        self._has_looked = is_open and self._has_looked
        if not is_open:
            self._has_gone_back = False
            self.eager_results.clear()
            self.audit.saved.clear()

    def learn(self, look: Look, *, is_final: bool) -> None:
        """Take into account what a look has shown; final, if all of the forward has run."""
        known = self.found
        if is_final:
            before = known if self._has_gone_back else Around()  # of several backwards the highest
            returned_nbytes = look.beside_nbytes - known.held_nbytes
            self.found = Around(
                known.held_nbytes,
                max(0, before.returned_nbytes, returned_nbytes),
                max(before.eager_nbytes, look.eager_nbytes, self._inference_nbytes),
            )
            self._has_gone_back = True
        else:
            before_nbytes = known.held_nbytes if self._has_looked else 0
            self.found = replace(known, held_nbytes=max(before_nbytes, look.beside_nbytes))
        self._has_looked = True

    def note_inference(self, nbytes: int) -> None:
        """A call without gradients before the backward takes so much: as `Around.eager_nbytes`."""
        self._inference_nbytes = max(self._inference_nbytes, nbytes)
        most_nbytes = max(self.found.eager_nbytes, self._inference_nbytes)
        self.found = replace(self.found, eager_nbytes=most_nbytes)

    def settled(self) -> None:
        """The graphs were planned for what is known now: looks into steps begin anew."""
        self.planned, self._inference_nbytes = self.now, 0
        self.audit.forget()

    def note_resident(self, nbytes: int) -> None:
        """So much more is resident than when the graphs were planned: an optimizer's state."""
        self.grown_nbytes = nbytes
        self.audit.forget()
