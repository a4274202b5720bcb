"""What users have without us, at one size: every layer recomputed, and torch's own budget.

Enters: a session that has planned a step which does not run. Leaves: a `ByHand` for each, with the
graphs of that step as they would then be planned. Guarantees: peaks and times are those of the
same meter as our plan's; of several graphs each is treated so, or stays as it is written.
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
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.lower import as_written
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
    return _compiled(session, BY_LAYER, _plans(session, layer_by_layer), budget_nbytes)


def torch_budget(session: Session, budget_nbytes: int) -> ByHand | None:
    """Torch's budget at the loosest setting that is simulated to fit, else at the leanest.

    None where torch can plan no graph.
    """
    leanest: tuple[int, str, _Plans] | None = None
    for method, plans in _settings(session):
        simulated = _step(session, method, plans, budget_nbytes, reads=False)
        if leanest is None or simulated.peak_nbytes < leanest[0]:
            leanest = simulated.peak_nbytes, method, plans
        if simulated.peak_nbytes <= budget_nbytes:
            break
    return None if leanest is None else _compiled(session, *leanest[1:], budget_nbytes)


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


def _compiled(session: Session, method: str, plans: _Plans, budget_nbytes: int) -> ByHand | None:
    """The step by these plans as it would be compiled; None where nothing is planned."""
    if not any(plans.values()):
        return None
    reads = session.options.setting.reads_inductor
    with suppress(Exception):  # what cannot be compiled is not beside ours
        return _step(session, method, plans, budget_nbytes, reads=reads)
    return None


def _step(
    session: Session, method: str, plans: _Plans, budget_nbytes: int, *, reads: bool
) -> ByHand:
    graphs = session.steps.graphs.apart()
    for name, part in graphs.parts.items():
        subject = part.subject
        plan = plans[name] or as_written(subject.lowered.problem)
        choice = choose_fixed(subject, plan, method, budget_nbytes, reads=reads)
        planned = replace(part.planned.whole, choice=choice, counted=Beside(), curve=Curve())
        graphs.parts[name] = replace(part, planned=planned, growth=1.0, _reports={})
    peak_nbytes = graphs.peak_nbytes(session.steps.surroundings.now)
    return ByHand(method, tuple(graphs.current), peak_nbytes)
