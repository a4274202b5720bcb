"""Steps as an allocator counts them that keeps a peak: measured now and then, and planned for.

CUDA's does. Here the CPU is taken for such a device, and what it would say is made up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import autoremat
from autoremat.errors import OverBudgetWarning
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.session import measured
from autoremat.session.measured import Measured
from tests.session.test_results_gone import TOKENS, Model
from tests.training import optimized, peaks


@dataclass
class Steps:
    """What a session tells of them."""

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    number: int = 0
    compiled_in: list[int] = field(default_factory=list)
    is_planned: bool = True


@dataclass
class Allocator:
    """One whose statistics are made up: the most of a step is what is set."""

    peak_nbytes: int = 0
    resets: int = 0

    def reset(self, device: torch.device) -> None:
        self.resets += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: found.peak_nbytes)
    return found


def measured_steps(steps: Steps, count: int, compiling: tuple[int, ...] = ()) -> list[int]:
    """Numbers of the steps that are measured, of so many."""
    found, own = [], Measured(steps)
    for _ in range(count):
        if own.taken_nbytes() is not None:
            found.append(steps.number)
        steps.number += 1
        own.begin()
        if steps.number in compiling:
            steps.compiled_in.append(steps.number)
    return found


def test_steps_are_measured_ever_more_rarely(allocator: Allocator) -> None:
    assert measured_steps(Steps(), 40) == [2, 3, 5, 9, 17, 33]
    assert allocator.resets == 6


def test_a_step_that_compiles_is_not_measured(allocator: Allocator) -> None:
    assert measured_steps(Steps(), 12, compiling=(1, 2, 3)) == [4, 7]


def test_nothing_is_measured_where_no_peak_is_kept(allocator: Allocator) -> None:
    assert measured_steps(Steps(torch.device("cpu")), 12) == []
    assert measured_steps(Steps(is_planned=False), 12) == []
    assert allocator.resets == 0


def test_what_comes_after_a_step_is_no_part_of_it(allocator: Allocator) -> None:
    """Such as an evaluation."""
    steps = Steps(number=1)
    own = Measured(steps)
    steps.number += 1
    own.begin()
    allocator.peak_nbytes = 3
    own.end()
    allocator.peak_nbytes = 5
    assert own.taken_nbytes() == 3
    assert own.taken_nbytes() is None


def more_than_tensors(
    allocator: Allocator, model: nn.Module, more_nbytes: int, count: int = 4
) -> list[OverBudgetWarning]:
    """What is told of steps in a process that holds so much more than tensors."""

    def step() -> None:
        model.zero_grad()
        model(TOKENS)[0].backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            before_nbytes = resident_nbytes(model, TOKENS)
            allocator.peak_nbytes = before_nbytes + measure_peak(step) + more_nbytes
    return [entry.message for entry in told if isinstance(entry.message, OverBudgetWarning)]


def test_what_no_tensor_shows_is_planned_for(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's workspace, or what a tensor in a closed book of the user's holds: told once."""
    monkeypatch.setattr(measured, "COUNTED", {"cpu"})
    found = peaks(Model, (TOKENS,))
    budget, more_nbytes = found.at(0.8), (found.save_all - found.smallest) // 4
    model = optimized(Model, budget)
    (told,) = more_than_tensors(allocator, model, more_nbytes)
    assert told.measured_nbytes > budget
    assert "planned for that" in str(told)
    assert more_than_tensors(allocator, model, more_nbytes) == []
    assert budget - more_nbytes // 2 < allocator.peak_nbytes <= budget
    assert autoremat.report(model).predicted_peak_nbytes <= budget


def test_what_leaves_too_little_is_told(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan fits: the step goes on, as lean as it can."""
    monkeypatch.setattr(measured, "COUNTED", {"cpu"})
    budget = peaks(Model, (TOKENS,)).at(0.8)
    model = optimized(Model, budget)
    told = more_than_tensors(allocator, model, budget)
    assert "planned for that" in str(told[0])
    assert "Lower the budget" in str(told[-1]) or "leaves too little" in str(told[-1])
