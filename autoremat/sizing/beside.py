"""What users have without us, at one size: every layer recomputed, and torch's own budget.

Enters: a session that has planned a step which does not run. Leaves: a `ByHand` for each, with the
graphs of that step as they would then be planned. Guarantees: peaks and times are those of the
same meter as our plan's; of several graphs each is treated so, or runs without a plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from autoremat_solver import Plan

from autoremat.planning.curve import Curve
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part
from autoremat.planning.peers import BY_LAYER, TORCH_BUDGETS, as_torch, layer_by_layer
from autoremat.planning.simulated import without_plan
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.subject import Subject
from autoremat.session.session import Session


@dataclass(frozen=True)
class ByHand:
    """A step as users plan it.

    Attributes:
        method: how.
        parts: its graphs, each once.
        peak_nbytes: of the step, resident bytes included.
    """

    method: str
    parts: tuple[Part, ...]
    peak_nbytes: int


_Plans = Mapping[str, Plan | None]  # by graph; None where the way has none


def every_layer(session: Session, budget_nbytes: int) -> ByHand | None:
    """Every layer recomputed; None without layers, or if that cannot be compiled."""
    reads = session.options.setting.reads_inductor
    plans = _plans(session, layer_by_layer)
    return _compiled(session, BY_LAYER, plans, budget_nbytes, reads=reads)


def torch_budget(session: Session, budget_nbytes: int) -> ByHand | None:
    """Torch's budget at the loosest setting that is simulated to fit, else at the leanest.

    None where torch can plan no graph.
    """
    leanest: tuple[ByHand, _Plans] | None = None
    for method, plans in _settings(session):
        step = _compiled(session, method, plans, budget_nbytes, reads=False)
        if step is not None and (leanest is None or step.peak_nbytes < leanest[0].peak_nbytes):
            leanest = step, plans
        if step is not None and step.peak_nbytes <= budget_nbytes:
            break
    if leanest is None or not session.options.setting.reads_inductor:
        return leanest and leanest[0]
    return _compiled(session, leanest[0].method, leanest[1], budget_nbytes, reads=True)


def _settings(session: Session) -> Iterator[tuple[str, _Plans]]:
    """The loosest first, those that torch has a plan for."""
    for budget in TORCH_BUDGETS:
        plans = _plans(session, functools.partial(as_torch, budget=budget))
        if any(plans.values()):
            yield f"torch, budget {budget:g}", plans


def _plans(session: Session, plan_of: Callable[[Subject], Plan | None]) -> _Plans:
    """Of each graph, where there is one."""
    plans: dict[str, Plan | None] = {}
    for name, part in session.steps.graphs.parts.items():
        plans[name] = None
        with suppress(Exception):  # what torch cannot do of a graph is no reason to fail
            plans[name] = plan_of(part.subject)
    return plans


def _compiled(
    session: Session, method: str, plans: _Plans, budget_nbytes: int, *, reads: bool
) -> ByHand | None:
    """The step by these plans; None where nothing is planned, or what is cannot be compiled.

    Args:
        session: has planned the step.
        method: how these are made.
        plans: of its graphs.
        budget_nbytes: of the step.
        reads: whether peaks are read from the code that Inductor generates.
    """
    if not any(plans.values()):
        return None
    graphs = session.steps.graphs.apart()
    with suppress(Exception):  # what cannot be compiled is not beside ours
        for name, part in graphs.parts.items():
            subject = part.subject
            plan = plans[name] or without_plan(subject)
            choice = choose_fixed(subject, plan, method, budget_nbytes, reads=reads)
            planned = replace(part.planned.whole, choice=choice, counted=Beside(), curve=Curve())
            graphs.parts[name] = replace(part, planned=planned, growth=1.0, _reports={})
        peak_nbytes = graphs.peak_nbytes(session.steps.surroundings.now)
        return ByHand(method, tuple(graphs.current), peak_nbytes)
    return None
