"""One size, planned: our plan at the budget, the plain step, and what users have beside.

Enters: a model, its batches, what was asked for. Leaves: a `FitPoint`, or a `Refused` with what
the size would need. Guarantees: planned as `autoremat.plan` does, at this very size; all ways
have one meter, of bytes and of time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from autoremat_solver import Plan, Problem
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.errors import FallbackWarning, InfeasibleBudget, OverBudgetWarning
from autoremat.memory.fake_twin import Faker
from autoremat.offline import OfflineStep, planned_session
from autoremat.planning.choice import as_chosen
from autoremat.planning.formula import peak_formula
from autoremat.planning.part import Part
from autoremat.planning.sizes import sizes_of
from autoremat.reporting.formula import PeakFormula
from autoremat.session.session import Session
from autoremat.sizing.batches import Batch, BatchError, Batches, first_line
from autoremat.sizing.beside import ByHand, every_layer, torch_budget
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
            warnings.simplefilter("ignore", OverBudgetWarning)  # such a size is refused
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
        budget_nbytes = self.budget_nbytes
        parts, report = session.steps.graphs.current, session.report()
        peak_nbytes = report.predicted_peak_nbytes
        if peak_nbytes > budget_nbytes:  # of a later graph, which nobody refuses beforehand
            why = f"later graphs of the step need {peak_nbytes} bytes"
            return Refused(size, peak_nbytes, why, time.monotonic() - began)
        others = [find(session, budget_nbytes) for find in (every_layer, torch_budget)]
        time_us, plain_us, *others_us = _code_times(parts, others) or (
            report.predicted_time_us,
            report.baseline_time_us,
            *(_modelled_us(other.parts) if other else 0.0 for other in others),
        )
        plain_nbytes = report.baseline_peak_nbytes
        return FitPoint(
            size,
            Way(peak_nbytes, time_us, _recompute_share(parts), True, report.method),
            Way(plain_nbytes, plain_us, 0.0, plain_nbytes <= budget_nbytes, "no plan"),
            _way(others[0], others_us[0], budget_nbytes),
            _way(others[1], others_us[1], budget_nbytes),
            time.monotonic() - began,
        )


def _way(step: ByHand | None, time_us: float, budget_nbytes: int) -> Way | None:
    if step is None:
        return None
    share, fits = _recompute_share(step.parts), step.peak_nbytes <= budget_nbytes
    return Way(step.peak_nbytes, time_us, share, fits, step.method)


def _modelled_us(parts: Sequence[Part]) -> float:
    """What their operations take, one by one."""
    return math.fsum(part.choice.solution.timeline.time_us for part in parts)


def _code_times(parts: Sequence[Part], others: Sequence[ByHand | None]) -> list[float] | None:
    """What the generated kernels take, of ours, plain, and of each other; None if not all known."""
    sums = [
        [part.choice.code_us for part in parts],
        [part.choice.baseline().code_us for part in parts],
        *([part.choice.code_us for part in other.parts] if other else [] for other in others),
    ]
    known = [[us for us in times_us if us is not None] for times_us in sums]
    return None if known != sums else [math.fsum(times_us) for times_us in known]


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
