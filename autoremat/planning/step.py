"""The graphs of one step, side by side.

Enters: each graph as it was planned, and in which order the step runs them. Leaves: what is held
while one of them runs and, where the step is planned anew, what each plan is `Allotted`.
Guarantees: a graph that runs several times counts as often, each time as the plan of that run.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autoremat.ask.options import Setting
from autoremat.memory.meter import storages_nbytes
from autoremat.planning.allotting import Allotted, Runs, allot, graph_of_plan, richer
from autoremat.planning.nesting import Around, Beside, Returned
from autoremat.planning.part import Part
from autoremat.reporting import GraphReport


@dataclass(eq=False)
class Ran:
    """A run of a step.

    Attributes:
        name: of the plan, or of a layer in eager mode.
        again_nbytes: gradients of parameters that later runs read as well.
        adding_nbytes: as of `Returned`.
    """

    name: str
    again_nbytes: int = 0
    adding_nbytes: int = 0

    def note_reader(self, parameter: torch.Tensor, later: Part) -> None:
        """A later run reads one of its parameters as well."""
        whole_nbytes = storages_nbytes([parameter], parameter.device)
        nbytes = int(later.resident.traffic.gradient_share * whole_nbytes)
        self.again_nbytes += nbytes
        if whole_nbytes in later.viewing_gradients:
            self.adding_nbytes = max(self.adding_nbytes, nbytes)

    def returned(self, nbytes: int) -> Returned:
        """What its backward returns, if it returns so much alone."""
        return Returned(max(0, nbytes - self.again_nbytes), self.adding_nbytes)


@dataclass
class Step:
    """The graphs that were planned so far.

    Steps that several threads take at once are not told apart: the latest to begin is the step.

    Attributes:
        parts: plans by name: that of the graph, or `richer` of it.
        rich_from: by graph whose last runs have a plan of their own, the first of them.
        planned_runs: by graph, how many runs its plans were made for; further ones are lean.
        provisional: graphs that were planned to keep little, as nobody knew how often they run.
        most_runs: of graphs in one step, as far as steps before the latest have shown.
        eager_gradient_nbytes: of layers among the runs that are in eager mode, by their names.
        existing_gradient_nbytes: gradients that existed already when a graph was planned.
        checkpointed: graphs of which a run was in a checkpoint: the rerun has to save the same.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    rich_from: dict[str, int] = field(default_factory=dict)
    planned_runs: dict[str, int] = field(default_factory=dict)
    provisional: set[str] = field(default_factory=set)
    most_runs: int = 0
    eager_gradient_nbytes: dict[str, int] = field(default_factory=dict)
    existing_gradient_nbytes: int = 0
    checkpointed: set[str] = field(default_factory=set)
    _ran: list[Ran] | None = None  # in the latest step, in its order; None if nobody tells
    _longest: list[Ran] = field(default_factory=list)  # the same of that with the most runs so far
    _part: list[Ran] = field(default_factory=list)  # the longest of this step's parts before now
    _readers: dict[int, tuple[weakref.ref[torch.Tensor], Ran]] = field(default_factory=dict)
    _plain: set[str] = field(default_factory=set)  # of this step, those with a run in none
    _waiting: list[str] = field(default_factory=list)  # planned, and did not run yet
    _thread: int = 0

    def begin(self, open_runs: Sequence[str] = (), *, goes_on: bool = False) -> None:
        """A forward begins, of which each run of a graph will be told.

        Args:
            open_runs: graphs of forwards before it, whose backward is still to come.
            goes_on: whether it is one of the same step: reentrant checkpoints take their forwards
                again in the backward, one after the other, and each is a part of the step.
        """
        self.note_longest()
        self.most_runs = max(self.most_runs, len(self.runs or ()))
        self._part = max(self._part, self._all_ran, key=len) if goes_on else []
        if self.runs is None or self.runs != list(open_runs):
            self._ran = [Ran(name) for name in open_runs]
            self._readers.clear()
        self._waiting, self._thread = [], threading.get_ident()
        if not goes_on:
            self._plain.intersection_update(map(graph_of_plan, open_runs))

    def note_longest(self) -> None:
        """A step is over, or as good as over."""
        now = self._all_ran
        if len(now) >= len(self._longest):
            self._longest = [replace(ran, name=graph_of_plan(ran.name)) for ran in now]

    def add(self, name: str, part: Part) -> None:
        """Keep a graph that was planned."""
        self.parts[name] = part
        self.existing_gradient_nbytes = part.resident.parts.gradients_nbytes
        if self._is_here:
            self._waiting.append(name)

    def drop(self, name: str) -> None:
        """Forget a graph that could not be compiled as planned."""
        self.parts.pop(name, None)
        self._waiting = [other for other in self._waiting if other != name]

    def note_checkpoint(self, plan: str, *, is_there: bool) -> None:
        """A graph is about to run by a plan, in a checkpoint or in none.

        Where a step has runs of both kinds, all count as if they were in none.
        """
        graph, part = graph_of_plan(plan), self.parts[plan]
        (self.checkpointed if is_there else self._plain).add(graph)
        is_there = is_there and graph not in self._plain
        if part.is_checkpointed != is_there:
            self.parts[plan] = replace(part, is_checkpointed=is_there, _reports={})

    def ran(self, name: str, parameters: Iterable[torch.Tensor] = ()) -> None:
        """A graph runs its forward, and gradients of these come from its backward."""
        if self._ran is None or not self._is_here or name not in self.parts:
            return
        self._ran.append(ran := Ran(name))
        self._waiting = [other for other in self._waiting if other != name]
        for parameter in (p for p in parameters if p.requires_grad):
            found, before = self._readers.get(id(parameter), (None, None))
            if found is not None and before is not None and found() is parameter:
                before.note_reader(parameter, self.parts[name])
            self._readers[id(parameter)] = (weakref.ref(parameter), ran)

    def ran_eagerly(self, layer: str, gradient_nbytes: int) -> None:
        """A layer ran in eager mode; its gradients come from the backward of its last run on."""
        if self._ran is not None and self._is_here:
            self._ran = [*(ran for ran in self._ran if ran.name != layer), Ran(layer)]
            self.eager_gradient_nbytes[layer] = gradient_nbytes

    def earlier(self, name: str) -> list[Part]:
        """The graphs that ran before one that is being planned, each once."""
        return [self.parts[other] for other in dict.fromkeys(self._before(name))]

    def held_nbytes(self, name: str) -> int:
        """What crosses the forwards and backwards of the runs before that of a graph."""
        before = (self.parts[other] for other in self._before(name))
        return sum(part.crossing_nbytes + part.resident.traffic.run_nbytes for part in before)

    def _before(self, name: str) -> list[str]:
        """Of the runs before a graph's first one; a recompile takes the old place."""
        order = [other for other in self._order if other in self.parts]
        return order[: order.index(name)] if name in order else order

    @property
    def _is_here(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def runs(self) -> list[str] | None:
        """Names of the plans that ran in the latest step, in its order; None if nobody tells."""
        return None if self._ran is None else [ran.name for ran in self._ran]

    @property
    def longest(self) -> list[str]:
        """Graphs of the step with the most runs so far, in its order."""
        return [ran.name for ran in self._longest]

    @property
    def _all_ran(self) -> list[Ran]:
        """What has run or will, in the latest step."""
        waiting = self.parts if self._ran is None else self._waiting
        return [*(self._ran or ()), *map(Ran, waiting)]

    @property
    def _order(self) -> list[str]:
        """The graph of each run."""
        return [ran.name for ran in self._all_ran]

    def reports(self, around: Around) -> Iterator[GraphReport]:
        """Of every graph of the step in this order, so much being held beside all of them."""
        found = _beside(self._most, around)
        yield from (self.parts[name].report(held) for name, held in found.items())

    def beside(self, around: Around) -> dict[str, Beside]:
        """What is held beside each graph of the step's latest part, by name, in their order."""
        return _beside(self._runs_in(self._all_ran), around)

    def allotted(
        self, budget_nbytes: int, around: Around, setting: Setting, *, is_nested: bool
    ) -> list[Allotted]:
        """What each plan of each graph gets of the budget, in the longest step so far.

        Args:
            budget_nbytes: of the whole step.
            around: what is held beside its graphs.
            setting: how they are planned.
            is_nested: whether the backward of a later run comes first; else all runs are alike.
        """
        runs = replace(self._runs_in(self._longest), is_nested=is_nested)
        return allot(runs, budget_nbytes, around, setting)

    def take(self, parts: Mapping[str, Part], rich_from: Mapping[str, int]) -> None:
        """Run its graphs under other plans from now on.

        Args:
            parts: by name of the plan.
            rich_from: by graph whose last runs have a plan of their own, the first of them.
        """
        graphs = {graph_of_plan(plan) for plan in parts}
        others = {n: p for n, p in self.parts.items() if graph_of_plan(n) not in graphs}
        self.parts = {**others, **parts}
        self.rich_from = {n: r for n, r in self.rich_from.items() if n not in graphs} | {
            **rich_from
        }
        self.planned_runs = {**self.planned_runs, **Counter(self.longest)}
        graphs_now = self.longest
        self._ran = [
            replace(ran, name=self._plan_for(ran.name, graphs_now[:n]))
            for n, ran in enumerate(self._longest)
        ]
        self._readers.clear()

    def next_plan(self, graph: str) -> str:
        """The plan of a graph that runs now."""
        if self.runs is None or not self._is_here:
            return graph
        return self._plan_for(graph, list(map(graph_of_plan, self.runs)))

    @property
    def graphs(self) -> list[str]:
        """The graphs of the latest step's runs, whatever their plans."""
        return list(map(graph_of_plan, self._order))

    def _plan_for(self, graph: str, before: Sequence[str]) -> str:
        first_run, runs = self.rich_from.get(graph), before.count(graph)
        is_rich = first_run is not None and first_run <= runs < self.planned_runs[graph]
        return richer(graph) if is_rich else graph

    def peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs and of the code between them."""
        return max(self.graphs_peak_nbytes(around), self.eager_peak_nbytes(around))

    def graphs_peak_nbytes(self, around: Around) -> int:
        """The highest of its graphs, 0 without any."""
        held = _beside(self._most, around).items()
        return max((self.parts[name].peak_nbytes(found) for name, found in held), default=0)

    def eager_peak_nbytes(self, around: Around) -> int:
        """The highest while code in eager mode goes backward, as far as a step has shown it."""
        most = self._most
        parts = list(most.parts.values())
        if not parts or not around.eager_nbytes:
            return 0
        crossing_nbytes = sum(parts[n].crossing_nbytes for n in most.order if n < len(parts))
        resident_nbytes = max(part.resident_nbytes for part in parts)
        return resident_nbytes + crossing_nbytes + around.eager_nbytes

    @property
    def current(self) -> list[Part]:
        """The graphs of the step, each once."""
        return list(self._most.parts.values())

    @property
    def _most(self) -> Runs:
        """The part of the latest step that runs the most graphs."""
        return self._runs_in(max(self._all_ran, self._part, key=len))

    def _runs_in(self, all_ran: Sequence[Ran]) -> Runs:
        """A step that runs graphs, and layers in eager mode, in this order."""
        order = [ran.name for ran in all_ran]
        parts = {name: self.parts[name] for name in order if name in self.parts}
        layers = dict.fromkeys(name for name in order if name not in parts)
        numbers = {name: number for number, name in enumerate([*parts, *layers])}
        returned = {name: part.gradient_nbytes for name, part in parts.items()}
        returned |= {name: self.eager_gradient_nbytes.get(name, 0) for name in layers}
        return Runs(
            parts,
            [numbers[name] for name in order],
            [ran.returned(returned[ran.name]) for ran in all_ran],
            self.existing_gradient_nbytes,
            of_one_plan=self.checkpointed,
        )


def _beside(runs: Runs, around: Around) -> dict[str, Beside]:
    """What is held beside each graph, by name."""
    crossing = [part.crossing_nbytes for part in runs.parts.values()]
    return dict(zip(runs.parts, runs.beside(crossing, around), strict=True))
