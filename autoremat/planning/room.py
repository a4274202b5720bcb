"""Which steps plans are made for, and for how many runs of each kind of graph.

Enters: the forms that steps have had, how often they ran each kind, and what steps of so many runs
would take. Leaves: the steps to plan for, and whether the present plans are for others than are
due. Guarantees: as many runs as there may be are planned for, or as many as the leanest plans have
room for: those of kinds first that need little.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from autoremat.planning.forms import Forms, Parts
from autoremat.planning.nesting import Around
from autoremat.planning.ran import with_spare
from autoremat.planning.repeats import Repeats, granted
from autoremat.planning.sharing import Way

# What steps take at least, beside this: the leanest ways of graphs that are known are given, and
# those that were missing are there afterwards.
LeanestNbytes = Callable[[Sequence[Parts], dict[str, Way], Around], int]
PeakNbytes = Callable[[Sequence[Parts], Around], int]  # of steps by the present plans


class Room:
    """Of the steps of one session.

    Attributes:
        rooms: by kind of graph, for how many runs its graphs are planned at least.
        are_together: whether they are planned as if one step may run what different ones did.
    """

    def __init__(
        self, forms: Forms, repeats: Repeats, leanest_nbytes: LeanestNbytes, peak_nbytes: PeakNbytes
    ) -> None:
        """Nothing was planned yet."""
        self.rooms: dict[Hashable, int] = {}
        self.are_together = False
        self._forms = forms
        self._repeats = repeats
        self._leanest_nbytes = leanest_nbytes
        self._peak_nbytes = peak_nbytes
        self._planned_for: list[set[str]] = []  # graphs of each step
        self._made_for: list[set[Hashable]] = []  # kinds in each, as of the plans
        self._with_spare: tuple[object, list[Parts]] | None = None  # for what, and the steps

    def like(self, other: Room) -> Room:
        """This one, with the same planned for as by another."""
        self.rooms, self.are_together = other.rooms, other.are_together
        self._planned_for, self._made_for = other._planned_for, other._made_for
        return self

    @property
    def steps(self) -> list[Parts]:
        """The longest step of each form, with the runs that there may be more."""
        return self._steps(self.rooms, are_together=self.are_together)

    @property
    def longest(self) -> list[list[str]]:
        """Graphs of these steps, of each part by part, in their order."""
        return [[ran.graph for part in parts for ran in part] for parts in self.steps]

    def leave(self, budget_nbytes: int, around: Around) -> None:
        """From now on plans are for as many runs as there may be, or as there is room for."""
        leanest: dict[str, Way] = {}
        wanted = self._repeats.rooms

        def nbytes(rooms: Mapping[Hashable, int]) -> int:
            return self._least_nbytes(rooms, leanest, around)

        self.are_together = True
        self.are_together = nbytes({}) <= budget_nbytes
        self.rooms = wanted
        if nbytes(wanted) > budget_nbytes:
            needed = {kind: nbytes({kind: room}) for kind, room in wanted.items()}
            in_order = {kind: wanted[kind] for kind in sorted(wanted, key=needed.__getitem__)}
            self.rooms = granted(in_order, lambda rooms: nbytes(rooms) <= budget_nbytes)
        self._note_planned()
        self._made_for = self._kinds

    def suffices(self, budget_nbytes: int, around: Around) -> bool:
        """Whether the present plans do for as many runs as there may be: for these then."""
        steps = self._steps(self._repeats.rooms, are_together=True)
        if self._peak_nbytes(steps, around) > budget_nbytes:
            return False
        self.rooms, self.are_together = self._repeats.rooms, True
        self._note_planned()
        return True

    @property
    def is_needed(self) -> bool:
        """Whether steps may have more runs than were planned for, or others together."""
        is_new = any(
            not any(known.issuperset(graphs) for known in self._planned_for)
            for graphs in self.longest
        )
        return (bool(self._planned_for) and is_new) or self._repeats.needs_room

    def is_outgrown(self, budget_nbytes: int, around: Around) -> bool:
        """Whether plans for other runs would recompute less, and leave as much room as there is.

        Much of the room is used or needed no more, or steps have come to be apart.
        """
        now = self._kinds
        is_apart = any(not any(made <= kinds for kinds in now) for made in self._made_for)
        if not (is_apart or self._repeats.is_outgrown):
            return False
        if self._least_nbytes(self._repeats.rooms, {}, around) <= budget_nbytes:
            return True
        self._note_planned()  # as it is
        self._made_for = now
        return False

    def least_nbytes(self, around: Around) -> int:
        """About what the steps that are planned for take at least, beside this."""
        return self._least_nbytes(self.rooms, {}, around)

    def _steps(self, rooms: Mapping[Hashable, int], *, are_together: bool) -> list[Parts]:
        """These steps, so many runs of each kind being planned for."""
        steps = self._forms.steps(are_together=are_together)
        facts = steps, dict(rooms), dict(self._repeats.kinds)
        if self._with_spare is None or self._with_spare[0] != facts:
            found = []
            for parts in steps:
                spare = self._repeats.spare((ran.graph for part in parts for ran in part), rooms)
                found.append([with_spare(part, spare) for part in parts])
            self._with_spare = facts, found
        found = self._with_spare[1]
        return [*found, *self._forms.others(found)]

    def _least_nbytes(
        self, rooms: Mapping[Hashable, int], leanest: dict[str, Way], around: Around
    ) -> int:
        steps = self._steps(rooms, are_together=self.are_together)
        return self._leanest_nbytes(steps, leanest, around)

    @property
    def _kinds(self) -> list[set[Hashable]]:
        return [set(map(self._repeats.kind_of, graphs)) for graphs in self.longest]

    def _note_planned(self) -> None:
        self._repeats.planned()
        self._planned_for = list(map(set, self.longest))
