"""The graphs of one step, side by side.

Enters: each graph as it was planned, and in which order the step runs them. Leaves: what is held
while one of them runs and, where the step is planned anew, what each plan is `Allotted`.
Guarantees: a graph that runs several times counts as often, each time as the plan of that run.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.planning.allotting import (
    Allotted,
    Runs,
    allot,
    graph_of_plan,
    leanest_nbytes,
    richer,
)
from autoremat.planning.nesting import Around, Beside, Region, Returned
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran, Readers, apart, as_run, with_spare
from autoremat.planning.repeats import Repeats, fewer
from autoremat.reporting import GraphReport


@dataclass
class Step:
    """The graphs that were planned so far.

    Steps that several threads take at once are not told apart: the latest to begin is the step.
    A step has several parts where reentrant checkpoints take forwards again in its backward, one
    after the other: each part is a row of runs that are nested. Else it is one.

    Attributes:
        parts: plans by name: that of the graph, or `richer` of it.
        rich_from: by graph whose last runs have a plan of their own, the first of them.
        planned_runs: by graph, how many runs its plans were made for; further ones are lean.
        provisional: graphs that were planned to keep little, as nobody knew how often they run.
        most_runs: of graphs in one step, as far as steps before the latest have shown.
        repeats: how often steps have run its graphs.
        spare: by graph, for how many runs more than any step has had it is planned.
        eager_gradient_nbytes: of layers among the runs that are in eager mode, by their names.
        existing_gradient_nbytes: gradients that existed already when a graph was planned.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    rich_from: dict[str, int] = field(default_factory=dict)
    planned_runs: dict[str, int] = field(default_factory=dict)
    provisional: set[str] = field(default_factory=set)
    most_runs: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    spare: dict[str, int] = field(default_factory=dict)
    eager_gradient_nbytes: dict[str, int] = field(default_factory=dict)
    existing_gradient_nbytes: int = 0
    _ran: list[Ran] | None = None  # in the latest part of a step; None if nobody tells
    _earlier: list[list[Ran]] = field(default_factory=list)  # parts of the same step before it
    _longest: list[list[Ran]] = field(default_factory=list)  # of the step with the most runs so far
    _readers: Readers = field(default_factory=Readers)
    _expected: dict[str, Iterator[Ran]] = field(default_factory=dict)  # by graph, in their order
    _waiting: list[str] = field(default_factory=list)  # planned, and did not run yet
    _thread: int = 0
    _is_planned_only: bool = False  # what has run, since nothing did yet by the plans that are new

    def apart(self) -> Step:
        """A step like this one, which may be planned otherwise while this one stays."""
        other = copy.copy(self)
        other.parts, other.planned_runs = dict(self.parts), dict(self.planned_runs)
        other.repeats = copy.copy(self.repeats)
        other._readers = Readers()
        if not other.longest:
            other.note_longest()
        return other

    def begin(self, open_runs: Sequence[Ran] = (), *, goes_on: bool = False) -> None:
        """A forward begins, of which each run of a graph will be told.

        Args:
            open_runs: of forwards before it, whose backward is still to come.
            goes_on: whether it is one of the same step.
        """
        now = self.note_longest()
        if not goes_on:
            self.repeats.step_is_over()
            self._is_planned_only = False
        self.most_runs = max(self.most_runs, len(self.runs or ()))
        self._earlier = now if goes_on else []
        if self.runs is None or self.runs != [ran.name for ran in open_runs]:
            self._ran = list(open_runs)
            self._readers.clear()
        self._waiting, self._thread = [], threading.get_ident()
        if not goes_on:
            self._expect()

    def _expect(self) -> None:
        """A step begins, whose runs will be like those of the longest one."""
        longest = [ran for part in self._longest for ran in part]
        graphs = dict.fromkeys(ran.graph for ran in longest)
        self._expected = {g: iter([ran for ran in longest if ran.graph == g]) for g in graphs}

    def note_longest(self) -> list[list[Ran]]:
        """A step is over, or as good as over; its parts."""
        now = self._step
        if self._is_planned_only:
            return now
        self.repeats.note([ran.graph for ran in part] for part in now)
        if sum(map(len, now)) >= sum(map(len, self._longest)):
            self._longest = [[replace(ran, name=ran.graph) for ran in part] for part in now]
        return now

    def add(self, name: str, part: Part) -> None:
        """Keep a graph that was planned."""
        self.parts[name] = part
        self.existing_gradient_nbytes = part.resident.parts.gradients_nbytes
        if self.is_here:
            self._waiting.append(name)

    def drop(self, name: str) -> None:
        """Forget a graph that could not be compiled as planned."""
        self.parts.pop(name, None)
        self._waiting = [other for other in self._waiting if other != name]

    def ran(self, name: str, args: Sequence[Any] = (), region: int = 0) -> Ran:
        """A graph runs its forward, with these arguments, in this region of a checkpoint."""
        ran = Ran(name, Region(region))
        if self._ran is None or not self.is_here or name not in self.parts:
            return ran
        planned = (ran for ran in reversed(self._ran) if ran.name in self.parts)
        before = next((ran.region.number for ran in planned), 0)
        if region not in (0, before) and self.parts[name].figures.device_type == "cpu":
            ran.region = Region(region, state_nbytes=_torch.rng_state_nbytes())
        ran.expect(next(self._expected.get(ran.graph, iter(())), None))
        self._ran.append(ran)
        self._waiting = [other for other in self._waiting if other != name]
        self._readers.note(ran, self.parts[name], args)
        return ran

    def ran_eagerly(self, layer: str, gradient_nbytes: int, region: int = 0) -> None:
        """A layer ran in eager mode; its gradients come from the backward of its last run on."""
        if self._ran is not None and self.is_here:
            before = [ran for ran in self._ran if ran.name != layer]
            self._ran = [*before, Ran(layer, Region(region))]
            self.eager_gradient_nbytes[layer] = gradient_nbytes

    def earlier(self, name: str) -> list[Part]:
        """The graphs that ran before one that is being planned, each once."""
        return [self.parts[other] for other in dict.fromkeys(r.name for r in self._before(name))]

    def held_nbytes(self, name: str) -> int:
        """What crosses the forwards and backwards of the runs before that of a graph."""
        before = self._before(name)
        return sum(ran.kept(self.parts[ran.name]).waiting_nbytes for ran in before)

    def _before(self, name: str) -> list[Ran]:
        """The runs before a graph's first one; a recompile takes the old place."""
        order = [ran for ran in self._latest if ran.name in self.parts]
        return list(itertools.takewhile(lambda ran: ran.name != name, order))

    @property
    def is_here(self) -> bool:
        """Whether this thread takes the step."""
        return self._thread == threading.get_ident()

    @property
    def runs(self) -> list[str] | None:
        """Names of the plans that ran in the latest step, in its order; None if nobody tells."""
        return None if self._ran is None else [ran.name for ran in self._ran]

    @property
    def longest(self) -> list[str]:
        """Graphs of the longest step that is planned for, part by part, in their order."""
        return [ran.name for part in self._to_plan for ran in part]

    @property
    def _to_plan(self) -> list[list[Ran]]:
        """The step with the most runs so far, and those that there may be more."""
        return [with_spare(part, self.spare) for part in self._longest]

    def leave_room(self, budget_nbytes: int, around: Around) -> None:
        """From now on plans are for as many runs as there may be.

        Or for half as many more than there were, or a quarter, where no plans are within the
        budget otherwise.
        """
        self.repeats.planned()
        self.spare = self.repeats.spare([ran.graph for part in self._longest for ran in part])
        while self.spare and self._leanest_nbytes(around) > budget_nbytes:
            self.spare = fewer(self.spare)

    def _leanest_nbytes(self, around: Around) -> int:
        return max(leanest_nbytes(self._runs_in(part), around) for part in self._to_plan)

    def peak_with_more(self, around: Around) -> int:
        """The highest of a step under the present plans that has as many runs as there may be."""
        spare = self.repeats.spare([ran.graph for part in self._longest for ran in part])
        parts = (self._planned(with_spare(part, spare)) for part in self._longest)
        return max((_peak_of(self._runs_in(part), around) for part in parts), default=0)

    @property
    def _latest(self) -> list[Ran]:
        """What has run or will, in the latest part of the latest step."""
        waiting = self.parts if self._ran is None else self._waiting
        return [*(self._ran or ()), *map(Ran, waiting)]

    @property
    def _step(self) -> list[list[Ran]]:
        """The parts of the latest step."""
        return apart([*self._earlier, self._latest])

    def reports(self, around: Around, *, reads: bool) -> Iterator[GraphReport]:
        """Of every graph of the step, that part first which takes the most; see `Part.report`."""
        found: dict[str, tuple[Part, Beside]] = {}
        for runs in sorted(self._runs, key=lambda runs: -_peak_of(runs, around)):
            held = _beside(runs, around)
            found |= {n: (runs.parts[n], held[n]) for n in held if n not in found}
        yield from (part.report(held, reads=reads) for part, held in found.values())

    def beside(self, around: Around) -> dict[str, Beside]:
        """What is held beside each graph of the step's latest part, by name, in their order."""
        return _beside(self._runs_in(self._latest), around)

    @property
    def orders(self) -> list[list[Ran]]:
        """The parts of the longest step by which its graphs are planned, each by the first."""
        seen: set[str] = set()
        found = []
        for part in self._to_plan:
            graphs = {ran.graph for ran in part}
            if not graphs <= seen:
                found.append(part)
            seen |= graphs
        return found

    def allotted(
        self,
        order: Sequence[Ran],
        budget_nbytes: int,
        around: Around,
        setting: Setting,
        *,
        is_nested: bool,
    ) -> list[Allotted]:
        """What each plan of each graph gets of the budget.

        Args:
            order: a part of the longest step so far.
            budget_nbytes: of the whole step.
            around: what is held beside its graphs.
            setting: how they are planned.
            is_nested: whether the backward of a later run comes first; else all runs are alike.
        """
        runs = replace(self._runs_in(order), is_nested=is_nested)
        return allot(runs, budget_nbytes, around, setting)

    def take(
        self, order: Sequence[Ran], parts: Mapping[str, Part], rich_from: Mapping[str, int]
    ) -> None:
        """Run its graphs under other plans from now on.

        Args:
            order: the part of the longest step that they were made for.
            parts: by name of the plan.
            rich_from: by graph whose last runs have a plan of their own, the first of them.
        """
        graphs = {graph_of_plan(plan) for plan in parts}
        others = {n: p for n, p in self.parts.items() if graph_of_plan(n) not in graphs}
        self.parts = {**others, **parts}
        self.rich_from = {n: r for n, r in self.rich_from.items() if n not in graphs} | {
            **rich_from
        }
        runs = Counter(ran.graph for ran in order if not ran.is_spare)
        self.planned_runs |= {graph: runs[graph] for graph in graphs}
        planned = [self._planned(part) for part in self._to_plan]
        self._earlier, self._ran = planned[1:], planned[0]
        self._is_planned_only = True
        self._readers.clear()

    def _planned(self, part: Sequence[Ran]) -> list[Ran]:
        """A part of a step under the plans that there are now."""
        graphs = [ran.graph for ran in part]
        return [
            replace(ran, name=self._plan_for(ran.graph, graphs[:number]))
            for number, ran in enumerate(part)
        ]

    def next_plan(self, graph: str) -> str:
        """The plan of a graph that runs now."""
        if self.runs is None or not self.is_here:
            return graph
        return self._plan_for(graph, list(map(graph_of_plan, self.runs)))

    @property
    def graphs(self) -> list[str]:
        """The graphs of the latest step's runs, whatever their plans, part by part."""
        return [ran.graph for part in self._step for ran in part]

    @property
    def kept(self) -> set[str]:
        """The graphs of the latest step through which a backward has gone that keeps its graph."""
        return {ran.graph for part in self._step for ran in part if ran.is_kept}

    def _plan_for(self, graph: str, before: Sequence[str]) -> str:
        first_run, runs = self.rich_from.get(graph), before.count(graph)
        is_rich = first_run is not None and first_run <= runs < self.planned_runs[graph]
        return richer(graph) if is_rich else graph

    def peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs and of the code between them."""
        return max(self.graphs_peak_nbytes(around), self.eager_peak_nbytes(around))

    def graphs_peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs, 0 without any."""
        return max((_peak_of(runs, around) for runs in self._runs), default=0)

    @property
    def longest_as_planned(self) -> list[Part]:
        """The plan of each run of a graph in the longest step, one after the other."""
        runs = [ran for part in self._longest for ran in self._planned(part)]
        return [self.parts[ran.name] for ran in runs if ran.name in self.parts]

    def eager_peak_nbytes(self, around: Around) -> int:
        """The highest while code in eager mode goes backward, as far as a step has shown it."""
        if not self.current or not around.eager_nbytes:
            return 0
        resident_nbytes = max(part.resident_nbytes for part in self.current)
        crossing_nbytes = max(
            sum(kept.known_nbytes for kept in runs.kept(_crossing(runs))) for runs in self._runs
        )
        return resident_nbytes + crossing_nbytes + around.eager_nbytes

    @property
    def current(self) -> list[Part]:
        """The graphs of the step, each once."""
        found: dict[str, Part] = {}
        for runs in self._runs:
            found |= runs.parts
        return list(found.values())

    @property
    def _runs(self) -> list[Runs]:
        """The parts of the latest step."""
        return [self._runs_in(part) for part in self._step]

    def _runs_in(self, all_ran: Sequence[Ran]) -> Runs:
        """A step that runs graphs, and layers in eager mode, in this order."""
        order = [ran.name for ran in all_ran]
        parts = {
            name: _as_in_step(self.parts[name], [ran for ran in all_ran if ran.name == name])
            for name in dict.fromkeys(order)
            if name in self.parts
        }
        layers = dict.fromkeys(name for name in order if name not in parts)
        numbers = {name: number for number, name in enumerate([*parts, *layers])}
        return Runs(
            parts,
            [numbers[name] for name in order],
            [
                ran.returned(parts[ran.name])
                if ran.name in parts
                else Returned(self.eager_gradient_nbytes.get(ran.name, 0))
                for ran in all_ran
            ],
            [ran.region for ran in all_ran],
            self.existing_gradient_nbytes,
            [ran.is_spare for ran in all_ran],
        )


def _beside(runs: Runs, around: Around) -> dict[str, Beside]:
    """What is held beside each graph, by name."""
    return dict(zip(runs.parts, runs.beside(_crossing(runs), around), strict=True))


def _as_in_step(part: Part, runs: Sequence[Ran]) -> Part:
    """A plan as its runs are, whichever backward goes through them."""
    part = as_run(part, runs)
    return part.kept if any(ran.is_kept for ran in runs) else part


def _peak_of(runs: Runs, around: Around) -> int:
    """The highest of its graphs, 0 without any."""
    held = _beside(runs, around)
    return max((part.peak_nbytes(held[name]) for name, part in runs.parts.items()), default=0)


def _crossing(runs: Runs) -> list[int]:
    """What each graph hands to its backward."""
    return [part.figures.crossing_nbytes for part in runs.parts.values()]
