"""The strategies that people name: save all, recompute all, segments of layers, sqrt n.

Enters: a problem, and where a strategy speaks of layers, which operations belong together.
Leaves: a plan that looks at no budget and searches for nothing. What may not be recomputed is
saved whatever the strategy says, what must be recomputed is not. Operations that only the backward
needs (EITHER, listed there) run in the backward, as they do without a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autoremat_solver.check import check
from autoremat_solver.model.indexed import Indexed, index
from autoremat_solver.model.readable import require_consistent
from autoremat_solver.plan import Plan
from autoremat_solver.plans.heuristics import in_segments, live_across, root_of
from autoremat_solver.plans.realise import KEEP, Retention, realise
from autoremat_solver.problem import Phase, Problem


def save_all_but(problem: Problem, dropped: Collection[str] = ()) -> Plan:
    """Save all that the backward reads, but for some values: those are made again once.

    Raises:
        ProblemError: if a value that the backward needs may neither be saved nor recomputed.
    """
    indexed = index(problem)
    late = {problem.values[v].name for v in _made_late(indexed)}
    gone = late.union(dropped)
    saved = frozenset(v for v, value in enumerate(problem.values) if value.name not in gone)
    return _plan(indexed, saved)


def recompute_all(problem: Problem) -> Plan:
    """Save nothing: the backward makes each forward value that it needs once more."""
    return _plan(index(problem), frozenset())


def per_segment(
    problem: Problem, segment_of: Mapping[str, int], kept: Collection[str] = ()
) -> Plan:
    """Save what enters each segment, and make the rest of it again when its backward runs.

    Args:
        problem: the step.
        segment_of: number of the segment of each operation that belongs to one; what others make
            is saved.
        kept: values that are saved wherever they are made.
    """
    indexed = index(problem)
    readers: dict[str, set[int | None]] = {}
    late = _late_ops(indexed)
    for number, op in enumerate(problem.ops):
        if op.phase is Phase.BACKWARD or number in late:
            continue
        for name in op.inputs:
            readers.setdefault(name, set()).add(segment_of.get(op.name))
    inner = {
        name
        for op in problem.ops
        if op.name in segment_of
        for name in op.outputs
        if readers.get(name, set()) <= {segment_of[op.name]}
    }
    return save_all_but(problem, inner.difference(kept))


def sqrt_segments(problem: Problem) -> Plan:
    """About sqrt(n) segments of even time, cut where little is alive [Chen2016]."""
    indexed = index(problem)
    count = len(indexed.forward_order)
    if count < 3:
        return save_all_but(problem)
    return _plan(indexed, *in_segments(indexed, live_across(indexed), root_of(count)))


def _late_ops(indexed: Indexed) -> set[int]:
    """EITHER operations that the problem lists in the backward."""
    first_backward = next(iter(indexed.backward_ops), len(indexed.phase))
    either = (op for op, phase in enumerate(indexed.phase) if phase is Phase.EITHER)
    return {op for op in either if op > first_backward}


def _made_late(indexed: Indexed) -> list[int]:
    return [v for op in _late_ops(indexed) for v in indexed.outputs[op]]


def _plan(indexed: Indexed, saved: frozenset[int], retention: Retention = KEEP) -> Plan:
    require_consistent(indexed)
    plan = indexed.plan(realise(indexed, saved, retention))
    violations = check(indexed.problem, plan)
    assert not violations, violations[0]
    return plan
