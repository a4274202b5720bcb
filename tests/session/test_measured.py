"""Steps as an allocator counts them that keeps a peak: measured now and then, and planned for.

CUDA's does. Here the CPU is taken for such a device, and what it would say is made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.errors import OverBudgetWarning
from autoremat.memory import meter
from autoremat.session import measured
from autoremat.session.measured import Measured
from tests.session.test_blocks import compiles
from tests.session.test_results_gone import TOKENS
from tests.session.test_results_gone import Model as Returning
from tests.training import Peaks, optimized, peaks, told

pytestmark = pytest.mark.shares_plans


class Model(Returning):
    """It returns its loss alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[0]


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


def measured_steps(steps: Steps, count: int, compiling: tuple[int, ...] = (1,)) -> list[int]:
    """Numbers of the steps that are measured, of so many."""
    found, own = [], Measured(steps)
    for _ in range(count):
        steps.number += 1
        own.begin()
        if steps.number in compiling:
            steps.compiled_in.append(steps.number)
        own.end()
        if own.taken_nbytes() is not None:
            found.append(steps.number)
    return found


def test_steps_are_measured_ever_more_rarely(allocator: Allocator) -> None:
    """None of a pair, of three or four that come in turn is left out for ever."""
    found = measured_steps(Steps(), 64)
    assert found == [2, 3, 4, 6, 9, 14, 22, 35, 56]
    assert allocator.resets == len(found)
    assert all({number % n for number in found} == set(range(n)) for n in (2, 3, 4))


def test_a_step_that_compiles_is_not_measured(allocator: Allocator) -> None:
    """What comes after it is looked at anew: a size, a graph or a plan is new."""
    assert measured_steps(Steps(), 9, compiling=(1, 2, 3)) == [4, 5, 6, 8]
    assert measured_steps(Steps(), 12, compiling=(1, 8)) == [2, 3, 4, 6, 9, 10, 11]


def test_nothing_is_measured_where_no_peak_is_kept(allocator: Allocator) -> None:
    assert measured_steps(Steps(torch.device("cpu")), 12) == []
    assert measured_steps(Steps(is_planned=False), 12) == []
    assert allocator.resets == 0


def test_an_allocator_without_statistics_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pluggable ones are: steps go on."""

    def refuse(device: torch.device) -> None:
        raise RuntimeError("does not yet support resetPeakStats")

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuse)
    assert measured_steps(Steps(), 12) == []


def test_what_comes_after_a_backward_is_no_part_of_the_step(allocator: Allocator) -> None:
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


def test_a_step_in_which_another_begins_to_be_measured_is_not(allocator: Allocator) -> None:
    """There is one peak for all: who resets it has it."""
    first, second = Measured(Steps(number=2)), Measured(Steps(number=2))
    first.begin()
    second.begin()
    first.end()
    second.end()
    assert (first.taken_nbytes(), second.taken_nbytes()) == (None, 0)


def test_who_measures_a_peak_is_not_disturbed(allocator: Allocator) -> None:
    """`measure_peak` around several steps, of which one would have been measured."""
    with meter._taking_peaks(torch.device("cuda")):
        assert measured_steps(Steps(), 5) == []
    assert allocator.resets == 1


def more_than_tensors(
    allocator: Allocator, model: nn.Module, more_nbytes: int, count: int
) -> list[OverBudgetWarning]:
    """What is told of steps that take so much more than their tensors, which are as planned."""

    def tensors_nbytes() -> int:
        report = autoremat.report(model)
        return report.predicted_peak_nbytes - report.resident.unseen_nbytes

    def run() -> None:
        for _ in range(count):
            model.zero_grad()
            model(TOKENS).backward()
            allocator.peak_nbytes = tensors_nbytes() + more_nbytes

    return told(run)


@pytest.fixture(scope="module", name="found")
def fixture_found() -> Peaks:
    """Of the model's step."""
    return peaks(Model, (TOKENS,), time_limit=1.0)


def under(budget: int) -> nn.Module:
    """The model under a budget."""
    return optimized(Model, budget, time_limit=1.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's allocator is taken to keep a peak."""
    monkeypatch.setattr(measured, "COUNTED", {"cpu"})


def test_what_no_tensor_shows_is_planned_for(
    allocator: Allocator, counted: None, found: Peaks
) -> None:
    """A library's workspace, or a tensor that nobody finds: told once, and resident then."""
    budget, more_nbytes = found.at(0.8), (found.save_all - found.smallest) // 4
    model = under(budget)
    warned, *others = more_than_tensors(allocator, model, more_nbytes, count=6)
    assert not others, list(map(str, others))
    assert warned.measured_nbytes > budget
    assert "planned for it" in str(warned)
    assert more_than_tensors(allocator, model, more_nbytes, count=6) == []
    assert budget - more_nbytes // 2 < allocator.peak_nbytes <= budget
    report = autoremat.report(model)
    assert allocator.peak_nbytes <= report.predicted_peak_nbytes <= budget
    assert report.resident.unseen_nbytes >= more_nbytes - budget // 100


def test_a_graph_that_is_new_is_planned_for_it_at_once(
    allocator: Allocator, counted: None, found: Peaks
) -> None:
    """A batch of another size, once it is known what no tensor shows."""
    model = under(found.at(0.8))
    more_than_tensors(allocator, model, (found.save_all - found.smallest) // 4, count=6)
    known = autoremat.report(model).resident.unseen_nbytes
    model.zero_grad()
    model(TOKENS[:, :100]).backward()
    assert autoremat.report(model).resident.unseen_nbytes == known > 0


def test_what_one_step_alone_has_shown_is_not_planned_for(
    allocator: Allocator, counted: None, found: Peaks
) -> None:
    """Such as what another thread took meanwhile: told, and no reason to plan anew."""
    budget = found.at(0.8)
    model = under(budget)
    assert more_than_tensors(allocator, model, 0, count=2) == []
    before = autoremat.report(model).predicted_peak_nbytes
    allocator.peak_nbytes += budget
    (warned,) = more_than_tensors(allocator, model, 0, count=3)
    assert "If another step shows it again" in str(warned)
    assert more_than_tensors(allocator, model, 0, count=6) == []
    assert autoremat.report(model).predicted_peak_nbytes == before


def test_what_leaves_too_little_is_told(allocator: Allocator, counted: None, found: Peaks) -> None:
    """No plan fits: the step goes on, as lean as it can, and is not told of without end."""
    budget = found.at(0.8)
    model = under(budget)
    warned = more_than_tensors(allocator, model, budget, count=12)
    assert "planned for it" in str(warned[0])
    assert "as lean as it can" in str(warned[-1])
    assert len(warned) <= 3
    before = compiles(model)[:2]
    more_than_tensors(allocator, model, 2 * budget, count=6)
    assert compiles(model)[:2] == before  # what cannot be planned for is no reason to compile


def test_a_step_in_which_another_model_is_compiled_is_not_measured(allocator: Allocator) -> None:
    """What compiling takes is of no step."""
    steps = Steps(number=2)
    own = Measured(steps)
    own.begin()
    meter.compile_begins()
    own.end()
    assert own.taken_nbytes() is None
    own.begin()
    own.end()
    assert own.taken_nbytes() is not None


def test_another_plan_of_the_same_model_knows_it_as_well(
    allocator: Allocator, counted: None, found: Peaks
) -> None:
    """One for steps that begin beside gradients."""
    model = under(found.at(0.9))
    more_than_tensors(allocator, model, (found.save_all - found.smallest) // 4, count=6)
    known = autoremat.report(model).resident.unseen_nbytes
    for _ in range(2):
        model(TOKENS).backward()
    report = autoremat.report(model)
    assert report.resident.gradients_nbytes > 0
    assert report.resident.unseen_nbytes == known > 0
