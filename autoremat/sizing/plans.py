"""One size, planned: our plan at the budget, the plain step, and every layer recomputed.

Enters: a model, its batches, what was asked for. Leaves: a `FitPoint`, or a `Refused` with what
the size would need. Guarantees: planned as `autoremat.plan` does, at this very size; the three ways
have one meter, of bytes and of time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from autoremat_solver import Plan, Problem
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.errors import FallbackWarning, InfeasibleBudget
from autoremat.memory.fake_twin import Faker
from autoremat.offline import OfflineStep, planned_session
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.formula import peak_formula
from autoremat.planning.part import Part
from autoremat.planning.peers import BY_LAYER, layer_by_layer
from autoremat.planning.sizes import sizes_of
from autoremat.planning.unsearched import choose_fixed
from autoremat.reporting.formula import PeakFormula
from autoremat.session.session import Session
from autoremat.sizing.batches import Batch, BatchError, Batches, first_line
from autoremat.sizing.model import FitPoint, Refused, Way
from autoremat.sizing.search import Answer


@dataclass
class Planner:
    """Plans one model at any size.

    Attributes:
        model: in train mode.
        batches: of any size.
        options: what was asked for; the budget is that of each size.
        budget_nbytes: the same in bytes.
        optimizer: whose state counts, or None.
        home: where the twin seems to live.
        has_gradients: whether gradients of other batches are there already.
        fallbacks: what runs without a plan, as far as sizes have shown.
        refusal: the latest.
        no_formula: why no formula was found, or "".
    """

    model: nn.Module
    batches: Batches
    options: Options
    budget_nbytes: int
    optimizer: torch.optim.Optimizer | None
    home: torch.device
    has_gradients: bool = False
    fallbacks: dict[str, None] = field(default_factory=dict)
    refusal: InfeasibleBudget | None = None
    no_formula: str = ""

    def at(self, size: int) -> Answer:
        """The size's plan, or why there is none."""
        began = time.monotonic()
        try:
            batch = self.batches.at(size)
        except BatchError as error:
            if not error.is_size:
                raise
            return Refused(size, None, str(error), time.monotonic() - began)
        try:
            session = self.session(batch)
        except InfeasibleBudget as error:
            self.refusal = error
            seconds = time.monotonic() - began
            return Refused(size, error.smallest_peak_nbytes, str(error), seconds)
        except Exception:
            why = self._not_accepted(batch)
            if why is None:
                raise  # nothing that another size would change
            return Refused(size, None, why, time.monotonic() - began)
        return self._answer(size, session, began)

    def session(self, batch: Batch, varying: Sequence[tuple[int, int]] = ()) -> Session:
        """Whoever has planned a step on a batch; see `planned_session`."""
        offline = Offline(has_gradients=self.has_gradients, varying=tuple(varying))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # told once, as notes
            step = OfflineStep(self.model, batch, self.optimizer, self.home, offline)
            session = planned_session(self.options, step)
        self.fallbacks |= dict.fromkeys(map(str, session.told.fallbacks))
        return session

    def formula(self, size: int, other: int) -> PeakFormula | None:
        """Of the plan at a size, its peak over the sizes that another batch has otherwise.

        One more trace and plan, in which these sizes are symbols. Where it has none, `no_formula`
        says why.
        """
        if self.options.setting.reads_inductor:
            return None
        try:
            session = self.session(self.batches.at(size), self.batches.varying(size, other))
            formula = session.report().peak_formula
            if formula is not None:
                return formula
            parts = session.steps.graphs.current
            for part in parts:  # raises what a report keeps to itself
                peak_formula(as_chosen(part.subject, part.choice), part.choice.solution.plan)
            self.no_formula = "the model's code makes a constant of it"
            if any(sizes_of(part.subject) for part in parts):
                self.no_formula = "what is written over what depends on it"
        except Exception as error:  # what cannot be traced so has no formula
            self.no_formula = f"{type(error).__name__}: {first_line(error)}"
        return None

    def _not_accepted(self, batch: Batch) -> str | None:
        """What the model says of a batch that it does not accept; None if it accepts it."""
        faker = Faker(self.home)
        twin, (args, keywords) = faker.model(self.model), faker.values(batch)
        try:
            with faker.mode:
                _torch.own_call(twin)(*args, **keywords)
        except _torch.DataDependentOutput:
            return None  # no fake tells what it would do
        except Exception as error:
            return f"the model does not accept it: {type(error).__name__}: {first_line(error)}"
        return None

    def _answer(self, size: int, session: Session, began: float) -> Answer:
        budget_nbytes, parts, report = (
            self.budget_nbytes,
            session.steps.graphs.current,
            session.report(),
        )
        peak_nbytes = report.predicted_peak_nbytes
        if peak_nbytes > budget_nbytes:  # of a later graph, which nobody refuses beforehand
            why = f"later graphs of the step need {peak_nbytes} bytes"
            return Refused(size, peak_nbytes, why, time.monotonic() - began)
        layered = _by_layer(parts, budget_nbytes, reads=session.options.setting.reads_inductor)
        times = _code_times(parts, layered) or (
            report.predicted_time_us,
            report.baseline_time_us,
            layered.solution.timeline.time_us if layered else 0.0,
        )
        plain_nbytes = report.baseline_peak_nbytes
        every_layer = None
        if layered is not None:
            nbytes = layered.needed_nbytes
            share = _share(parts[0].subject.lowered.problem, layered.solution.plan)
            every_layer = Way(nbytes, times[2], share, nbytes <= budget_nbytes, BY_LAYER)
        return FitPoint(
            size,
            Way(peak_nbytes, times[0], _recompute_share(parts), True, report.method),
            Way(plain_nbytes, times[1], 0.0, plain_nbytes <= budget_nbytes, "no plan"),
            every_layer,
            time.monotonic() - began,
        )


def _by_layer(parts: Sequence[Part], budget_nbytes: int, *, reads: bool) -> Choice | None:
    """Every layer recomputed, in a step of one graph."""
    if len(parts) != 1:
        return None
    subject = parts[0].subject
    with suppress(Exception):  # what cannot be compiled is not beside ours
        plan = layer_by_layer(subject)
        if plan is not None:
            return choose_fixed(subject, plan, BY_LAYER, budget_nbytes, reads=reads)
    return None


def _code_times(parts: Sequence[Part], layered: Choice | None) -> tuple[float, float, float] | None:
    """What the generated kernels take, of ours, plain and by layers; None if not all known."""
    ours = [part.choice.code_us for part in parts]
    plain = [part.choice.baseline().code_us for part in parts]
    by_layer = [0.0 if layered is None else layered.code_us]
    known = [time_us for time_us in (*ours, *plain, *by_layer) if time_us is not None]
    if len(known) < 2 * len(parts) + 1:
        return None
    count = len(parts)
    return math.fsum(known[:count]), math.fsum(known[count : 2 * count]), known[-1]


def _recompute_share(parts: Sequence[Part]) -> float:
    """Of the time of all operations, what runs again."""
    if len(parts) == 1:
        return _share(parts[0].subject.lowered.problem, parts[0].choice.solution.plan)
    times = [part.choice.solution.timeline.time_us for part in parts]
    shares = [_share(part.subject.lowered.problem, part.choice.solution.plan) for part in parts]
    return sum(t * s for t, s in zip(times, shares, strict=True)) / max(1e-9, sum(times))


def _share(problem: Problem, plan: Plan) -> float:
    ops = problem.op_by_name
    steps = [ops[name].time_us for name in plan.schedule if name in ops]
    once = [ops[name].time_us for name in set(plan.schedule) if name in ops]
    whole = math.fsum(steps)
    return 1 - math.fsum(once) / whole if whole > 0 else 0.0
