"""How often steps run blocks that are alike, and how many runs a plan has to leave room for.

Enters: the kind of block that each graph is of, with how many there are, and the runs of each step.
Leaves: by graph, how many runs more than a step has had. Guarantees: none where the number of
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
        blocks: how many blocks of the kind there were in them; 0 if nobody knew.
    """

    most: int
    fewest: int
    steps: int = 1
    blocks: int = 0

    def and_of(self, other: Seen) -> Seen:
        """Of later steps as well; they alone count if there were other blocks in them."""
        if other.blocks != self.blocks:
            return other
        most, fewest = max(self.most, other.most), min(self.fewest, other.fewest)
        return Seen(most, fewest, self.steps + other.steps, self.blocks)

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
        then = self.blocks or blocks
        are_rounds = then and self.most > then and self.most % then == 0 == self.fewest % then
        return bool(blocks) and not are_rounds

    def expected(self, blocks: int) -> int:
        """How many runs a plan has to leave room for, of so many blocks."""
        if not self.is_bounded(blocks):
            return TWICE * self.most if self.has_varied else self.most
        then = self.blocks or blocks
        if not self.has_varied and self.steps >= STEADY and blocks == then:
            return self.most
        return -(-self.most // then) * blocks


class _Planned(NamedTuple):
    """For how many runs of a kind of block a step is planned.

    Attributes:
        most: that it had.
        room: that it may have.
        blocks: how many of the kind there were.
    """

    most: int
    room: int
    blocks: int


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
            runs |= Counter(map(self.kind_of, part))
        self._now = {k: Seen(n, n, blocks=self.count(k)) for k, n in runs.items()}

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
        """Whether steps may have more runs than they were planned for.

        As the number varies for the first time, or there are more blocks.
        """
        return any(
            now.room > then.room and (then.room == then.most or now.blocks > then.blocks)
            for then, now in self._changes
        )

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
            now = self._plan(kind, seen)
            yield self._planned.get(kind, now._replace(room=seen.most)), now

    def planned(self) -> None:
        """The step is planned for the numbers that are known now."""
        self._planned = {kind: self._plan(kind, seen) for kind, seen in self._seen.items()}

    def _plan(self, kind: Hashable, seen: Seen) -> _Planned:
        blocks = self.count(kind)
        return _Planned(seen.most, seen.expected(blocks), blocks)

    @property
    def rooms(self) -> dict[Hashable, int]:
        """How many runs a step may have, by kind."""
        return {kind: self._plan(kind, seen).room for kind, seen in self._seen.items()}

    def spare(self, order: Iterable[str], rooms: Mapping[Hashable, int]) -> dict[str, int]:
        """How many runs more than these a step may have, by graph.

        Of several graphs of a kind, that counts which has the most runs: the first block's is
        another one where what it is given needs no gradient.

        Args:
            order: graphs, as a step runs them.
            rooms: how many runs there may be, by kind.
        """
        runs = Counter(order)
        found: dict[str, int] = {}
        by_kind: dict[Hashable, list[str]] = {}
        for graph in runs:
            by_kind.setdefault(self.kind_of(graph), []).append(graph)
        for kind, graphs in by_kind.items():
            most = max(graphs, key=runs.__getitem__)
            found[most] = rooms.get(kind, 0) - sum(runs[graph] for graph in graphs)
        return {graph: count for graph, count in found.items() if count > 0}

    def kind_of(self, graph: str) -> Hashable:
        """Of a graph that is of no known block, it alone."""
        kind = self.kinds.get(graph)
        return graph if kind is None else kind


def granted(
    wanted: Mapping[Hashable, int], fits: Callable[[Mapping[Hashable, int]], bool]
) -> dict[Hashable, int]:
    """As many runs of each kind as there is room for.

    Args:
        wanted: runs, by kind, those first that are to be granted first.
        fits: whether there is room for so many.
    """
    found: dict[Hashable, int] = {}
    for kind, most in wanted.items():
        if fits(found | {kind: most}):
            found[kind] = most
            continue
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(found | {kind: middle}) else (low, middle)
        found[kind] = low
    return found
