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
from autoremat_solver.plans.fast_measure import fast_spans
from autoremat_solver.plans.front import Candidate, candidate
from autoremat_solver.plans.heuristics import save_all

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
    spans = fast_spans(indexed, plan.steps)
    peak = plan.timeline.peak_step
    live = saved.intersection(spans.value[(spans.born <= peak) & (spans.last >= peak)].tolist())
    fixed = indexed.forced, indexed.pinned
    droppable = [v for v in live if indexed.nbytes[v] and not any(of[v] for of in fixed)]
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
    chain_us = list(again_us)  # the same, but nothing for what is saved
    inputs, outputs, time_us = indexed.inputs, indexed.outputs, indexed.time_us
    for op in indexed.forward_order:
        before = 0.0
        for v in inputs[op]:
            before = max(before, chain_us[v])
        before += time_us[op]
        for v in outputs[op]:
            again_us[v] = before
            chain_us[v] = 0.0 if v in saved else before
    return again_us
