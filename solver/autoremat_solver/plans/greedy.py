"""The greedy strategy, on exact peaks and with the price of whole chains.

Enters: a problem and a budget. Leaves: a candidate that fits, or the lowest one that dropping
leads to. It starts by saving everything and drops what is live at the peak, the cheapest per byte
first. The price of a value is the longest chain of operations that would run again for it, so what
was dropped before makes what is read from it dearer. A few percent of what is missing go at once:
the peak moves.
"""

from __future__ import annotations

from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.plans.heuristics import save_all
from autoremat_solver.simulate import spans_of

DROPPED_AT_ONCE = 0.03  # of the bytes above the budget


def greedy_candidate(indexed: Indexed, budget_nbytes: int, effort: Effort) -> Candidate:
    """Save all, then drop what is cheapest to make again per byte at the peak until it fits.

    Args:
        indexed: the step.
        budget_nbytes: the peak allowed.
        effort: for the simulations.
    """
    saved = save_all(indexed)
    plan = candidate(indexed, saved, "greedy")
    while plan.peak_nbytes > budget_nbytes and not effort.is_spent:
        missing_nbytes = plan.peak_nbytes - budget_nbytes
        dropped = _cheapest_at_peak(indexed, plan, saved, DROPPED_AT_ONCE * missing_nbytes)
        if not dropped:
            break
        saved -= dropped
        effort.simulated(len(plan.steps))
        plan = candidate(indexed, saved, "greedy")
    return plan


def _cheapest_at_peak(
    indexed: Indexed, plan: Candidate, saved: frozenset[int], nbytes: float
) -> frozenset[int]:
    """Saved values that are live at the peak, enough to make up so many bytes if there are."""
    spans = spans_of(indexed, plan.steps)
    peak = plan.timeline.peak_step
    live = {v for v, born, last in spans if born <= peak <= last and indexed.nbytes[v] > 0}
    droppable = [v for v in saved & live if not indexed.forced[v] and not indexed.pinned[v]]
    again_us = _times_to_make_again(indexed, saved)
    droppable.sort(key=lambda v: (again_us[v] / indexed.nbytes[v], v))
    chosen: list[int] = []
    for v in droppable:
        if nbytes <= 0:
            break
        chosen.append(v)
        nbytes -= indexed.nbytes[v]
    return frozenset(chosen)


def _times_to_make_again(indexed: Indexed, saved: frozenset[int]) -> list[float]:
    """Per value the time of the longest chain of operations from what is saved to it."""
    again_us = [0.0] * len(indexed.nbytes)
    for op in indexed.forward_order:
        before = max((again_us[v] for v in indexed.inputs[op] if v not in saved), default=0.0)
        for v in indexed.outputs[op]:
            again_us[v] = before + indexed.time_us[op]
    return again_us
