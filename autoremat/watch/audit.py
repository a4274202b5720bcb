"""What is really live beside the planned graphs of a step, found out as the step runs.

Enters: the runs that are open when a forward or a backward begins, of all planned models. Leaves:
how much more is live than the step's own account says, as an `Around`. Guarantees: each situation
(the open runs, where the backward begins, whether gradients exist) is looked into at its first,
second, fourth, eighth occurrence, and so on: steps which are all alike cost nothing at last.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from autoremat import _torch
from autoremat.memory.meter import gradients_of
from autoremat.memory.storage_sizes import same_device, storage_identities, storage_sizes
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran
from autoremat.watch.between import Between
from autoremat.watch.checkpointed import Reruns
from autoremat.watch.eager_backward import first_nodes, foresee
from autoremat.watch.eager_code import Results, names_from
from autoremat.watch.ledger import returned_storages, run_of
from autoremat.watch.look import Look, look_at, passing_nbytes
from autoremat.watch.made import Made
from autoremat.watch.open_run import Roots, Run
from autoremat.watch.present import Arguments, Present
from autoremat.watch.reach import Reach
from autoremat.watch.situations import Situations, about
from autoremat.watch.standing import Standing, Together, known_or_found, of_root

PER_OCTAVE = 64  # sizes of what graphs have returned that count as different: by about 1 %
NOTED = 8  # backwards until whose forwards are noted again, for one that was looked at without


class _Held(NamedTuple):
    """What is live at a moment, but for what the runs of graphs hold.

    Attributes:
        known: identities of what models hold, and of what graphs are given and have returned.
        saved: bytes by storage of what code in eager mode has saved so far, or holds in variables.
        named: of that, what it holds in variables.
        base_nbytes: all that is known, and what is to come: an optimizer's state, say.
        expected_nbytes: the latter.
    """

    known: Collection[int]
    saved: Mapping[int, int]
    named: Mapping[int, int]
    base_nbytes: int
    expected_nbytes: int

    def live_nbytes(self, runs: Sequence[Run]) -> int:
        """With what these runs hold for their backward, but for what eager code saved."""
        return self.base_nbytes + sum(run.held_nbytes for run in runs)

    def saved_beyond(self, counted: Collection[int]) -> int:
        """Bytes of what code in eager mode has saved that counts neither here nor as known."""
        sizes = self.saved.items()
        return sum(n for key, n in sizes if key not in self.known and key not in counted)


class Audit:
    """Looks into the situations of one session's steps."""

    def __init__(self, find_present: Callable[[], Present | None], given: Results) -> None:
        """Of a session whose model holds this, and whose graphs are given that."""
        self._find_present = find_present
        self.arguments = Arguments()
        self.given = given
        self.saved = Results()  # by code in eager mode, of forwards that have run
        self.between = Between()
        self.reruns = Reruns()
        self.situations = Situations()
        self._is_unnoted = False  # a known forward, before the next look at a backward
        self._noting = 0  # so many backwards may come before a look does that has missed notes
        self._stood: dict[Hashable, Standing] = {}
        self._together = Together()
        self.reach = Reach()
        self._in_reach = Results()  # of the step's own code, and told of by nobody
        self._has_reached = False  # in this step
        self.unseen: dict[torch.device, int] = {}  # bytes of the allocator's, beyond tensors
        self.made = Made()
        self._in_turn = WeakSet[Audit]()  # of models that are trained in turn with this one

    @property
    def present(self) -> Present:
        """What the model holds; where none is known (any more), what its graphs were given."""
        return self._find_present() or self.arguments

    def begin_step(self) -> None:
        """Nothing is saved yet, and no forward has gone by."""
        present = self.present
        self._stood.clear()
        self.arguments.begin_calls()
        if present is self.arguments:  # else nobody asks these whether steps find gradients
            self.arguments.begin_step()
        self.saved.clear()
        self.between.step_begins()
        self._is_unnoted = self._has_reached = False
        self.reach.begin_step(present.optimizers.steps)

    def take_turns(self, others: Iterable[Audit]) -> None:
        """These are of models that are trained between steps of this one: theirs is there too.

        Of the same model there are several: for steps that begin beside gradients, say.
        """
        apart = {other for other in others if other.present is not self.present}
        new = apart.difference(self._in_turn)
        if new:
            self._in_turn.update(new)
            self.forget()

    def forget(self) -> None:
        """Something has become resident: all situations are new."""
        self._stood.clear()
        self.situations.forget()

    def at_forward(
        self,
        runs: Sequence[Run],
        name: str,
        find_part: Callable[[], Part],
        args: Sequence[Any],
        account: Callable[[], Mapping[str, Beside]],
        device: torch.device,
        sizes: tuple[int, ...] = (),
        before: Ran | None = None,
    ) -> Look | None:
        """What is beside a graph that is about to run; None where nothing new can be learned.

        Args:
            runs: those that are open on its device.
            name: of the graph.
            find_part: finds the graph at these sizes.
            args: its arguments.
            account: what the step's own account has beside each graph.
            device: where it runs.
            sizes: what its symbolic sizes stand for.
            before: the run before it in its step.
        """
        about = _about(device, runs)
        # Reentrant checkpoints let go of it one by one, while gradients come.
        how_much = about if _torch.is_in_backward() else about > 0
        situation = (name, how_much, self.reach.is_later, *names_of(runs))
        at = (*sizes, *sizes_of_runs(runs), about)
        is_known = self.situations.is_known(situation, at)
        if is_known and not self._noting:
            self._is_unnoted |= not _torch.is_in_backward()
            return None
        self.arguments.note(args)
        self.given.note_inputs(args)
        if not (self._has_reached or _torch.is_in_backward()):
            self._look_around()
        held = self._held(runs, device)
        on_the_way = Results()
        on_the_way.note_saved(args, device)
        self.saved.add(on_the_way)
        if is_known:
            return None
        is_partial = not self.reach.is_sure
        self.situations.is_again(situation, at, is_partial=is_partial)
        given = (value for value in args if isinstance(value, torch.Tensor))
        beyond_nbytes = held.saved_beyond({*on_the_way.held(device), *storage_identities(given)})
        found = account().get(name) if runs or about or beyond_nbytes else None
        if found is None:
            return None
        part = find_part()
        live_nbytes = part.between_nbytes + held.live_nbytes(runs) + beyond_nbytes
        counted_nbytes = part.resident_nbytes + part.resident.traffic.forward_nbytes
        more_nbytes = live_nbytes - counted_nbytes - found.first_nbytes
        if part.resident.traffic.staying_nbytes:
            more_nbytes -= self._stale_nbytes
        peak_nbytes = live_nbytes + part.own_peaks[0]
        counted = tuple(
            (run.ran, run.graph.figures.crossing.passed_nbytes)
            for run in runs  # what the run before it has returned counts in any case
            if run.ran and run.graph and run.ran is not before
            if not (run.region or run.ran.region.is_gone)
        )
        look = Look(peak_nbytes, more_nbytes, 0, part.is_resized, part.is_larger, situation)
        return look._replace(counted=counted, is_partial=is_partial)

    @property
    def _stale_nbytes(self) -> int:
        """What an earlier backward has left gathered: this one, which counts it, gathers it too."""
        spread = self.present.spread
        return max(0, passing_nbytes(spread) - spread.traffic.window_nbytes)

    def at_inference(self) -> None:
        """A call without gradients begins: what it makes is no data."""
        with suppress(Exception):
            self.reach.note_data()

    def at_end(self, runs: Sequence[Run], outputs: Sequence[Any], device: torch.device) -> None:
        """A call of the model has ended: what code in eager mode has saved in it stays."""
        is_known = self.situations.is_known(("end", *names_of(runs)), sizes_of_runs(runs))
        if runs and (self._noting or not is_known):
            self.saved.note_saved(outputs, device)

    def at_reruns(self, roots: Roots, device: torch.device) -> None:
        """A backward begins in which graphs may run: what its nodes have saved is there till then.

        Args:
            roots: where the backward begins.
            device: of the session's graphs.
        """
        if not self.situations.is_known(("reruns", names_behind(roots)), (_about(device),)):
            self.saved.note_saved(_tensors_of(roots), device)

    def at_backward(
        self,
        runs: Sequence[Run],
        roots: Roots,
        device: torch.device,
        account: Callable[[], Mapping[Run, tuple[Part, Beside]]],
        *,
        keeps_graph: bool,
    ) -> Look | None:
        """What is beside the graphs of a backward that begins; None if that is known.

        Args:
            runs: those that are open on the device; without any, it may still be a step's: a loss
                of what graphs have returned without gradients.
            roots: where the backward begins.
            device: of the session's graphs.
            account: of the runs that are the session's own: the graph, and what the step's own
                account has beside it.
            keeps_graph: whether what was saved stays afterwards.
        """
        within = _about(device) if _torch.is_in_backward() else None
        facts = (keeps_graph, self.present.has_gradients, self.reach.is_later, within)
        # Of eager code before graphs, not the order: each layer of it may be left out by chance.
        entered = tuple((frozenset(run.behind), len(run.behind).bit_length()) for run in runs)
        situation = (names_behind(roots), *facts, *names_of(runs), *entered)
        if runs:
            self._noting = max(0, self._noting - 1)
        if self.situations.is_known(situation, sizes_of_runs(runs)):
            return None
        if not runs:
            made = {key for key, _ in returned_storages(device)} | self.present.brought(
                device
            ).keys()
            if within is not None or not self.made.is_reached(roots, made):
                return None
        parts = account()
        self._look_around()  # also within a backward: one that the user has written holds more
        held = self._held(runs, device, roots)
        if not runs:  # what it holds may be gone when graphs run
            self._in_reach.clear()
        audits = self._audits_of(runs)
        foreseen = foresee(
            roots,
            runs,
            known=held.known,
            saved_so_far=held.saved,
            device=device,
            keeps_graph=keeps_graph,
            named=held.named,
            gradient_shares=self.present.spread.gradient_shares,
            find_remade=functools.partial(
                self.reruns.of, device=device, find_known=lambda: _known(audits, device)
            ),
        )
        if foreseen.reached and all(run.owner.audit is not self for run in foreseen.reached):
            return None  # another model's backward, which tells
        for run in foreseen.reached if keeps_graph else ():
            if run.ran is not None:
                run.ran.is_kept = True
        spread = self.present.spread
        # Who began it holds the gradients that it begins with, each as large as its root. Those
        # that a run takes its plan counts, unless the backward around this one holds them.
        begun = [root for root in _tensors_of(roots) if within is not None or not _is_run(root)]
        given_nbytes = sum(root.nbytes for root in begun if same_device(root.device, device))
        base_nbytes = held.base_nbytes + given_nbytes
        look = look_at(parts, foreseen, base_nbytes, spread, keeps_graph=keeps_graph)
        taking_part = self._audits_in(runs)
        is_noted = not any(audit._is_unnoted for audit in taking_part)
        is_partial = not (foreseen.is_complete and is_noted and self.reach.is_sure)
        sizes = sizes_of_runs(runs)
        is_again = self.situations.is_again(situation, sizes, is_partial=is_partial)
        # The next look shall lack neither notes nor the rest.
        for audit in taking_part:
            audit._noting = NOTED if is_again else 0
        return look._replace(situation=situation, is_partial=is_partial, is_apart=not runs)

    def live_nbytes(self, runs: Sequence[Run], device: torch.device) -> int:
        """What is live while these runs wait for their backward."""
        held = self._held(runs, device)
        returned = {key for run in runs for key in run.returned}
        return held.live_nbytes(runs) + held.saved_beyond(returned)

    def live_alone_nbytes(self, device: torch.device, given: Iterable[torch.Tensor]) -> int:
        """What is live now, as something begins that is given this, while no runs wait."""
        held = self._held((), device)
        brought = storage_sizes(given, device).items()
        live_nbytes = held.base_nbytes - held.expected_nbytes + held.saved_beyond(())
        return live_nbytes + sum(nbytes for key, nbytes in brought if key not in held.known)

    def _held(self, runs: Sequence[Run], device: torch.device, roots: Roots = ()) -> _Held:
        """By all models that take part in the step, and by losses that eager code has made."""
        audits = self._audits_of(runs)
        parts = dict.fromkeys(part for audit in audits for part in audit._standing(device))
        stays = self._together = self._together.of(parts)
        counted = {key for run in runs for key in run.returned}
        known, saved = dict(returned_storages(device, runs)), dict[int, int]()
        losses = storage_sizes(_tensors_of(roots), device)
        known |= {key: nbytes for key, nbytes in losses.items() if key not in counted}
        expected_nbytes = sum(part.absent_nbytes for part in parts)
        for audit in audits:
            present = audit._brought(device)
            # What a graph has returned may be brought, or a buffer: then it counts in both.
            counted -= present.keys()
            known |= audit.given.held(device) | present
            saved |= audit.saved.held(device) | audit.between.held()
            expected_nbytes += audit.present.to_come_nbytes(device)
        in_reach = self._in_reach.held(device).items()
        named = {key: nbytes for key, nbytes in in_reach if key not in counted}
        moving = list(dict.fromkeys(moving for part in parts for moving in part.moving))
        lasting = ChainMap(stays.sizes, *(part.now() for part in moving))
        lasting_nbytes = stays.nbytes + sum(part.nbytes for part in moving)
        passing = (key for key in known if key not in counted and key not in lasting)
        base_nbytes = expected_nbytes + lasting_nbytes + sum(known[key] for key in passing)
        base_nbytes += self.unseen.get(device, 0)
        saved |= named
        return _Held(ChainMap(known, lasting), saved, named, base_nbytes, expected_nbytes)

    def _look_around(self) -> None:
        """What the step's own code holds now."""
        self._has_reached = True
        self._in_reach.clear()
        with suppress(Exception):  # objects of the user's may answer anything; a look goes on
            self._in_reach.note(self.reach.tensors())

    def _standing(self, device: torch.device) -> list[Standing]:
        """What this model holds while forwards run, and what those around its graphs do."""
        present = self.present
        key = device, present is self.arguments
        own = known_or_found(self._stood, key, lambda: present.standing(device))
        own.add(present.new_lasting())
        return [own, *(of_root(root, device) for root in self.arguments.around.roots)]

    def _brought(self, device: torch.device) -> dict[int, int]:
        """What calls have brought, of this model and of those around its graphs."""
        around = self.arguments.around.given
        held = storage_sizes([*around, *gradients_of(around)], device)
        return held | self.present.brought(device)

    def _audits_of(self, runs: Sequence[Run]) -> list[Audit]:
        """Of all models that hold something during the step."""
        return list(dict.fromkeys([*self._audits_in(runs), *self._in_turn]))

    def _audits_in(self, runs: Sequence[Run]) -> list[Audit]:
        """Of those that take part in it: forwards of the others are of steps that are over."""
        return list(dict.fromkeys([self, *(run.owner.audit for run in runs)]))


def _known(audits: Sequence[Audit], device: torch.device) -> set[int]:
    """Identities of what is there now, whatever a checkpoint makes again."""
    found = dict(returned_storages(device))
    for audit in audits:
        for part in audit._standing(device):
            found |= ChainMap(part.sizes, *(moving.now() for moving in part.moving))
        found |= audit._brought(device)
        found |= audit.given.held(device) | audit.saved.held(device)
    return set(found)


def _is_run(root: torch.Tensor) -> bool:
    """Whether a run of a graph has made a tensor, and none of autograd's nodes after it."""
    return root.grad_fn is not None and run_of(root.grad_fn) is not None


def _tensors_of(roots: Roots) -> list[torch.Tensor]:
    """Where a backward begins, but for edges."""
    return [root for root in roots if isinstance(root, torch.Tensor)]


def _about(device: torch.device, runs: Sequence[Run] | None = None) -> int:
    """How much graphs have returned that is held: a number that stays while it grows a little."""
    kept_nbytes = sum(nbytes for _, nbytes in returned_storages(device, runs))
    return about(kept_nbytes, PER_OCTAVE)


def names_of(runs: Sequence[Run]) -> tuple[Hashable, ...]:
    """What tells situations of open runs apart."""
    return tuple(map(operator.attrgetter("situation"), runs))


def sizes_of_runs(runs: Sequence[Run]) -> tuple[int, ...]:
    """What symbolic sizes stand for in open runs."""
    return tuple(itertools.chain.from_iterable(map(operator.attrgetter("sizes"), runs)))


def names_behind(roots: Roots) -> tuple[str, ...]:
    """What tells backwards apart: the last operations before them, those of a loss."""
    return names_from(first_nodes(roots))
