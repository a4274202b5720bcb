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
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.memory.spread import Traffic
from autoremat.planning.allotting import (
    Allotted,
    Runs,
    allot,
    graph_of_plan,
    leanest_nbytes,
    leanest_ways,
    richer,
)
from autoremat.planning.choice import recomputed_share
from autoremat.planning.forms import Forms, Parts
from autoremat.planning.nesting import ALONE, Around, Beside, Region
from autoremat.planning.part import Part
from autoremat.planning.peaks import (
    KnownPeaks,
    Peaks,
    beside_graphs,
    beside_plain_graphs,
    peak_of,
    peaks_of,
    plain_crossings,
)
from autoremat.planning.ran import Ran, Readers, apart, as_runs, facts_of
from autoremat.planning.repeats import Repeats
from autoremat.planning.room import Room
from autoremat.planning.sharing import Way
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
        forms: which of them steps have run.
        room: which steps are planned for, and for how many runs.
        eager_gradient_nbytes: of layers among the runs that are in eager mode, by their names.
        existing_gradient_nbytes: gradients that existed already when a graph was planned.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    rich_from: dict[str, int] = field(default_factory=dict)
    planned_runs: dict[str, int] = field(default_factory=dict)
    provisional: set[str] = field(default_factory=set)
    most_runs: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    eager_gradient_nbytes: dict[str, int] = field(default_factory=dict)
    existing_gradient_nbytes: int = 0
    _ran: list[Ran] | None = None  # in the latest part of a step; None if nobody tells
    _earlier: list[list[Ran]] = field(default_factory=list)  # parts of the same step before it
    _readers: Readers = field(default_factory=Readers)
    _expected: dict[str, Iterator[Ran]] = field(default_factory=dict)  # by graph, in their order
    _waiting: list[str] = field(default_factory=list)  # planned, and did not run yet
    _thread: int = 0
    _noted: object = None  # what `forms` were told of last
    _known_peaks: KnownPeaks = field(default_factory=KnownPeaks)
    _is_planned_only: bool = False  # what has run, since nothing did yet by the plans that are new

    def __post_init__(self) -> None:
        """No step yet."""
        self.forms = Forms(self.repeats.kind_of)
        self.room = self._new_room()

    def _new_room(self) -> Room:
        return Room(self.forms, self.repeats, self._leanest_nbytes, self._peak_of_steps)

    def apart(self) -> Step:
        """A step like this one, which may be planned otherwise while this one stays."""
        other = copy.copy(self)
        other.parts, other.planned_runs = dict(self.parts), dict(self.planned_runs)
        other.repeats, other.forms = copy.copy(self.repeats), copy.copy(self.forms)
        other.room = other._new_room().like(self.room)
        other._readers, other._known_peaks = Readers(), KnownPeaks()
        if not other.room.longest:
            other.note_longest()
        return other

    def begin(self, open_runs: Sequence[Ran] = (), *, goes_on: bool = False) -> None:
        """A forward begins, of which each run of a graph will be told.

        Args:
            open_runs: of forwards before it, whose backward is still to come.
            goes_on: whether it is one of the same step.
        """
        self._thread = threading.get_ident()
        if goes_on and not self._waiting and self._ran == list(open_runs):
            return  # the same part has one more: it is noted once all of it has run
        now = self.note_longest()
        if not goes_on:
            self.repeats.step_is_over()
            self.forms.step_is_over()
            self._is_planned_only = False
        self.most_runs = max(self.most_runs, len(self.runs or ()))
        self._earlier = now if goes_on else []
        if self.runs is None or self.runs != [ran.name for ran in open_runs]:
            self._ran = list(open_runs)
            self._readers.clear()
        self._waiting = []
        if not goes_on:
            self._expect()

    def _expect(self) -> None:
        """A step begins, whose runs will be like those of the longest one."""
        self._expected = {}
        for parts in self.forms.seen():
            runs = [ran for part in parts for ran in part]
            for graph in {ran.graph for ran in runs} - self._expected.keys():
                self._expected[graph] = iter([ran for ran in runs if ran.graph == graph])

    def note_longest(self) -> list[list[Ran]]:
        """A step is over, or as good as over; its parts."""
        now = self._step
        if self._is_planned_only:
            return now
        self.repeats.note([ran.graph for ran in part] for part in now)
        facts = dict(self.repeats.kinds), [[facts_of(ran) for ran in part] for part in now]
        if facts == self._noted:
            self.forms.note_again()
        else:
            self.forms.note([[replace(ran, name=ran.graph) for ran in part] for part in now])
            self._noted = facts
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

    def before(self, ran: Ran) -> Ran | None:
        """The run before one that has begun last, if it is of the step."""
        now = self._ran or ()
        return now[-2] if len(now) > 1 and now[-1] is ran else None

    def note_traffic(
        self, ran: Ran, part: Part, find: Callable[[torch.device], Traffic | None]
    ) -> None:
        """What processes that share the model move for the run that has begun last, if it is new.

        Args:
            ran: the run.
            part: its graph.
            find: finds it, on a device.
        """
        if ran.region.traffic is not None or part.resident.traffic == ALONE:
            return
        traffic = find(torch.device(part.figures.device_type))
        if traffic is not None:
            before = [other.region.traffic for other in self._ran or () if other is not ran]
            ran.region = ran.region._replace(traffic=traffic.after(before[-1] if before else None))

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

    def waiting_nbytes(self, name: str) -> int:
        """What of these waits elsewhere, at most."""
        return sum(self.parts[ran.name].figures.host_nbytes for ran in self._before(name))

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
    def known_graphs(self) -> list[str]:
        """The graphs of the steps that are planned for, each once."""
        return list(dict.fromkeys(graph for step in self.room.longest for graph in step))

    def steps_with(self, graph: str) -> list[list[str]]:
        """The graphs of each form of step that runs this one, in their order."""
        found = [[ran.graph for part in parts for ran in part] for parts in self.forms.seen()]
        return [graphs for graphs in found if graph in graphs]

    def _leanest_nbytes(
        self, steps: Sequence[Parts], leanest: dict[str, Way], around: Around
    ) -> int:
        """About what steps take where all graphs keep the least; see `room.LeanestNbytes`."""
        runs = [self._runs_in(part) for parts in steps for part in parts]
        for each in runs:
            leanest |= leanest_ways({n: p for n, p in each.parts.items() if n not in leanest})
        return max((leanest_nbytes(each, leanest, around) for each in runs), default=0)

    def peak_to_come(self, around: Around) -> int:
        """The highest of the steps that are planned for, under the present plans."""
        return self._peak_of_steps(self.room.steps, around)

    def host_nbytes(self, around: Around) -> int:
        """What may wait elsewhere at once in the latest step, and in those that are planned for."""
        latest = (self._peaks(part, around) for part in self._step)
        every = itertools.chain(latest, self._all_peaks(self.room.steps, around))
        return max((found.host_nbytes for found in every), default=0)

    def _peak_of_steps(self, steps: Sequence[Parts], around: Around) -> int:
        return max((found.nbytes for found in self._all_peaks(steps, around)), default=0)

    def _all_peaks(self, steps: Sequence[Parts], around: Around) -> Iterator[Peaks]:
        parts = (self._planned(part) for parts in steps for part in parts)
        return (self._peaks(part, around) for part in parts)

    def _peaks(self, part: Sequence[Ran], around: Around) -> Peaks:
        beside = around, self.existing_gradient_nbytes, *self.eager_gradient_nbytes.items()
        return self._known_peaks.of(
            part, self.parts, beside, lambda: peaks_of(self._runs_in(part), around)
        )

    @property
    def _latest(self) -> list[Ran]:
        """What has run or will, in the latest part of the latest step."""
        waiting = self.parts if self._ran is None else self._waiting
        return [*(self._ran or ()), *map(Ran, waiting)]

    @property
    def _step(self) -> list[list[Ran]]:
        """The parts of the latest step."""
        return apart([*self._earlier, self._latest])

    def reports(self, around: Around, *, reads: bool, accumulates: bool) -> Iterator[GraphReport]:
        """Of every graph of the step, that part first which takes the most; see `Part.report`."""
        found: dict[str, tuple[Part, Beside, Beside]] = {}
        for runs in sorted(self._runs, key=lambda runs: -peak_of(runs, around)):
            held = beside_graphs(runs, around)
            is_told = reads or not any(part.choice.is_read for part in runs.parts.values())
            is_one = len(runs.order) < 2
            plain = beside_plain_graphs(runs, around) if is_told and not is_one else held
            found |= {n: (runs.parts[n], held[n], plain[n]) for n in held if n not in found}
        yield from (
            part.report(held, plain, reads=reads, accumulates=accumulates)
            for part, held, plain in found.values()
        )

    def beside(
        self, around: Around, instead: Mapping[str, Part] | None = None
    ) -> dict[str, Beside]:
        """What is held beside each graph of the step's latest part, by name, in their order.

        Args:
            around: what is held beside all of them.
            instead: by name of a plan, for a part of its ranges, the one that its graph runs by.
        """
        return beside_graphs(self._runs_in(self._latest, {**self.parts, **(instead or {})}), around)

    @property
    def orders(self) -> list[list[Ran]]:
        """The parts of steps by which their graphs are planned, each by the longest."""
        seen: set[str] = set()
        found = []
        for part in self._parts_to_plan:
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
            order: a part of a step that is planned for.
            budget_nbytes: of the whole step.
            around: what is held beside its graphs.
            setting: how they are planned.
            is_nested: whether the backward of a later run comes first; else all runs are alike.
        """
        runs = replace(self._runs_in(order), is_nested=is_nested)
        return allot(runs, budget_nbytes, around, setting)

    def take(
        self,
        order: Sequence[Ran],
        parts: Mapping[str, Part],
        rich_from: Mapping[str, int],
        done: Set[str] = frozenset(),
    ) -> None:
        """Run its graphs under other plans from now on: the latest step is taken to be by these.

        Args:
            order: the part of a step that they were made for.
            parts: by name of the plan.
            rich_from: by graph whose last runs have a plan of their own, the first of them.
            done: other graphs that have new plans.
        """
        graphs = {graph_of_plan(plan) for plan in parts}
        others = {n: p for n, p in self.parts.items() if graph_of_plan(n) not in graphs}
        self.parts = {**others, **parts}
        self.rich_from = {n: r for n, r in self.rich_from.items() if n not in graphs} | {
            **rich_from
        }
        runs = Counter(ran.graph for ran in order if not ran.is_spare)
        self.planned_runs = {**self.planned_runs, **{graph: runs[graph] for graph in graphs}}
        new = {*done, *graphs}
        known = {graph_of_plan(plan) for plan in self.parts}
        all_new = [p for p in self._parts_to_plan if {r.graph for r in p} & known <= new]
        planned = [self._planned(part) for part in all_new or [list(order)]]
        self._earlier, self._ran = planned[1:], planned[0]
        self._is_planned_only = True
        self._readers.clear()

    @property
    def _parts_to_plan(self) -> list[list[Ran]]:
        """Of all steps, the longest first."""
        return sorted((part for parts in self.room.steps for part in parts), key=len, reverse=True)

    def _planned(self, part: Sequence[Ran]) -> list[Ran]:
        """A part of a step under the plans that there are now."""
        graphs = [ran.graph for ran in part]
        return [
            replace(ran, name=self._plan_for(ran.graph, graphs[:number]))
            for number, ran in enumerate(part)
        ]

    def next_plan(self, graph: str) -> str:
        """The plan of a graph that runs now."""
        if graph not in self.rich_from or self._ran is None or not self.is_here:
            return graph
        return self._plan_for(graph, [ran.graph for ran in self._ran])

    @property
    def graphs(self) -> list[str]:
        """The graphs of the latest step's runs, whatever their plans, part by part."""
        return [ran.graph for part in self._step for ran in part]

    @property
    def kept(self) -> set[str]:
        """The graphs of the latest step through which a backward has gone that keeps its graph."""
        return {ran.graph for part in self._step for ran in part if ran.is_kept}

    @property
    def lasting(self) -> set[tuple[str, str]]:
        """The same, and those whose results somebody held as a backward of that step began."""
        ran = [ran for part in self._step for ran in part]
        held = {(one.graph, "results") for one in ran if not one.region.is_gone}
        return held | {(graph, "graph") for graph in self.kept}

    def _plan_for(self, graph: str, before: Sequence[str]) -> str:
        first_run, runs = self.rich_from.get(graph), before.count(graph)
        is_rich = first_run is not None and first_run <= runs < self.planned_runs[graph]
        return richer(graph) if is_rich else graph

    def peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs and of the code between them."""
        return max(self.graphs_peak_nbytes(around), self.eager_peak_nbytes(around))

    def graphs_peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs, 0 without any."""
        return max((self._peaks(part, around).graphs_nbytes for part in self._step), default=0)

    @property
    def longest_as_planned(self) -> list[Part]:
        """The plan of each run of a graph in the longest step, one after the other."""
        longest = self.forms.steps(are_together=False)[:1]
        runs = [ran for parts in longest for part in parts for ran in self._planned(part)]
        return [self.parts[ran.name] for ran in runs if ran.name in self.parts]

    def eager_peak_nbytes(self, around: Around) -> int:
        """The highest while code in eager mode goes backward, as far as a step has shown it."""
        return max((self._peaks(part, around).eager_nbytes for part in self._step), default=0)

    def baseline_eager_peak_nbytes(self, around: Around) -> int:
        """The same where no graph runs by a plan."""
        if not around.eager_nbytes:
            return 0
        peaks = (runs.eager_peak_nbytes(plain_crossings(runs), around) for runs in self._runs)
        return max(peaks, default=0)

    @property
    def current(self) -> list[Part]:
        """The graphs of the step, each once."""
        found: dict[str, Part] = {}
        for runs in self._runs:
            found |= runs.parts
        return list(found.values())

    def giving_away(self, least_nbytes: int, least_share: float) -> set[str]:
        """Graphs that return much which nobody holds, though their plans count it.

        Args:
            least_nbytes: how much.
            least_share: of time that they recompute: others lack no memory.
        """
        return {
            graph_of_plan(name)
            for runs in self._runs
            for name, part in runs.parts.items()
            if part.held < part.counted_on
            and part.gone_nbytes >= least_nbytes
            and recomputed_share(part.choice) >= least_share
        }

    @property
    def held_again(self) -> set[str]:
        """Graphs of whose results somebody holds more than their plans count on."""
        parts = (item for runs in self._runs for item in runs.parts.items())
        return {graph_of_plan(name) for name, part in parts if part.held > part.counted_on}

    @property
    def _runs(self) -> list[Runs]:
        """The parts of the latest step."""
        return [self._runs_in(part) for part in self._step]

    def _runs_in(self, order: Sequence[Ran], plans: Mapping[str, Part] | None = None) -> Runs:
        """A step that runs graphs, and layers in eager mode, in this order."""
        plans = self.parts if plans is None else plans
        return as_runs(order, plans, self.eager_gradient_nbytes, self.existing_gradient_nbytes)
