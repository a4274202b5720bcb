"""What a step does per second, and what it would do with more memory or with less.

Enters: `Steps` that are planned, and their graphs as Dynamo handed them over. Leaves: a report with
a `Throughput`, or with the reason why there is none. Guarantees: plans for other budgets are made
as those that run are, once, when a report is asked for; none runs, and what runs stays as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from autoremat_solver import simulate
from torch import fx

from autoremat import _torch
from autoremat.ask.budget import Budget
from autoremat.cost.work import is_lookup
from autoremat.inductor.hook import configured
from autoremat.planning.choice import Choice
from autoremat.planning.curve import Curve
from autoremat.planning.part import Part
from autoremat.planning.pipeline import choose
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from autoremat.reporting import NO_THROUGHPUT, AtBudget, Fact, Report, Throughput
from autoremat.reporting.throughput import bounded, step_nbytes
from autoremat.session.first_plan import with_room
from autoremat.session.settling import planned_together
from autoremat.session.steps import Steps

_INDICES = (torch.int64, torch.int32)


class _Unknown(Exception):
    """It cannot be told; the message says why."""


@dataclass(frozen=True)
class _Plans:
    """A step, planned for a budget.

    Attributes:
        choices: of each of its runs.
        needed_nbytes: the smallest budget that they fit.
    """

    choices: tuple[Choice, ...]
    needed_nbytes: int

    @property
    def time_us(self) -> float:
        """Of its operations, by which plans are searched for."""
        return math.fsum(choice.solution.timeline.time_us for choice in self.choices)

    @property
    def kernels_us(self) -> float | None:
        """Of the kernels that are generated for it; None if not all are known."""
        times = [choice.code_us for choice in self.choices]
        known = [time_us for time_us in times if time_us is not None]
        return math.fsum(known) if len(known) == len(times) else None


class Rates:
    """Of the steps of one session; what was found of them is told again while it holds."""

    def __init__(self, steps: Steps, dynamo: Mapping[str, _torch.DynamoGraph]) -> None:
        """Nothing was looked for yet.

        Args:
            steps: the session's.
            dynamo: its graphs, as Dynamo handed them over.
        """
        self._steps, self._dynamo = steps, dynamo
        self._known: tuple[object, Throughput] | None = None

    def added_to(self, report: Report) -> Report:
        """The report with what its step does per second, or with the reason why nobody knows."""
        try:
            return replace(report, throughput=self._found())
        except _Unknown as unknown:
            why = str(unknown)
        except Exception as error:  # a report is no place to fail
            why = f"not known, as plans for other budgets failed: {type(error).__name__}: {error}"
        return replace(report, facts=(*report.facts, Fact(NO_THROUGHPUT, why)))

    def _found(self) -> Throughput:
        steps = self._steps
        if not steps.graphs.parts:
            raise _Unknown("not known: nothing is planned")
        if steps.graphs.provisional:
            raise _Unknown("not known yet: the step is planned for good once it has run")
        runs = steps.graphs.apart().longest_as_planned
        if not runs:
            raise _Unknown("not known yet: no step has shown its graphs")
        if len(runs) > 1 and steps.replans.are_ruled_out:
            raise _Unknown("not known of a step of several graphs whose values wait elsewhere")
        asked = ([part.planned for part in runs], steps.budget_nbytes, steps.surroundings.now)
        if self._known is None or not _same(self._known[0], asked):
            self._known = asked, self._planned_beside(runs)
        return self._known[1]

    def _planned_beside(self, runs: Sequence[Part]) -> Throughput:
        budget_nbytes = self._steps.budget_nbytes
        beside_nbytes = step_nbytes(budget_nbytes)
        here = _plans_of(self._steps, runs)
        unlimited = self._at(_most_nbytes(runs) + here.needed_nbytes, runs)
        if here.time_us <= unlimited.time_us:
            unlimited = here
        more, less = unlimited, here
        if unlimited.needed_nbytes > budget_nbytes + beside_nbytes:
            more = self._at(budget_nbytes + beside_nbytes, runs)
        if here.needed_nbytes > budget_nbytes - beside_nbytes:
            less = self._at(budget_nbytes - beside_nbytes, runs)
        times_us = [plan.kernels_us for plan in (here, less, more, unlimited)]
        is_of_kernels = None not in times_us

        def at(plan: _Plans, allowed_nbytes: int | None) -> AtBudget:
            time_us = plan.kernels_us if is_of_kernels else None
            time_us = plan.time_us if time_us is None else time_us
            return AtBudget(allowed_nbytes, plan.needed_nbytes, time_us)

        samples, tokens = _counts(runs[0].subject)
        found = Throughput(
            samples,
            tokens,
            here=at(here, budget_nbytes),
            less=at(less, budget_nbytes - beside_nbytes),
            more=at(more, budget_nbytes + beside_nbytes),
            unlimited=at(unlimited, None),
            runs=len(runs),
            is_of_kernels=is_of_kernels,
        )
        return bounded(found)

    def _at(self, budget_nbytes: int, runs: Sequence[Part]) -> _Plans:
        """The step as it is planned for another budget."""
        steps = copy.copy(self._steps)
        steps.graphs = steps.graphs.apart()
        budget = Budget(budget_nbytes, given=budget_nbytes)
        steps.options = replace(steps.options, budget=budget)
        is_seen = len(runs) > 1 and (bool(steps.replans.count) or steps.offline is None)
        with configured(steps.options.inductor):
            if not is_seen:
                self._plan_each(steps, budget_nbytes)
            if is_seen or (len(runs) > 1 and steps.peak_nbytes > budget_nbytes):
                planned_together(steps, self._dynamo)
        return _plans_of(steps, steps.graphs.longest_as_planned)

    def _plan_each(self, steps: Steps, budget_nbytes: int) -> None:
        """Each graph, one after the other, as its first plan is made beside those before it."""
        steering = replace(steps.options.setting.steering, known=None)
        setting = replace(steps.options.setting, steering=steering)
        for number, name in enumerate(steps.graphs.known_graphs):
            part = steps.graphs.parts[name]
            left_nbytes = max(1, budget_nbytes - _beyond_nbytes(self._steps, part))
            names = part.covered.names if part.covered is not None else {}
            with self._dynamo[name].resumed(), _torch.sizes_as(part.subject.sizes):
                placed, found = steps.placed(part.subject, name)
                choice = choose(placed, left_nbytes, setting, number=number)
                choice, _ = with_room(choice, placed, left_nbytes, steps, names)
            planned = replace(part.planned.whole, choice=choice, counted=found, curve=Curve())
            steps.graphs.parts[name] = replace(part, planned=planned, _reports={})


def _plans_of(steps: Steps, runs: Sequence[Part]) -> _Plans:
    """The plans of a step that has these runs."""
    choices, needed_nbytes = tuple(part.choice for part in runs), steps.peak_nbytes
    if len(runs) == 1:  # what leaves room to later graphs needs more than the step's peak tells
        beyond_nbytes = _beyond_nbytes(steps, runs[0])
        needed_nbytes = max(choices[0].needed_nbytes + beyond_nbytes, needed_nbytes)
    return _Plans(choices, needed_nbytes)


def _beyond_nbytes(steps: Steps, part: Part) -> int:
    """What a step of one run takes that its plan does not count, as nobody knew of it then."""
    if len(steps.graphs.known_graphs) > 1:
        return 0
    # Of code in eager mode the plan knows.
    peak_nbytes = steps.graphs.graphs_peak_nbytes(steps.surroundings.now)
    return max(0, peak_nbytes - part.choice.peak_nbytes)


def _same(known: object, asked: object) -> bool:
    """Whether nothing has changed that plans for other budgets depend on."""
    assert isinstance(known, tuple)
    assert isinstance(asked, tuple)
    before, now = known[0], asked[0]
    are_same = len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
    return are_same and bool(known[1:] == asked[1:])


def _most_nbytes(runs: Sequence[Part]) -> int:
    """More than the step takes by any plan that is worth a look: all runs beside each other."""
    problems = (part.subject.lowered.problem for part in runs)
    return sum(simulate(problem, as_written(problem)).peak_nbytes for problem in problems)


def _counts(subject: Subject) -> tuple[int, int]:
    """How many samples a step has, and how many tokens; 0 for what is not known."""
    joint = subject.joint
    given = [node for node in joint.primals if node not in joint.static_inputs]
    with _torch.sizes_as(subject.sizes):
        shapes = {node: shape for node in given if (shape := _shape(node))}
        first = next(iter(shapes.values()), (0,))
        tokens = (shape for node, shape in shapes.items() if len(shape) == 2 and _is_read_at(node))
        return first[0], math.prod(next(tokens, (0,)))


def _is_read_at(node: fx.Node) -> bool:
    """Whether integers say which rows of a table are read, as they are or in another shape."""
    value = _torch.fake_value(node)
    if not isinstance(value, torch.Tensor) or value.dtype not in _INDICES:
        return False
    lookups = (user for user in node.users if is_lookup(user.target) and user.args[0] is not node)
    same = (user for user in node.users if math.prod(_shape(user)) == math.prod(_shape(node)))
    return any(True for _ in lookups) or any(map(_is_read_at, same))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Sizes of a tensor; () of what is none."""
    value = _torch.fake_value(node)
    return tuple(map(_torch.size_hint, value.shape)) if isinstance(value, torch.Tensor) else ()
