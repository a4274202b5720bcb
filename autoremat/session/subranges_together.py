"""Plans for parts of the ranges of sizes, of several graphs of one step.

Enters: `Steps` that are settled, all of whose graphs were planned for ranges of the same sizes.
Leaves: for parts of the ranges, a plan of each graph beside that for the largest sizes. Guarantees:
a step of the sizes of a part is within the budget where its graphs run by the plans for it, and
where some of them run by those for the largest sizes, as one does whose code cannot be compiled.

A graph saves more at smaller sizes than there is room for beside the others at their largest: so
all graphs are planned anew for the same part of the ranges, as a step of its own. The sizes of a
call are those of all graphs, which choose the same part by them.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autoremat import _torch
from autoremat.planning.part import Part
from autoremat.planning.pipeline import over_sizes, stated_at
from autoremat.planning.sizes import Symbols, sizes_of
from autoremat.planning.subranges import MOST, WORTH
from autoremat.session.settling import planned_together
from autoremat.session.steps import Steps

MOST_GRAPHS = 4  # of a step, as all mixes of two plans of each are looked at
Named = Mapping[str, int]  # sizes by the names that users have for them


class Together:
    """Of the graphs of one step."""

    def __init__(
        self,
        steps: Steps,
        dynamo: Mapping[str, _torch.DynamoGraph],
        lows: Mapping[str, Symbols],
        names: Sequence[str],
    ) -> None:
        """Nothing is planned yet.

        Args:
            steps: the session's.
            dynamo: its graphs, as Dynamo handed them over.
            lows: by graph, the smallest sizes that were said.
            names: of the step's graphs.
        """
        self._steps, self._dynamo, self._lows, self._names = steps, dynamo, lows, names

    def plan(self) -> list[dict[str, Part]]:
        """Plans for parts of the ranges, by graph, the fastest first."""
        found: list[dict[str, Part]] = []
        for corner in _corners(self._wholes, self._lows):
            parts = self._planned_at(corner, found)
            if parts is not None and self.fit(parts):
                found.append(parts)
        return sorted(found, key=lambda parts: _slowdown(parts.values()))

    @property
    def _wholes(self) -> dict[str, Part]:
        return {name: self._steps.graphs.parts[name] for name in self._names}

    def _planned_at(
        self, corner: Named, others: Sequence[Mapping[str, Part]]
    ) -> dict[str, Part] | None:
        """The step planned for a part of the ranges; None if it is no faster there, or unproven."""
        wholes = self._wholes
        numbers = {name: _numbers(part, corner) for name, part in wholes.items()}
        known = [p for p in others if all(p[name].is_for(numbers[name]) for name in wholes)]
        worth = WORTH[self._steps.options.setting.compiler].other  # all graphs are searched anew
        most = (1 - worth) * min(_slowdown(parts.values()) for parts in [wholes, *known])
        if most <= 1 or any(part.choice.torchs is not None for part in wholes.values()):
            return None
        aside = _aside(self._steps)
        for name, part in wholes.items():
            aside.graphs.parts[name] = self._stated_at(name, part, numbers[name])
        planned = planned_together(aside, self._dynamo)
        if aside.peak_to_come_nbytes > aside.budget_nbytes or set(planned) != set(wholes):
            return None
        if any(len(parts) != 1 for parts in planned.values()):
            return None  # of a graph with two plans for its runs
        found = {name: replace(parts[0], smaller=()) for name, parts in planned.items()}
        are_proven = all(part.covered and part.covered.is_proven for part in found.values())
        return found if are_proven and _slowdown(found.values()) < most else None

    def _stated_at(self, name: str, part: Part, numbers: Symbols) -> Part:
        """A graph by its plan for the largest sizes, to be planned for these."""
        setting, high = self._steps.options.setting, sizes_of(part.subject)
        with self._dynamo[name].resumed():  # generated code may be read
            subject = stated_at(part.subject, numbers, setting)
            subject = over_sizes(subject, self._lows.get(name, {}), setting)
        there = part.at(numbers)
        ratios = {symbol: high[symbol] / n for symbol, n in numbers.items()}
        shrunk = part.covered.shrunk(ratios) if part.covered else 1.0
        whole = replace(there.planned.whole, subject=subject)
        return replace(
            there, planned=whole, planned_for=None, shrunk=shrunk, corner=shrunk, _reports={}
        )

    def fit(self, parts: Mapping[str, Part]) -> bool:
        """Whether a step is within the budget whichever of its graphs run by these plans.

        Args:
            parts: by graph, for one part of the ranges; the others run by those for the largest.
        """
        aside, within = _aside(self._steps), _least_of(parts.values())
        wholes = {name: part.at(_numbers(part, within)) for name, part in self._wholes.items()}
        for count in range(1, len(parts) + 1):
            for names in itertools.combinations(parts, count):
                taken = {name: parts[name] for name in names}
                aside.graphs.parts = {**aside.graphs.parts, **wholes, **taken}
                if aside.peak_to_come_nbytes > aside.budget_nbytes:
                    return False
        return True


def are_of_one_step(parts: Mapping[str, Part], lows: Mapping[str, Symbols]) -> bool:
    """Whether graphs have ranges of the same sizes, each of which is known by its name."""
    return 1 < len(parts) <= MOST_GRAPHS and bool(_ranges(parts, lows))


def _aside(steps: Steps) -> Steps:
    found = copy.copy(steps)
    found.graphs = steps.graphs.apart()
    return found


def _ranges(parts: Mapping[str, Part], lows: Mapping[str, Symbols]) -> dict[str, tuple[int, int]]:
    """By name, from where to where; {} unless all graphs have the same."""
    found: list[dict[str, tuple[int, int]]] = []
    for name, part in parts.items():
        low, high = lows.get(name, {}), sizes_of(part.subject)
        known = part.covered.names if part.covered is not None else {}
        if set(high) != set(low) & set(known):
            return {}
        found.append({known[symbol]: (low[symbol], n) for symbol, n in high.items()})
    return found[0] if found and all(one == found[0] for one in found) else {}


def _corners(parts: Mapping[str, Part], lows: Mapping[str, Symbols]) -> Iterator[Named]:
    """Upper corners of parts of the ranges: the largest sizes of some, about half of others."""
    ranges = {n: r for n, r in _ranges(parts, lows).items() if r[0] < r[1]}
    if len(ranges) == 1:
        ((name, (low, high)),) = ranges.items()
        steps = dict.fromkeys(low + (high - low) * share // 4 for share in (3, 2, 1))
        yield from ({name: step} for step in steps if step < high)
        return
    halves = [(high, low + (high - low) // 2) for low, high in ranges.values()]
    corners = [dict(zip(ranges, corner, strict=True)) for corner in itertools.product(*halves)]
    fixed = {n: high for n, (low, high) in _ranges(parts, lows).items() if low == high}
    largest_first = sorted(corners[1:], key=lambda corner: -math.prod(corner.values()))
    yield from ({**fixed, **corner} for corner in largest_first[:MOST])


def _numbers(part: Part, sizes: Named) -> dict[object, int]:
    """What a graph's symbols stand for; its largest for a size that is not among these."""
    assert part.covered is not None
    names = part.covered.names
    return {symbol: sizes.get(names[symbol], n) for symbol, n in sizes_of(part.subject).items()}


def _least_of(parts: Iterable[Part]) -> dict[str, int]:
    """The largest sizes that all of these are for."""
    found: dict[str, int] = {}
    for part in parts:
        assert part.covered is not None
        for symbol, high in sizes_of(part.subject).items():
            name = part.covered.names[symbol]
            found[name] = min(high, found.get(name, high))
    return found


def _slowdown(parts: Iterable[Part]) -> float:
    """What a step takes by plans, by what it takes without; each as its own sizes are priced."""
    choices = [part.choice for part in parts]
    time_us = sum(choice.solution.timeline.time_us for choice in choices)
    return time_us / max(1e-9, sum(choice.baseline_time_us() for choice in choices))
