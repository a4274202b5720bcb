"""The peaks of one part of a step, found once for runs that are as others were.

Enters: the runs of a part, and the plans of its graphs. Leaves: what is held beside each graph, and
the highest peaks. Guarantees: an answer is kept as long as all that it depends on is the same.

Each step asks several times, and steps that are all alike get what the first of them found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from autoremat.planning.allotting import Runs
from autoremat.planning.nesting import Around, Beside, Crossing
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran, facts_of

_MOST = 32  # answers: parts of steps, each beside what was known at a time


class Peaks(NamedTuple):
    """Of a part.

    Attributes:
        graphs_nbytes: the highest of its graphs, 0 without any.
        eager_nbytes: the same of code in eager mode between them.
        host_nbytes: what waits elsewhere, where values of all runs do at once.
    """

    graphs_nbytes: int
    eager_nbytes: int
    host_nbytes: int

    @property
    def nbytes(self) -> int:
        """The highest on the device."""
        return max(self.graphs_nbytes, self.eager_nbytes)


class KnownPeaks:
    """Of one session's steps."""

    def __init__(self) -> None:
        """None yet."""
        self._plans: Mapping[str, Part] = {}
        self._known: dict[Hashable, Peaks] = {}

    def of(
        self,
        part: Sequence[Ran],
        plans: Mapping[str, Part],
        beside: Hashable,
        find: Callable[[], Peaks],
    ) -> Peaks:
        """The peaks of a part of a step.

        Args:
            part: its runs.
            plans: all that there are now, by name.
            beside: what else they depend on.
            find: finds them, if none is known of such runs.
        """
        if not _are_same(plans, self._plans):
            self._plans, self._known = dict(plans), {}
        known, facts = self._known, (beside, *map(facts_of, part))  # other threads may ask as well
        found = known.get(facts)
        if found is None:
            found = find()
            if len(known) >= _MOST:
                known.clear()
            known[facts] = found
        return found


def _are_same(plans: Mapping[str, Part], others: Mapping[str, Part]) -> bool:
    """Whether no plan is another one: they are not compared any closer."""
    return list(plans) == list(others) and all(map(operator.is_, plans.values(), others.values()))


def peaks_of(runs: Runs, around: Around) -> Peaks:
    """The highest of its graphs and of the code between them, and what waits elsewhere."""
    eager_nbytes = runs.eager_peak_nbytes(_crossing(runs), around)
    return Peaks(peak_of(runs, around), eager_nbytes, runs.host_nbytes)


def peak_of(runs: Runs, around: Around) -> int:
    """The highest of its graphs, 0 without any."""
    held = beside_graphs(runs, around)
    return max((part.peak_nbytes(held[name]) for name, part in runs.parts.items()), default=0)


def beside_graphs(runs: Runs, around: Around) -> dict[str, Beside]:
    """What is held beside each graph, by name."""
    return dict(zip(runs.parts, runs.beside(_crossing(runs), around), strict=True))


def beside_plain_graphs(runs: Runs, around: Around) -> dict[str, Beside]:
    """The same where no graph runs by a plan."""
    return dict(zip(runs.parts, runs.beside(plain_crossings(runs), around), strict=True))


def plain_crossings(runs: Runs) -> list[Crossing]:
    """What each graph hands to its backward where none runs by a plan."""
    return [part.planned.whole.plain_crossing for part in runs.parts.values()]


def _crossing(runs: Runs) -> list[Crossing]:
    """What each graph hands to its backward."""
    return [part.figures.crossing for part in runs.parts.values()]
