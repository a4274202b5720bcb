"""A plan for a graph whose backward keeps what crosses to it, for another backward.

Enters: a stated graph, a policy, and a budget. Leaves: a `Choice`. What crosses is there in all of
such a backward, which the simulator does not know; but where it is fixed beforehand, it is a result
of the step like any other. So what a policy saves is what crosses, and how the rest is made
again, and in which order all runs, is searched for. Guarantees: nothing crosses to the backward but
that, and what may not run again.
"""

from __future__ import annotations

from dataclasses import replace

from autoremat_solver import Plan, Problem, Solver
from autoremat_solver.problem import Phase
from autoremat_solver.simulate import instance_spans

from autoremat.ask.options import Setting
from autoremat.ask.policy import Policy
from autoremat.planning.asked import policy_plan
from autoremat.planning.choice import Choice
from autoremat.planning.first_found import choose_once
from autoremat.planning.unsearched import choose_fixed
from autoremat.problem.lower import RNG_STATE
from autoremat.problem.shell import LOSS_BOUNDARY
from autoremat.problem.subject import Subject


def choose_beside_kept(
    subject: Subject, policy: Policy, budget_nbytes: int, setting: Setting
) -> Choice:
    """The fastest plan found that saves what a policy does; the smallest if none fits.

    Args:
        subject: the graph.
        policy: decides what crosses.
        budget_nbytes: of the whole step, what crosses being there to its end.
        setting: how the graph is planned.

    Raises:
        ProblemError: if some values may neither be saved nor made again.
    """
    plan, name = policy_plan(subject, policy)
    reads, problem = setting.reads_inductor, staying(subject.lowered.problem, plan)

    def search() -> Choice:
        solver = Solver(problem, time_limit_s=setting.time_limit_s, strict=setting.strict)
        found = solver.solve(budget_nbytes)
        method = f"{found.method} beside {name}"
        return choose_fixed(subject, found.plan, method, budget_nbytes, reads=reads)

    asked = f"beside {name}, time_limit={setting.time_limit_s}, strict={setting.strict}"
    return choose_once(subject, budget_nbytes, asked, search, reads=reads)


def staying(problem: Problem, plan: Plan) -> Problem:
    """The same step where what crosses by a plan stays to the end, and nothing else crosses."""
    boundary = plan.place_of(LOSS_BOUNDARY)
    spans = instance_spans(problem, plan)
    crossing = {name for name, born, last in spans if born < boundary < last}
    stay = crossing.union(problem.outputs)
    made_again = {
        name
        for op in problem.ops
        if op.phase in (Phase.FORWARD, Phase.EITHER) and op.recomputable
        for name in op.outputs
        if name not in stay and not name.endswith(RNG_STATE)
    }
    values = (
        replace(value, must_recompute=True)
        if value.name in made_again and not value.must_save
        else value
        for value in problem.values
    )
    outputs = (*problem.outputs, *sorted(crossing.difference(problem.outputs)))
    return replace(problem, values=tuple(values), outputs=outputs, link=None)
