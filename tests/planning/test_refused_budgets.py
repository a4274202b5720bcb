"""A budget that a refusal named is accepted, by another search in another process too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from autoremat_solver import effort
from torch import nn

import autoremat
from autoremat.inductor import real_peaks
from autoremat.memory.meter import resident_nbytes
from autoremat.problem.subject import Peaks
from tests.tiny import many_rows


class MeanSquare(nn.Module):
    """The loss, inside the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def deep(depth: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)) for _ in range(depth)]
    return nn.Sequential(*layers, MeanSquare())


def step(budget: int) -> nn.Module:
    model = autoremat.optimize(deep(), budget, compiler="eager", verbose=False)
    model(torch.ones(256, 32)).backward()
    return model


def smallest_of_refusal(run: Callable[[int], object], budget: int) -> int:
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        run(budget)
    return refused.value.smallest_peak_nbytes


@pytest.mark.parametrize("below_nbytes", [0, 4096], ids=["without a search", "after a search"])
def test_the_named_budget_is_accepted(below_nbytes: int) -> None:
    """Whether nothing was searched for, as even what is resident is too much, or all of it."""
    resident = resident_nbytes(deep(), torch.ones(256, 32))
    smallest = smallest_of_refusal(step, resident + below_nbytes)
    assert autoremat.report(step(smallest)).predicted_peak_nbytes <= smallest


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def count_readings(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Peaks]:
    """What is read from now on, each reading of so many seconds."""
    clock, seen = Clock(), []
    original: Callable[..., Peaks] = real_peaks.generated_peaks

    def reading(*given: object) -> Peaks:
        clock.now_s += seconds
        seen.append(original(*given))
        return seen[-1]

    monkeypatch.setattr(effort, "time", clock)
    monkeypatch.setattr(real_peaks, "generated_peaks", reading)
    return seen


def plan(budget: int) -> autoremat.Report:
    return autoremat.plan(deep(2), many_rows(), budget=budget, time_limit=5.0, verbose=False)


@pytest.mark.thorough
@pytest.mark.inductor
def test_however_slow_readings_are_the_named_budget_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing more is read after the time limit; what has to be read is."""
    resident = resident_nbytes(deep(2), many_rows())
    readings = count_readings(monkeypatch, seconds=100.0)
    smallest = smallest_of_refusal(plan, resident + 4096)
    assert len(readings) <= 5  # torch's own partition, the first plan, three lean ones
    assert plan(smallest).predicted_peak_nbytes <= smallest


@pytest.mark.thorough
@pytest.mark.inductor
def test_before_the_time_limit_a_ladder_of_lean_plans_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest modelled peak need not have the smallest real one."""
    resident = resident_nbytes(deep(2), many_rows())
    readings = count_readings(monkeypatch, seconds=0.0)
    smallest = smallest_of_refusal(plan, resident + 4096)
    assert len(readings) > 3
    assert smallest == min(peaks.needed_nbytes for peaks in readings)
    assert plan(smallest).predicted_peak_nbytes <= smallest
