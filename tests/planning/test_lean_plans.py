"""A budget that a refusal named is accepted, whatever the next search finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autoremat_solver import Plan, Solution, Solver
from autoremat_solver.plan import Status
from torch import nn

import autoremat
from autoremat.inductor import real_peaks
from autoremat.planning import remembered as lean_plans
from autoremat.problem.subject import Peaks
from tests.solver.test_solver_errors import chain_without_phases


class MeanSquare(nn.Module):
    """The loss, inside the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def deep(depth: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(depth)]
    return nn.Sequential(*layers, MeanSquare())


def step(budget: int, time_limit: float) -> nn.Module:
    model = autoremat.optimize(
        deep(), budget, compiler="eager", time_limit=time_limit, verbose=False
    )
    model(torch.ones(256, 32)).backward()
    return model


@pytest.mark.thorough
def test_the_named_budget_is_accepted_by_a_search_that_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan that the refusal rested on is remembered."""
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        step(autoremat.resident_nbytes(deep(), torch.ones(256, 32)), 10.0)
    smallest = refused.value.smallest_peak_nbytes

    def nothing(solver: Solver, budget_nbytes: int) -> Solution:
        return replace(solver.fastest(), status=Status.INFEASIBLE)

    monkeypatch.setattr(Solver, "solve", nothing)
    report = autoremat.report(step(smallest, 10.0))
    assert report.predicted_peak_nbytes <= smallest
    assert report.method == "remembered"
    monkeypatch.setattr(lean_plans, "recall", lambda problem: None)
    with pytest.raises(autoremat.InfeasibleBudget):
        step(smallest, 10.0)


def test_a_plan_is_remembered_on_disk_and_checked_when_read() -> None:
    """Another process has the file only; a plan that does not fit the problem is none."""
    problem, plan = chain_without_phases(), Plan.of(("fa", "fb", "fc", "fa", "fd"))
    lean_plans.remember(problem, plan, 123)
    lean_plans._known.clear()
    assert lean_plans.recall(problem) == lean_plans.LeanPlan(plan, 123)
    assert lean_plans.recall(replace(problem, resident_nbytes=1)) is None
    lean_plans.remember(problem, Plan.of(("fa",)), 123)
    assert lean_plans.recall(problem) is None


@pytest.mark.thorough
@pytest.mark.inductor
def test_the_named_budget_is_not_searched_again_under_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading generated code takes long: the plan behind the refusal is read first."""

    def plan(budget: int) -> autoremat.Report:
        return autoremat.plan(
            deep(3), torch.ones(256, 32), budget=budget, time_limit=2.0, verbose=False
        )

    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        plan(autoremat.resident_nbytes(deep(3), torch.ones(256, 32)))
    readings = []
    original = real_peaks.generated_peaks

    def counted(*args: object) -> Peaks:
        readings.append(1)
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(real_peaks, "generated_peaks", counted)
    smallest = refused.value.smallest_peak_nbytes
    assert plan(smallest).predicted_peak_nbytes <= smallest
    assert len(readings) <= 3  # torch's own partition, the plan remembered, one that was searched
