"""A budget that a refusal named is accepted, whatever the next search finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autoremat_solver import Plan, Solution, Solver
from autoremat_solver.plan import Status
from torch import nn

import autoremat
from autoremat import choose, lean_plans
from tests.test_solver_errors import chain_without_phases


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(10)]
    return nn.Sequential(*layers)


def step(budget: int, time_limit: float) -> nn.Module:
    model = autoremat.optimize(
        deep(), budget, compiler="eager", time_limit=time_limit, verbose=False
    )
    model(torch.ones(256, 32)).square().mean().backward()
    return model


def test_the_named_budget_is_accepted_by_a_search_that_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan that the refusal rested on is remembered."""
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        step(1000, 10.0)
    smallest = refused.value.smallest_peak_nbytes

    def nothing(solver: Solver, budget_nbytes: int) -> Solution:
        return replace(solver.fastest(), status=Status.INFEASIBLE)

    monkeypatch.setattr(Solver, "solve", nothing)
    report = autoremat.report(step(smallest, 10.0))
    assert report.predicted_peak_nbytes <= smallest
    assert report.method == "remembered"
    monkeypatch.setattr(choose, "recall", lambda problem: None)
    with pytest.raises(autoremat.InfeasibleBudget):
        step(smallest, 10.0)


def test_a_plan_is_remembered_on_disk_and_checked_when_read() -> None:
    """Another process has the file only; a plan that does not fit the problem is none."""
    problem, plan = chain_without_phases(), Plan(("fa", "fb", "fc", "fa", "fd"))
    lean_plans.remember(problem, plan)
    lean_plans._known.clear()
    assert lean_plans.recall(problem) == plan
    assert lean_plans.recall(replace(problem, resident_nbytes=1)) is None
    lean_plans.remember(problem, Plan(("fa",)))
    assert lean_plans.recall(problem) is None
