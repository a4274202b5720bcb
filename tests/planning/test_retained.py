"""Plans beside what crosses to a backward that keeps its graph."""

from __future__ import annotations

import torch
from autoremat_solver import Solver, check, simulate
from autoremat_solver.policies import save_all_but, sqrt_segments
from autoremat_solver.simulate import instance_spans, saved_values
from torch import Tensor

from autoremat.planning.retained import staying
from tests.joint_graphs import analyse, leaf


def chain(x: Tensor) -> Tensor:
    for _ in range(8):
        x = torch.tanh(x).exp()
    return x.sum()


def test_what_crosses_stays_and_nothing_else_crosses():
    """A plan of such a problem is one of the step itself, and its peak is that of keeping."""
    problem = analyse(chain, leaf(64)).lowered.problem
    plan = sqrt_segments(problem)
    crossing = saved_values(problem, plan)
    beside = staying(problem, plan)
    assert crossing.issubset(beside.outputs)
    found = Solver(beside).solve(0).plan
    assert not check(problem, found)
    assert saved_values(problem, found) <= crossing
    ends = {name: last for name, _, last in instance_spans(beside, found) if name in crossing}
    assert set(ends.values()) <= {len(found.steps) - 1}
    assert simulate(problem, found).peak_nbytes <= simulate(beside, found).peak_nbytes


def test_a_plan_that_saves_all_fixes_all():
    """There is nothing to search for: what it saves stays, and is not made again."""
    problem = analyse(chain, leaf(64)).lowered.problem
    found = Solver(staying(problem, save_all_but(problem))).solve(0).plan
    assert not found.recomputed
