"""What a model's steps hold beside its planned graphs, as looks into them have shown.

Enters: looks, as steps run, and what becomes resident. Leaves: the `Around` that the next plan is
made for. Guarantees: what was seen of a situation stays until it is seen otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from autoremat.planning.nesting import Around
from autoremat.watch.audit import Audit
from autoremat.watch.eager_code import Results
from autoremat.watch.look import Look
from autoremat.watch.open_run import SCALARS_NBYTES
from autoremat.watch.present import Present


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
        self.unseen_nbytes = 0  # what only the allocator's own peaks have shown
        self._shown_nbytes = 0  # the same of the latest of them
        self._forwards: dict[Hashable, Look] = {}  # by situation, what the latest look has shown
        self._backwards: dict[Hashable, tuple[int, int]] = {}
        self._partly_seen: set[Hashable] = set()  # of these, of which no look could see all
        self._waiting_nbytes = 0  # as `Around.eager_nbytes`, of what runs before the backward

    @property
    def now(self) -> Around:
        """What steps have shown, with what has become resident since."""
        more_nbytes = self.grown_nbytes + self.unseen_nbytes
        return replace(self.found, held_nbytes=self.found.held_nbytes + more_nbytes)

    def begin_step(self, *, is_open: bool) -> None:
        """A training call begins; open, if a backward of earlier ones is to come."""
        if not is_open:
            self.eager_results.clear()
            self.audit.begin_step()

    def learn(self, look: Look, *, is_final: bool) -> None:
        """Take into account what a look has shown; final, if all of the forward has run.

        Of all situations, each as it was seen last, the highest counts: a step may have many, as
        one has that accumulates gradients, and not each is looked into every time.
        """
        if is_final:
            found = look.beside_nbytes, look.eager_nbytes
            if look.is_partial:  # it shows less than one before it may have shown
                before = self._backwards.get(look.situation, found)
                found = max(before[0], found[0]), max(before[1], found[1])
            if not look.is_partial:
                self._partly_seen.discard(look.situation)
            elif look.situation not in self._backwards:
                self._partly_seen.add(look.situation)
            self._backwards[look.situation] = found
        else:
            known = self._forwards.get(look.situation, look)
            is_less = look.is_partial and look.beside_nbytes < known.beside_nbytes
            self._forwards[look.situation] = known if is_less else look
        self.found = self._highest()

    def learn_beyond(self, look: Look, nbytes: int) -> None:
        """A backward takes so much more than the account has, which is of larger sizes."""
        if nbytes > 0:
            beside_nbytes = self.found.held_nbytes + self.found.returned_nbytes + nbytes
            self._backwards[look.situation] = beside_nbytes, self.found.eager_nbytes
            self.found = self._highest()

    def _highest(self) -> Around:
        known = self.found  # stays where graphs were planned anew and nothing was seen since
        shown = map(_beside_nbytes, self._forwards.values())
        first_nbytes = max([0, *shown]) if self._forwards else known.first_nbytes
        if not self._backwards:
            held_nbytes = max(0, first_nbytes - known.passing_nbytes)
            return replace(
                known, held_nbytes=held_nbytes, passing_nbytes=first_nbytes - held_nbytes
            )
        beside_nbytes, eager_nbytes = map(max, zip(*self._backwards.values(), strict=True))
        # What a backward does not show is gone by then, if all of it was seen.
        shown_nbytes = max(0, beside_nbytes) + SCALARS_NBYTES
        held_nbytes = first_nbytes if self._partly_seen else min(first_nbytes, shown_nbytes)
        return Around(
            held_nbytes,
            max(0, beside_nbytes - held_nbytes),
            max(self._waiting_nbytes, eager_nbytes),
            first_nbytes - held_nbytes,
        )

    def note_waiting(self, nbytes: int) -> None:
        """What runs beside graphs before the backward takes so much: as `Around.eager_nbytes`."""
        self._waiting_nbytes = max(self._waiting_nbytes, nbytes)
        most_nbytes = max(self.found.eager_nbytes, self._waiting_nbytes)
        self.found = replace(self.found, eager_nbytes=most_nbytes)

    def settled(self) -> None:
        """The graphs were planned for what is known now: looks into steps begin anew."""
        self.planned, self._waiting_nbytes = self.now, 0
        self._forwards.clear()
        self._backwards.clear()
        self._partly_seen.clear()
        self.audit.forget()

    def note_unseen(self, excess_nbytes: int, margin_nbytes: int) -> bool:
        """A step took so much more than is known of it; returns whether one before it did as well.

        What two steps have taken is there, and the margin beside it, since it may grow a little.
        """
        before_nbytes, self._shown_nbytes = self._shown_nbytes, excess_nbytes
        found_nbytes = min(before_nbytes, excess_nbytes)
        if found_nbytes:
            self.unseen_nbytes += found_nbytes + margin_nbytes
            self._shown_nbytes = 0
        return found_nbytes > 0

    def note_resident(self, nbytes: int) -> None:
        """So much more is resident than when the graphs were planned: an optimizer's state."""
        self.grown_nbytes = nbytes
        self.audit.forget()


def _beside_nbytes(look: Look) -> int:
    """What was beside a forward, by what is known of it now."""
    gone = (nbytes for ran, nbytes in look.counted if ran.region.is_gone)
    return look.beside_nbytes + sum(gone)
