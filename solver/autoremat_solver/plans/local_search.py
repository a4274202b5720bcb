"""Improves a plan on the exact simulator: fill what is left of the budget, squeeze what exceeds it.

Enters: a candidate that stems from a save set, and a budget. Leaves: a candidate that fits (fill:
never slower; squeeze: or None).
"""

from __future__ import annotations

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.simulate import saved_of, spans_of


def fill(indexed: Indexed, start: Candidate, budget_nbytes: int, effort: Effort) -> Candidate:
    """Save more values, most time per byte first, as long as the exact peak fits.

    Whole batches are tried first and halved when they do not fit, so that the number of
    simulations grows with what is rejected, not with what is saved.

    Args:
        indexed: the step.
        start: a plan that fits.
        budget_nbytes: the peak allowed.
        effort: for the simulations.
    """
    best = start
    batches = [_worth_saving(indexed, start)]
    while batches and not effort.is_spent:
        batch = batches.pop()
        if not batch:
            continue
        effort.simulated(len(best.steps))
        assert best.saved is not None
        new = candidate(indexed, best.saved.union(batch), start.method, start.retention)
        if new.peak_nbytes <= budget_nbytes and new.time_us < best.time_us:
            best = new
        elif len(batch) > 1:
            half = len(batch) // 2
            batches += [batch[half:], batch[:half]]
    return best


def _worth_saving(indexed: Indexed, plan: Candidate) -> list[int]:
    """Values made again in the backward, most recompute time per byte first."""
    times: dict[int, int] = {}
    in_backward = False
    for op in plan.steps:
        in_backward = in_backward or indexed.is_backward[op]
        if in_backward and not indexed.is_backward[op]:
            times[op] = times.get(op, 0) + 1
    gain: dict[int, float] = {}
    for op, count in times.items():
        for v in indexed.outputs[op]:
            if v not in (plan.saved or ()) and not indexed.barred[v]:
                gain[v] = indexed.time_us[op] * count / (indexed.nbytes[v] + 1)
    return sorted(gain, key=lambda v: (-gain[v], v))


def squeeze(
    indexed: Indexed, start: Candidate, budget_nbytes: int, effort: Effort
) -> Candidate | None:
    """Stop saving values that are live at the peak, cheapest recompute per byte first.

    Args:
        indexed: the step.
        start: a plan that exceeds the budget.
        budget_nbytes: the peak allowed.
        effort: for the simulations.

    Returns:
        A plan that fits, or None if no dropping helped.
    """
    current = start
    while current.peak_nbytes > budget_nbytes:
        for v in _droppable_at_peak(indexed, current, budget_nbytes):
            if effort.is_spent:
                return None
            effort.simulated(len(current.steps))
            assert current.saved is not None
            new = candidate(indexed, current.saved - v, start.method, start.retention)
            if _excess(new, budget_nbytes) < _excess(current, budget_nbytes):
                current = new
                break
        else:
            return None
    return current


def _excess(plan: Candidate, budget_nbytes: int) -> tuple[int, int]:
    """How far the plan is above the budget: the peak, then in how many steps."""
    over = sum(1 for nbytes in plan.timeline.live_nbytes if nbytes > budget_nbytes)
    return plan.peak_nbytes, over


def _droppable_at_peak(
    indexed: Indexed, plan: Candidate, budget_nbytes: int
) -> list[frozenset[int]]:
    """Sets of saved values live at the peak: single ones, then enough to fit if all went well."""
    spans = spans_of(indexed, plan.steps)
    peak = plan.timeline.peak_step
    live = {v for v, born, last in spans if born <= peak <= last}
    saved = [
        v
        for v in saved_of(indexed, plan.steps, spans)
        if v in live and v in (plan.saved or ()) and not indexed.forced[v] and not indexed.pinned[v]
    ]
    saved = [v for v in saved if indexed.nbytes[v] > 0]
    saved.sort(key=lambda v: (indexed.time_us[indexed.producer[v]] / indexed.nbytes[v], v))
    missing, enough = plan.peak_nbytes - budget_nbytes, []
    for v in saved:
        enough.append(v)
        missing -= indexed.nbytes[v]
        if missing <= 0:
            break
    return [frozenset(enough), *(frozenset((v,)) for v in saved[:12])]
