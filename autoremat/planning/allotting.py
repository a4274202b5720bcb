"""What each graph of a step gets of the budget, once all of its runs are known.

Enters: the planned graphs of a step, and the order of their runs. Leaves: an `Allotted` for each
plan that is to be made: one for a graph, or two, if its last runs are to keep more.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from autoremat_solver.policies import recompute_all

from autoremat.ask.options import Setting
from autoremat.host.memory import Host
from autoremat.planning.nesting import (
    Around,
    Beside,
    Crossing,
    Kept,
    Region,
    Returned,
    beside_each,
    highest,
    placed,
)
from autoremat.planning.part import Part
from autoremat.planning.sharing import Member, Share, Shared, Way, divide
from autoremat.planning.simulated import plans_at_once
from autoremat.planning.ways import crossing_nbytes, least_crossing, room_beside, way_of, ways_of
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject

_FINENESS = 1 / 64  # to which an even share is found
_LOWER = 0.95  # of the leanest step so far: what is tried next
_WORTH, _ROUNDS = 0.99, 5  # of it: what makes another round worthwhile; and how many there are
_FEW = 3  # searches for each graph in the rounds after the first
_RICHER = ", last runs"


def graph_of_plan(plan: str) -> str:
    """Name of the graph that a plan is one of."""
    return plan.removesuffix(_RICHER)


def richer(graph: str) -> str:
    """Name of the plan for the last runs of a graph, where they have one of their own."""
    return graph + _RICHER


@dataclass(frozen=True)
class Allotted:
    """What a plan is to be made for.

    Attributes:
        graph: its name.
        first_run: given for the second plan of a graph: the number, among the runs of that, from
            which on it applies.
        found: what is held beside it.
        kept_nbytes: what it may keep from forward to backward; None if nothing runs in between.
        budget_nbytes: of the whole step; or the smallest peak found, if that is above it.
        gathered_nbytes: of what is held, parameters that stay gathered.
        held: as of `Part`.
        host_share: of what the host has for values that wait, where they may.
    """

    graph: str
    first_run: int | None
    found: Beside
    kept_nbytes: int | None
    budget_nbytes: int
    gathered_nbytes: int = 0
    held: float = 1.0
    host_share: float = 1.0

    @property
    def plan(self) -> str:
        """Its name."""
        return self.graph if self.first_run is None else richer(self.graph)

    def place(self, subject: Subject, around: Around) -> Subject:
        """The graph with what the others take from the budget.

        Args:
            subject: the graph alone.
            around: what the step holds beside its graphs.
        """
        # What a look finds while eager code goes backward has what stays gathered among it.
        room_nbytes = max(0, around.room_nbytes - self.gathered_nbytes)
        if self.kept_nbytes is not None:
            left_nbytes = room_beside(subject, self.found, self.kept_nbytes, self.budget_nbytes)
            room_nbytes = max(room_nbytes, left_nbytes)
        lowered = placed(subject.lowered, self.found, room_nbytes)
        return replace(with_share(subject, self.host_share), lowered=lowered)


@dataclass(frozen=True)
class Runs:
    """A step that has run.

    Attributes:
        parts: its graphs, by name, in the order of their first runs.
        order: the number of each run: of a graph, or beyond those of a layer in eager mode.
        gradients: by run, what its backward returns.
        regions: by run, of which checkpoint it is in.
        existing_nbytes: gradients that exist before it.
        spare: by run, whether it is one that no step has had.
        is_nested: whether the backward of a later run comes first.
    """

    parts: Mapping[str, Part]
    order: Sequence[int]
    gradients: Sequence[Returned]
    regions: Sequence[Region]
    existing_nbytes: int
    spare: Sequence[bool]
    is_nested: bool = True

    @property
    def resident_nbytes(self) -> int:
        """Of the graph that counts most: a backend learns of parameters with those that read them.

        What code before a graph held, or what is gathered for it, is left out.
        """
        return max((part.step_resident_nbytes for part in self.parts.values()), default=0)

    def kept(self, crossing: Sequence[Crossing]) -> list[Kept]:
        """What each run keeps for its backward, where the graphs hand so much to theirs."""
        parts = list(self.parts.values())
        return [
            parts[n].kept_by(region, crossing[n]) if n < len(parts) else Kept.of(region)
            for n, region in zip(self.order, self.regions, strict=True)
        ]

    def eager_peak_nbytes(self, crossing: Sequence[Crossing], around: Around) -> int:
        """The highest while code in eager mode runs and all wait, as far as a step has shown it."""
        if not (self.parts and around.eager_nbytes):
            return 0
        resident_nbytes = max(part.resident_nbytes for part in self.parts.values())
        crossing_nbytes = sum(kept.known_nbytes for kept in self.kept(crossing))
        return resident_nbytes + crossing_nbytes + around.eager_nbytes

    def beside(self, crossing: Sequence[Crossing], around: Around) -> list[Beside]:
        """What is held beside each graph, where they hand so much to their backwards."""
        kept = self.kept(crossing)
        each = list(beside_each(kept, self.gradients, self.existing_nbytes))
        resident_nbytes = self.resident_nbytes
        result = []
        for number, part in enumerate(self.parts.values()):
            found = highest(found for n, found in zip(self.order, each, strict=True) if n == number)
            later = Around(held_nbytes=resident_nbytes - part.step_resident_nbytes)
            result.append(around.beside(later.beside(found)))
        return result

    def gathered(self, crossing: Sequence[Crossing]) -> list[int]:
        """Of what is held beside each graph, parameters that stay gathered."""
        each = accumulate((kept.gathered_nbytes for kept in self.kept(crossing)), initial=0)
        most = Counter[int]()
        for number, nbytes in zip(self.order, each, strict=False):  # the last is behind all runs
            most[number] = max(most[number], nbytes)
        return [most[number] for number in range(len(self.parts))]

    @functools.cached_property
    def host_shares(self) -> list[float]:
        """What a run of each graph may take of the host: as it could save, of what all could.

        Values of all runs may wait at once.
        """
        parts = list(self.parts.values())
        if all(part.subject.host is None for part in parts):
            return [1.0] * len(parts)
        problems = [part.subject.lowered.problem for part in parts]
        most = [max(1, crossing_nbytes(one, as_written(one))) for one in problems]
        total_nbytes = sum(most[n] for n in self.order if n < len(parts))
        return [nbytes / max(nbytes, total_nbytes) for nbytes in most]

    @property
    def host_nbytes(self) -> int:
        """What waits elsewhere, where values of all runs do at once."""
        parts = list(self.parts.values())
        return sum(parts[n].figures.host_nbytes for n in self.order if n < len(parts))

    def has_region(self, number: int) -> bool:
        """Whether a run of a graph is in a checkpoint: a rerun has to save what the first has."""
        runs = zip(self.order, self.regions, strict=True)
        return any(n == number and region.number for n, region in runs)

    def hands_on(self, number: int) -> bool:
        """Whether anything runs between the forward of a run of a graph and its backward.

        Of one that is in a checkpoint, the forward of its rerun.
        """
        numbers = [region.number for region in self.regions]
        pairs = zip(self.order, numbers, numbers[1:], strict=False)  # nothing is behind the last
        return any(n == number and own in (0, later) for n, own, later in pairs)


def allot(runs: Runs, budget_nbytes: int, around: Around, setting: Setting) -> list[Allotted]:
    """What each plan of each graph gets.

    Where the budget cannot be kept, that of the leanest step that is found. Ways are searched for
    beside a budget, and one far below what a step takes leads to none of use: so the next budget is
    always a little below the step found last, and needs few more ways than are known by then.

    Args:
        runs: the step.
        budget_nbytes: of all of it; 0 for the leanest step, whose results are gone.
        around: what it holds beside its graphs.
        setting: how they are planned.
    """
    is_least = budget_nbytes == 0
    ways = _ways(runs, budget_nbytes, around, setting, is_least=is_least)
    shared = _shared(runs, ways, around)
    shares = divide(shared, budget_nbytes)
    peak_nbytes = shared.peak_nbytes(shares)
    for _ in range(_ROUNDS):
        lower_nbytes = int(_LOWER * peak_nbytes)
        if lower_nbytes <= budget_nbytes:
            break
        more = _ways(runs, lower_nbytes, around, setting, is_least=is_least, searches=_FEW)
        ways = [known | new for known, new in zip(ways, more, strict=True)]
        other = _shared(runs, ways, around)
        lower = divide(other, lower_nbytes)
        if other.peak_nbytes(lower) > _WORTH * peak_nbytes:
            break
        shared, shares, peak_nbytes = other, lower, other.peak_nbytes(lower)
    return list(_allotted(runs, shared, shares, max(budget_nbytes, peak_nbytes)))


def _ways(
    runs: Runs,
    budget_nbytes: int,
    around: Around,
    setting: Setting,
    *,
    is_least: bool,
    **searches: int,
) -> list[set[Way]]:
    """How each graph could run beside the others in a budget; as it does now, too."""
    parts, evenly = runs.parts.values(), _evenly(runs, budget_nbytes, around)
    shares = zip(parts, runs.host_shares, strict=True)
    subjects = [with_share(part.subject, share) for part, share in shares]
    return [
        {
            _as_run(part, way, lets_go=is_least)
            for way in (
                *_present(part, subject.host),
                *ways_of(subject, found, kept, budget_nbytes, setting, **searches),
            )
        }
        for part, subject, (found, kept) in zip(parts, subjects, evenly, strict=True)
    ]


def with_share(subject: Subject, share: float) -> Subject:
    """A graph whose values may take so much of what the host has for those that wait."""
    if subject.host is None or share == 1:
        return subject
    return replace(subject, host=subject.host.shared(share))


def _present(part: Part, host: Host | None) -> Iterator[Way]:
    """By the plan that a graph has: a search that is cut short may find none that is as good."""
    figures, crossing = part.figures, part.figures.crossing
    if host is not None and figures.host_nbytes > host.free_nbytes:
        return
    peaks = figures.forward_nbytes, figures.backward_nbytes
    time_us = part.choice.solution.timeline.time_us
    gone_nbytes = figures.given_away_nbytes
    yield Way(crossing.nbytes, *peaks, time_us, crossing.passed_nbytes, gone_nbytes)


def _shared(runs: Runs, ways: Sequence[Set[Way]], around: Around) -> Shared:
    """A step whose graphs could run in these ways."""
    members = [
        Member(
            runs.resident_nbytes - part.step_resident_nbytes + part.resident_nbytes,
            tuple(sorted(of_part, key=astuple)),
            part.kept_by,
            part.in_forward,
            runs.has_region(number),
        )
        for number, (part, of_part) in enumerate(zip(runs.parts.values(), ways, strict=True))
    ]
    return Shared(
        members,
        runs.order,
        runs.gradients,
        runs.regions,
        around,
        runs.existing_nbytes,
        runs.spare,
        runs.is_nested,
    )


def _allotted(
    runs: Runs, shared: Shared, shares: Sequence[Share], budget_nbytes: int
) -> Iterator[Allotted]:
    plans = [plan for n, share in enumerate(shares) for plan in _plans(n, share, shared)]
    order = _by_plan(runs, plans, len(shares))
    names, parts = list(runs.parts), list(runs.parts.values())
    of_plans = {f"plan {n}": parts[plan.graph] for n, plan in enumerate(plans)}
    by_plan = replace(runs, parts=of_plans, order=order)
    crossing = [plan.way.crossing for plan in plans]
    found, gathered = by_plan.beside(crossing, shared.around), by_plan.gathered(crossing)
    for number, plan in enumerate(plans):
        yield Allotted(
            names[plan.graph],
            plan.first_run,
            found[number],
            plan.way.crossing_nbytes if by_plan.hands_on(number) else None,
            budget_nbytes,
            gathered[number],
            parts[plan.graph].held,
            runs.host_shares[plan.graph],
        )


class _Plan(NamedTuple):
    """One of a graph's.

    Attributes:
        graph: its number.
        way: what the plan is to be like.
        first_run: as of `Allotted`.
    """

    graph: int
    way: Way
    first_run: int | None = None


def _plans(number: int, share: Share, shared: Shared) -> Iterator[_Plan]:
    """The plan of a graph, or the lean and the rich one."""
    ways, lean_runs = shared.members[number].ways, shared.runs_of(number) - share.rich_runs
    if not share.rich_runs or lean_runs or shared.has_spare(number):
        yield _Plan(number, ways[share.lean])
        if share.rich_runs:
            yield _Plan(number, ways[share.rich], lean_runs)
    else:
        yield _Plan(number, ways[share.rich])


def _by_plan(runs: Runs, plans: Sequence[_Plan], graphs: int) -> list[int]:
    """The number of each run by the plan that it gets, those of layers behind those of plans."""
    seen = Counter[int]()
    found = []
    for number, spare in zip(runs.order, runs.spare, strict=True):
        if number >= graphs:
            found.append(len(plans) + number - graphs)
            continue
        first, *second = (n for n, plan in enumerate(plans) if plan.graph == number)
        rich_from = plans[second[0]].first_run if second else None
        is_rich = rich_from is not None and rich_from <= seen[number] and not spare
        found.append(second[0] if is_rich else first)
        seen[number] += 1
    return found


def _evenly(runs: Runs, budget_nbytes: int, around: Around) -> list[tuple[Beside, int]]:
    """What is beside each graph, and what it keeps, where all keep the same share of the most.

    The largest share at which each run fits beside what the earlier ones keep, on a line between a
    graph that keeps the least and one that recomputes nothing.
    """
    parts = list(runs.parts.values())
    pairs = [_ends(part) for part in parts]

    def at(share: float) -> tuple[bool, list[tuple[Beside, int]]]:
        ways = [_between(lean, rich, share) for lean, rich in pairs]
        crossing = [way.crossing for way in ways]
        found = runs.beside(crossing, around)
        peak_nbytes = _peak_of(parts, ways, found)
        kept = [each.nbytes for each in crossing]
        return peak_nbytes <= budget_nbytes, list(zip(found, kept, strict=True))

    low, high = 0.0, 1.0
    while high - low > _FINENESS and not at(high)[0]:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[0] else (low, middle)
    return at(high)[1] if at(high)[0] else at(low)[1]


def leanest_ways(parts: Mapping[str, Part]) -> dict[str, Way]:
    """What keeps the least, of each graph."""
    return {name: _ends(part)[0] for name, part in parts.items()}


def leanest_nbytes(runs: Runs, leanest: Mapping[str, Way], around: Around) -> int:
    """About what a step takes in which all graphs keep the least, which goes these ways."""
    ways = [leanest[name] for name in runs.parts]
    crossing = [way.crossing for way in ways]
    peak_nbytes = _peak_of(list(runs.parts.values()), ways, runs.beside(crossing, around))
    return max(peak_nbytes, runs.eager_peak_nbytes(crossing, around))


def _peak_of(parts: Sequence[Part], ways: Sequence[Way], found: Sequence[Beside]) -> int:
    """The highest of graphs that go these ways beside others."""
    return max(
        part.resident_nbytes + way.peak_beside(each)
        for part, way, each in zip(parts, ways, found, strict=True)
    )


def _ends(part: Part) -> tuple[Way, Way]:
    """What keeps the least, at the smallest peaks known; and what recomputes nothing."""
    subject, problem = part.subject, part.subject.lowered.problem
    leanest, richest = way_of(subject, recompute_all(problem)), way_of(subject, as_written(problem))
    known = [way_of(subject, plan) for plan in plans_at_once(problem).values()]
    peaks = [part.own_peaks, *((w.forward_nbytes, w.backward_nbytes) for w in (leanest, *known))]
    forward_nbytes, backward_nbytes = min(peaks, key=max)
    leanest = replace(leanest, forward_nbytes=forward_nbytes, backward_nbytes=backward_nbytes)
    leanest = replace(leanest, crossing_nbytes=least_crossing(subject, leanest))
    return _as_run(part, leanest), _as_run(part, richest)


def _as_run(part: Part, way: Way, *, lets_go: bool = False) -> Way:
    """A way to run a graph as its runs are: results are gone, or checkpoints run it again."""
    lower_nbytes = part.lower_by(way.given_away_nbytes) if lets_go and part.held < 1 else 0
    way = replace(way, backward_nbytes=way.backward_nbytes - lower_nbytes, given_away_nbytes=0)
    if not part.is_run_again:
        return way
    again_nbytes = way.forward_nbytes + sum(part.subject.lowered.shell.tangents.values())
    return replace(way, backward_nbytes=max(again_nbytes, way.backward_nbytes))


def _between(lean: Way, rich: Way, share: float) -> Way:
    """On the line from one to the other."""
    pairs = zip(astuple(lean), astuple(rich), strict=True)
    return Way(*(type(low)(low + share * (high - low)) for low, high in pairs))
