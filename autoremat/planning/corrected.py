"""A problem as a reading has corrected it, for the next search.

Enters: a problem, a plan of it, and the peak of the code that was generated for that plan. Leaves:
the problem with smaller values, of which plan and time are the same. What the backward alone makes
it makes once under every plan, and Inductor may compute it inside the kernel that reads it: what a
reading found not to be there is not there under other plans.
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver import Phase, Plan, Problem, simulate
from autoremat_solver.simulate import occupied_spans

LEAST = 0.02  # of what is above resident: less is not worth another search
MOST_PEAKS = 100  # that are lowered one after the other


def corrected(problem: Problem, plan: Plan, read_nbytes: int) -> Problem | None:
    """The problem of which the plan's peak is what was read; None if it was close to that.

    Args:
        problem: it has phases.
        plan: of it.
        read_nbytes: the plan's real peak, which may be above the simulated one: then None.
    """
    least_nbytes = LEAST * (read_nbytes - problem.resident_nbytes)
    if simulate(problem, plan).peak_nbytes - read_nbytes <= least_nbytes:
        return None
    found = problem
    for _ in range(MOST_PEAKS):
        lower = _lower_at_peak(found, plan, read_nbytes)
        if lower is None:
            break
        found = lower
    return None if found is problem else found


def _lower_at_peak(problem: Problem, plan: Plan, read_nbytes: int) -> Problem | None:
    """With smaller values where the plan's peak is; None if there is nothing to make smaller."""
    timeline = simulate(problem, plan)
    step, missing_nbytes = timeline.peak_step, timeline.peak_nbytes - read_nbytes
    spans = occupied_spans(problem, plan)
    live = (name for name, born, last in spans if born <= step <= last)
    sizes = {name: problem.value_by_name[name].nbytes for name in live if _is_late(problem, name)}
    smaller: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        cut_nbytes = min(sizes[name], missing_nbytes)
        if cut_nbytes > 0:
            smaller[name] = sizes[name] - cut_nbytes
            missing_nbytes -= cut_nbytes
    if not smaller:
        return None
    values = (replace(v, nbytes=smaller.get(v.name, v.nbytes)) for v in problem.values)
    return replace(problem, values=tuple(values))


def _is_late(problem: Problem, name: str) -> bool:
    """Whether the backward alone makes a value, for itself, and in memory of its own.

    What may take the memory of another value does so by its size: made smaller, it would not.
    """
    maker = problem.producer_of.get(name)
    is_own = maker is not None and maker.phase is Phase.BACKWARD and not maker.overwrites
    return is_own and name not in problem.outputs
