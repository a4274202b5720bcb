"""A step with regions written out: every run of a region by itself.

Enters: a `Problem` that states its regions once, and a plan of it: one for all runs. Leaves: the
plain problem, which every method of the solver takes, and the plan of it. Guarantees: a problem
without regions comes back as it is. This is what regions mean; `simulate` and `check` ask here.

    stated: embed block head | head' block' embed'        block and block' run 3 times
    step:   embed block@1 block@2 block@3 head | head' block'@3 block'@2 block'@1 embed'
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver.plan import Plan, Step
from autoremat_solver.problem import Op, Problem, ProblemError, Region


def unrolled(problem: Problem) -> Problem:
    """The problem of the whole step, without regions.

    Raises:
        ProblemError: if a run would read what is not made before it.
    """
    if not problem.regions:
        return problem
    runs = _Runs(problem)
    places = problem.in_runs([op.name for op in problem.ops])
    return replace(
        problem,
        values=tuple(
            replace(value, name=run_name(value.name, run))
            for value in problem.values
            for run in runs.of(value.name)
        ),
        ops=tuple(runs.op(problem.ops[place], run) for place, run in places),
        outputs=tuple(run_name(name, run) for name in problem.outputs for run in runs.of(name)),
        regions=(),
    )


def unrolled_plan(problem: Problem, plan: Plan) -> Plan:
    """The plan of the whole step in which every run of a region takes the same steps.

    Raises:
        ProblemError: if the plan runs other operations between those of a region: a region is one
            piece of code in the forward, and one in the backward; or if it offloads.
    """
    if not problem.regions:
        return plan
    if plan.offloaded:
        raise ProblemError(
            f"The plan offloads {plan.offloaded[0]!r} in a problem with regions, whose runs all "
            "take the same steps: offload in a plan of `unrolled(problem)`."
        )
    places = problem.in_runs(plan.schedule)
    steps = ((plan.steps[place], run) for place, run in places)
    return Plan(tuple(Step(step.kind, run_name(step.target, run)) for step, run in steps))


def run_name(name: str, run: int) -> str:
    """An operation or value of one run of its region; outside of regions the run is 0."""
    return f"{name}@{run}" if run else name


class _Runs:
    """Which run's values an operation reads."""

    def __init__(self, problem: Problem) -> None:
        names = [op.name for op in problem.ops]
        late = problem.ops[problem.first_backward(names) :]
        self._late = {name for op in late for name in op.outputs}
        self._region_of = {op: region for region in problem.regions for op in region.ops}
        self._made_in = {
            name: self._region_of[op.name]
            for op in problem.ops
            if op.name in self._region_of
            for name in op.outputs
        }

    def of(self, value: str) -> range:
        """The runs in which a value is made."""
        region = self._made_in.get(value)
        return range(1) if region is None else range(1, region.count + 1)

    def op(self, op: Op, run: int) -> Op:
        """One run of an operation."""
        region = self._region_of.get(op.name)
        return replace(
            op,
            name=run_name(op.name, run),
            inputs=tuple(self._read(name, region, run) for name in op.inputs),
            outputs=tuple(run_name(name, run) for name in op.outputs),
            overwrites=tuple(self._read(name, region, run) for name in op.overwrites),
        )

    def _read(self, value: str, region: Region | None, run: int) -> str:
        if region is not None:
            if self._made_in.get(value) is region:
                return run_name(value, run)
            made = dict(region.carried).get(value)
            if made is not None and run != self._first(made):
                return run_name(made, run + 1 if made in self._late else run - 1)
        return run_name(value, self._last(value))

    def _first(self, value: str) -> int:
        """The run that comes first where a value of a region is made."""
        return self.of(value)[-1 if value in self._late else 0]

    def _last(self, value: str) -> int:
        return self.of(value)[0 if value in self._late else -1]
