"""The first steps try a few plans of their graphs, and the fastest stays.

Enters: `Steps` that are settled, their graphs, and how many steps there are for it. Leaves: the
plans that each next step runs by. Guarantees: the step keeps to its budget by each of them, and
once the last of these steps is over nothing is compiled again. Ranks of a job try the same plans
in the same steps, and keep the same.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autoremat import _torch
from autoremat.planning.allotting import graph_of_plan
from autoremat.planning.asked import store
from autoremat.planning.choice import Choice
from autoremat.planning.identity import fingerprint
from autoremat.planning.part import Part
from autoremat.progress import Progress
from autoremat.ranks.figures import settled
from autoremat.session.afterwards import rivals_of
from autoremat.session.steps import Steps
from autoremat.units import format_us

MOST_RIVALS = 2
KNOWN_STEPS = 2  # until the optimizer's state is there, and what else the first steps show

Plans = Mapping[str, Part]

tunings: Counter[str] = Counter()  # of each kind in this process: as many on ranks in lockstep


@dataclass(frozen=True)
class Winner:
    """Which of the plans that were tried stays."""

    number: int


class Tuning:
    """Of one session; what comes of it is told by `Steps.tuned`."""

    def __init__(
        self,
        steps: Steps,
        dynamo: Mapping[str, _torch.DynamoGraph],
        take: Callable[[Mapping[str, list[Part]]], None],
        progress: Progress,
    ) -> None:
        """Nothing was tried yet.

        Args:
            steps: the session's; their options say how many may be spent.
            dynamo: its graphs, as Dynamo handed them over.
            take: called with the plans that stay, by graph.
            progress: of the session.
        """
        self._steps, self._dynamo, self._take = steps, dynamo, take
        self._progress, self._count = progress, steps.options.tune
        self._candidates: list[Plans] = []
        self._settlings = 0
        self._schedule: Iterator[int] = iter(())
        self._times: list[list[float]] = []
        self._now, self._number, self._compiles, self._began = 0, 0, 0, 0.0
        self._backward, self._graphs = 0, list[str]()

    def before_step(self) -> None:
        """A step that needs no other plan is about to begin, and those before it are over."""
        if not self._count or self._steps.tuned or not self._is_ready:
            return
        with self._progress:
            try:
                self._go_on()
            except Exception as error:  # the step can go on as it did
                self._steps.tuned = "given up"
                self._steps.graphs.parts |= self._candidates[0] if self._candidates else {}
                why = f"{type(error).__name__}: {error}"
                self._steps.told.fall_back("AR116", cause=error, graph="The step", error=why)
            if self._steps.tuned:
                self._progress.finish(f"autoremat: tuned: {self._steps.tuned}")

    @property
    def first(self) -> Plans:
        """While others are tried, the plans that graphs had before; none after that."""
        is_over = self._steps.tuned or self._settlings != self._steps.replans.count
        return {} if is_over or not self._candidates else self._candidates[0]

    @property
    def _is_ready(self) -> bool:
        """Whether the step's graphs are known, and what it holds beside them."""
        steps = self._steps
        return steps.number >= KNOWN_STEPS and steps.is_planned

    def _go_on(self) -> None:
        if not self._candidates or self._settlings != self._steps.replans.count:
            self._begin()
        elif self._steps.number > self._number:
            self._note()
        else:
            self._began = self._time_s()  # the step before was another session's
            return
        self._number = self._steps.number
        number = next(self._schedule, None)
        if number is None:
            self._end()
        else:
            self._run_by(number)

    def _begin(self) -> None:
        self._settlings = self._steps.replans.count
        self._candidates = self._found()
        self._times, self._graphs = [[] for _ in self._candidates], []
        self._schedule = iter(schedule(len(self._candidates), self._count))

    def _found(self) -> list[Plans]:
        """The present plans, and others by which the step takes no more than it may."""
        graphs, limit_nbytes = self._steps.graphs, self._steps.budget_nbytes
        plans = {n: p for n, p in graphs.parts.items() if graph_of_plan(n) not in graphs.rich_from}
        rivals = {name: self._rivals(name, part) for name, part in plans.items()}
        found: list[Plans] = [plans]
        for number in range(max(map(len, rivals.values()), default=0)):
            others = {
                name: _with(part, rivals[name][number])
                for name, part in plans.items()
                if number < len(rivals[name])
            }
            try:
                graphs.parts |= others
                if self._steps.peak_nbytes <= limit_nbytes:
                    found.append({**plans, **others})
            finally:
                graphs.parts |= plans
        return found

    def _rivals(self, name: str, part: Part) -> list[Choice]:
        most = min(MOST_RIVALS, (self._count - 1) // 2)
        graph, options = self._dynamo[name], self._steps.options
        return rivals_of(part, self._steps.budget_nbytes, most, graph, options)

    def _run_by(self, number: int) -> None:
        self._now = number
        self._steps.graphs.parts |= self._candidates[number]
        self._compiles = len(self._steps.compiled_in)
        self._backward = self._steps.backward
        self._began = self._time_s()

    def _note(self) -> None:
        """How long the step took, if it was a whole one like the others, and compiled nothing."""
        seconds, steps = self._time_s() - self._began, self._steps
        self._graphs = self._graphs or steps.graphs.graphs
        parts, plans = steps.graphs.parts, self._candidates[self._now]
        is_by_plan = all(parts[name].planned is part.planned for name, part in plans.items())
        is_whole = steps.backward > self._backward and steps.graphs.graphs == self._graphs
        if is_by_plan and is_whole and len(steps.compiled_in) == self._compiles:
            self._times[self._now].append(seconds)

    def _end(self) -> None:
        """The fastest stays; of several ranks' the first to say so is heard."""
        timed = [number for number, times in enumerate(self._times) if times]
        own = min(timed, key=lambda number: min(self._times[number]), default=0)
        question = self._question
        tunings[question] += 1
        question += f" {tunings[question]}"
        number = settled({question: Winner(own)}, Winner)[question].number
        stays = self._candidates[number]
        self._steps.graphs.parts |= stays
        self._take({name: [part] for name, part in stays.items()})
        words = [self._words(n, is_it=n == number) for n in timed]
        self._steps.tuned = "; ".join(words) or "no other plan to try"

    @property
    def _question(self) -> str:
        """What ranks that tried the same have in common."""
        graphs = [fingerprint(part.subject.joint) for part in self._candidates[0].values()]
        budget = self._steps.options.budget
        return repr((self._count, str(budget), graphs, *map(_methods, self._candidates)))

    def _words(self, number: int, *, is_it: bool) -> str:
        took = format_us(1e6 * min(self._times[number]))
        return f"{_methods(self._candidates[number])} {took}{' (stays)' if is_it else ''}"

    def _time_s(self) -> float:
        if self._steps.device.type == "cuda":
            torch.cuda.synchronize(self._steps.device)
        return time.perf_counter()


def schedule(candidates: int, count: int) -> list[int]:
    """By which plan each of so many steps runs: the others twice at first, to be compiled."""
    if candidates < 2:
        return []
    first = [0, *(n for n in range(1, candidates) for _ in range(2))]
    rest = itertools.cycle(range(candidates))
    return [*first, *itertools.islice(rest, max(0, count - len(first)))][:count]


def _methods(plans: Plans) -> str:
    return ", ".join(dict.fromkeys(part.choice.method for part in plans.values()))


def _with(part: Part, choice: Choice) -> Part:
    """The same graph by another plan."""
    return part.by(choice, store(part.subject, choice))
