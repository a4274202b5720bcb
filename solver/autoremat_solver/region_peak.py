"""The peak of a plan of a problem with regions, in time that does not grow with the counts.

Enters: a problem and a plan of it. Leaves: the peak that `simulate` says (a test compares the two).

A value of one run is read in that run, in the next one, or, of the last run, outside. So each run
beyond a few adds the same bytes to any one step, and along a region's runs, but for the first and
the last of them, live bytes rise or fall evenly: the highest is at one of the ends. Two runs at
each end are simulated, once as they are and once with one more run between them.
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver.plan import Plan
from autoremat_solver.problem import Problem
from autoremat_solver.regions import run_name, unrolled_plan
from autoremat_solver.simulate import simulate

FEW = 4  # runs: two at each end


def peak_nbytes(problem: Problem, plan: Plan) -> int:
    """The highest live bytes of any step.

    Raises:
        As `simulate`.
    """
    few = {region.name: min(region.count, FEW) for region in problem.regions}
    base = simulate(_with_counts(problem, few), plan).live_nbytes
    live = list(base)
    for region in problem.regions:
        if region.count <= FEW:
            continue
        longer = _with_counts(problem, few | {region.name: FEW + 1})
        between = {run_name(op, FEW // 2 + 1) for op in region.ops}
        steps = zip(
            simulate(longer, plan).live_nbytes, unrolled_plan(longer, plan).steps, strict=True
        )
        with_one_more = (nbytes for nbytes, step in steps if step.target not in between)
        for place, (less, more) in enumerate(zip(base, with_one_more, strict=True)):
            live[place] += (region.count - FEW) * (more - less)
    return max(live, default=0)


def _with_counts(problem: Problem, count_of: dict[str, int]) -> Problem:
    regions = (replace(region, count=count_of[region.name]) for region in problem.regions)
    return replace(problem, regions=tuple(regions))
