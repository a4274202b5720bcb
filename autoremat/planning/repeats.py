"""How often steps run blocks that are alike, and how many runs a plan has to leave room for.

Enters: the kind of block that each graph is of, with how many there are, and the runs of each step.
Leaves: by graph, how many runs more than any step has had. Guarantees: none where the number of
runs has not varied and all blocks that are there have run.

A plan for as many runs as were seen is above the budget in the first step that has more. How many
there can be is known where each block runs once: as many as there are blocks. It is not known where
code calls blocks again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEADY = 8  # steps with the same number of runs: blocks that ran in none of them are left out
TWICE = 2  # of runs whose number varies and cannot be known, so many times the most are planned for
_ALIKE = 2  # steps that have to agree on a number that cannot be known


@dataclass(frozen=True)
class Seen:
    """How often steps have run the blocks of a kind.

    Attributes:
        most: runs in one step.
        fewest: the same, of steps that had any.
        steps: how many such steps there were.
    """

    most: int
    fewest: int
    steps: int = 1

    def and_of(self, other: Seen) -> Seen:
        """Of other steps as well."""
        most, fewest = max(self.most, other.most), min(self.fewest, other.fewest)
        return Seen(most, fewest, self.steps + other.steps)

    @property
    def has_varied(self) -> bool:
        """Whether two steps differed."""
        return self.most != self.fewest

    @property
    def may_differ(self) -> bool:
        """Whether there were too few steps to show it."""
        return not self.has_varied and self.steps < _ALIKE

    def is_bounded(self, blocks: int) -> bool:
        """Whether the number of blocks says how many runs there can be: each runs as often.

        It does not where all of them may have run again and again, one round after the other.
        """
        are_rounds = (
            blocks and self.most > blocks and self.most % blocks == 0 == self.fewest % blocks
        )
        return bool(blocks) and not are_rounds

    def expected(self, blocks: int) -> int:
        """How many runs a plan has to leave room for, of so many blocks."""
        if not self.is_bounded(blocks):
            return TWICE * self.most if self.has_varied else self.most
        if not self.has_varied and self.steps >= STEADY:
            return self.most
        return -(-self.most // blocks) * blocks


class _Planned(NamedTuple):
    """For how many runs of a kind of block a step is planned.

    Attributes:
        most: that it had.
        room: that it may have.
    """

    most: int
    room: int


class Repeats:
    """Of the graphs of one session.

    Attributes:
        kinds: by graph, what blocks have in common that run it; None if nobody knows.
        count: how many blocks of a kind there are; 0 if nobody knows.
    """

    def __init__(self, count: Callable[[Hashable], int] = lambda _: 0) -> None:
        """No step yet."""
        self.kinds: dict[str, Hashable | None] = {}
        self.count = count
        self._before: dict[Hashable, Seen] = {}  # in steps that are over
        self._now: dict[Hashable, Seen] = {}  # in the one that is there
        self._planned: dict[Hashable, _Planned] = {}

    def note(self, parts: Iterable[Sequence[str]]) -> None:
        """The step that is there has run these graphs so far, part by part."""
        runs = Counter[Hashable]()
        for part in parts:
            runs |= Counter(map(self._kind, part))
        self._now = {kind: Seen(count, count) for kind, count in runs.items()}

    def step_is_over(self) -> None:
        """What comes next is another one."""
        self._before, self._now = self._seen, {}

    @property
    def _seen(self) -> dict[Hashable, Seen]:
        """In all steps."""
        found = dict(self._before)
        for kind, now in self._now.items():
            found[kind] = found[kind].and_of(now) if kind in found else now
        return found

    @property
    def is_unclear(self) -> bool:
        """Whether a block runs several times, and only another step can tell if always so often."""
        few = ((self.count(kind), seen) for kind, seen in self._seen.items() if seen.may_differ)
        return any(blocks and not seen.is_bounded(blocks) for blocks, seen in few)

    @property
    def needs_room(self) -> bool:
        """Whether steps may have more runs than they were planned for, who left no room for any."""
        return any(now.room > then.room == then.most for then, now in self._changes)

    @property
    def is_outgrown(self) -> bool:
        """Whether half of the room or more has come into use, or room is needed no more."""
        return any(
            then.room > now.room or (now.most > then.most and 2 * now.most >= then.most + then.room)
            for then, now in self._changes
        )

    @property
    def _changes(self) -> Iterator[tuple[_Planned, _Planned]]:
        """What each kind is planned for, and what it would be planned for now."""
        for kind, seen in self._seen.items():
            yield self._planned.get(kind, _Planned(seen.most, seen.most)), self._plan(kind, seen)

    def planned(self) -> None:
        """The step is planned for the numbers that are known now."""
        self._planned = {kind: self._plan(kind, seen) for kind, seen in self._seen.items()}

    def _plan(self, kind: Hashable, seen: Seen) -> _Planned:
        return _Planned(seen.most, seen.expected(self.count(kind)))

    def spare(self, order: Sequence[str]) -> dict[str, int]:
        """How many runs more than these a step may have, by graph.

        Of several graphs of a kind, that counts which has the most runs: the first block's is
        another one where what it is given needs no gradient.
        """
        runs = Counter(order)
        found: dict[str, int] = {}
        by_kind: dict[Hashable, list[str]] = {}
        for graph in runs:
            by_kind.setdefault(self._kind(graph), []).append(graph)
        seen = self._seen
        for kind, graphs in by_kind.items():
            room = self._plan(kind, seen[kind]).room if kind in seen else 0
            found[max(graphs, key=runs.__getitem__)] = room - sum(runs[g] for g in graphs)
        return {graph: count for graph, count in found.items() if count > 0}

    def _kind(self, graph: str) -> Hashable:
        """Of a graph that is of no known block, it alone."""
        kind = self.kinds.get(graph)
        return graph if kind is None else kind


def fewer(spare: Mapping[str, int]) -> dict[str, int]:
    """Half as many."""
    return {graph: count // 2 for graph, count in spare.items() if count > 1}
