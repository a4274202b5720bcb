"""The forms that steps have, by the kinds of graphs that they run.

Enters: the runs of each step. Leaves: the steps that are planned for, each with as many runs of a
kind as any step of its form has had. Guarantees: each kind that has run is in one of them, or, with
`others`, each graph of the latest steps.

Steps that run the same kinds, or some of them, are of one form: in the next one all may come
together, each as often as it ever did. Of steps that differ otherwise nobody knows at first if one
may run what both do; that no other form came for many steps shows that they are trainings in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

from autoremat.planning.ran import Ran
from autoremat.planning.repeats import STEADY

_MANY = 4  # forms: if there are more, each kind comes and goes by itself

Parts = list[list[Ran]]  # of a step, as of `Step`


@dataclass
class _Form:
    """Steps alike.

    Attributes:
        kinds: that they run.
        parts: of one that has the most runs of each kind.
    """

    kinds: frozenset[Hashable]
    parts: Parts


class Forms:
    """Of the steps of one session."""

    def __init__(self, kind_of: Callable[[str], Hashable]) -> None:
        """No step yet; graphs are of these kinds."""
        self._kind_of = kind_of
        self._known: list[_Form] = []
        self._steady = 0  # steps since there is another form
        self._number = 0  # of this step
        # By their graphs, with the number of the step, in the order in which they were told.
        self._latest: dict[frozenset[str], tuple[int, Parts]] = {}

    def note(self, parts: Parts) -> None:
        """The step that is there has run these graphs so far, part by part."""
        self._note_latest(parts)
        kinds = frozenset(self._kind_of(ran.graph) for part in parts for ran in part)
        form = next((form for form in self._known if kinds <= form.kinds), None)
        if form is not None:
            form.parts = self._most(form.parts, parts, has_all=kinds == form.kinds)
        elif kinds:
            self._add(_Form(kinds, parts))

    def note_again(self) -> None:
        """The same as noted last."""
        if self._latest:
            graphs = next(reversed(self._latest))
            self._latest[graphs] = self._number, self._latest[graphs][1]

    def _note_latest(self, parts: Parts) -> None:
        graphs = frozenset(ran.graph for part in parts for ran in part)
        _, before = self._latest.pop(graphs, (0, parts))
        self._latest[graphs] = self._number, max(parts, before, key=runs_of)

    def _add(self, form: _Form) -> None:
        self._steady = 0
        for other in self._known:
            if other.kinds < form.kinds:
                form.parts = self._most(form.parts, other.parts, has_all=False)
        known = [other for other in self._known if not other.kinds < form.kinds]
        self._known = [*known, form]
        if len(self._known) > _MANY:
            self._known = [self._as_one(self._known)]

    def step_is_over(self) -> None:
        """What comes next is another one."""
        self._steady += 1
        self._number += 1
        recent = self._number - STEADY
        self._latest = {
            graphs: (number, parts)
            for graphs, (number, parts) in self._latest.items()
            if number >= recent
        }

    def steps(self, *, are_together: bool) -> list[Parts]:
        """Those that are planned for, the longest first.

        Args:
            are_together: whether one step is taken to run what steps of all forms do, unless these
                are known to be apart.
        """
        is_one = are_together and self._may_be_one
        found = [self._as_one(self._known)] if is_one else self._known
        return sorted((form.parts for form in found), key=runs_of, reverse=True)

    def seen(self) -> list[Parts]:
        """Those that steps have shown, none of which is taken to run what others do."""
        steps = self.steps(are_together=False)
        return [*steps, *self.others(steps)]

    def others(self, steps: Sequence[Parts]) -> list[Parts]:
        """Of the latest steps those with graphs that none of these runs, each as it was seen.

        Of a kind there are several graphs where its inputs differ: a critic's that reads data, and
        then what needs gradients. A form has those with the most runs.
        """
        known = {ran.graph for parts in steps for part in parts for ran in part}
        found = []
        for graphs, (_, parts) in sorted(self._latest.items(), key=lambda of: -runs_of(of[1][1])):
            if not graphs <= known:
                found.append(parts)
                known |= graphs
        return found

    @property
    def _may_be_one(self) -> bool:
        """Whether too few steps have shown that these forms are apart."""
        are_rows = all(len(form.parts) == 1 for form in self._known)
        return len(self._known) > 1 and are_rows and self._steady < STEADY

    def _as_one(self, forms: Sequence[_Form]) -> _Form:
        """A step that runs what all of these do."""
        kinds = frozenset[Hashable]().union(*(form.kinds for form in forms))
        parts = (form.parts for form in forms)
        return _Form(kinds, reduce(lambda a, b: self._most(a, b, has_all=False), parts))

    def _most(self, one: Parts, other: Parts, *, has_all: bool) -> Parts:
        """A step with the most runs of each kind that either has; of as many those of the other.

        Parts are nested in ways of their own: of several it is the longer step if that `has_all`
        kinds, and else the one.
        """
        base, more = (one, other) if runs_of(one) > runs_of(other) else (other, one)
        if len(base) != 1 or len(more) != 1:
            return base if has_all else one
        order, others = base[0], more[0]
        for kind in dict.fromkeys(self._kinds_in(others)):
            theirs = [ran for ran in others if self._kind_of(ran.graph) == kind]
            mine = [at for at, ran in enumerate(order) if self._kind_of(ran.graph) == kind]
            if len(theirs) > len(mine):
                place = self._place_of(kind, order, others)
                before = [ran for at, ran in enumerate(order[:place]) if at not in mine]
                order = [*before, *theirs, *order[place:]]
            elif others is other[0] and len(theirs) == len(mine):
                latest = dict(zip(mine, theirs, strict=True))
                order = [latest.get(at, ran) for at, ran in enumerate(order)]
        return [order]

    def _place_of(self, kind: Hashable, order: Sequence[Ran], others: Sequence[Ran]) -> int:
        """Behind which of one order's runs those of a kind come, as they do in another."""
        kinds, theirs = self._kinds_in(order), self._kinds_in(others)
        before = [k for k in theirs[: theirs.index(kind) + 1] if k in kinds]
        return len(kinds) - kinds[::-1].index(before[-1]) if before else 0

    def _kinds_in(self, order: Sequence[Ran]) -> list[Hashable]:
        return [self._kind_of(ran.graph) for ran in order]


def runs_of(parts: Parts) -> int:
    """How many runs a step has."""
    return sum(map(len, parts))
