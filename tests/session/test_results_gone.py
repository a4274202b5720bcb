"""Results that nobody holds once the backward begins: their memory is planned with.

So trainers call models of transformers, which return logits beside their loss. Where somebody holds
them all the same, the step is told of, and planned as if it were always so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.planning.part import Part, Planned
from autoremat.session import settling
from autoremat.watch.open_run import Run, returned_by
from tests.session.test_blocks import Body, compiles
from tests.tiny import WIDTH
from tests.training import make_seeded, optimized

pytestmark = pytest.mark.shares_plans

BLOCKS, VOCABULARY = 12, 256
TOKENS = torch.randint(VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(0))
SHARE = 0.6  # of what a step takes without a plan, above what is resident


class Model(nn.Module):
    """It returns its loss, and the logits that this is of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Body() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


class Savable(Model):
    """What it returns may be what its backward needs."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        result = self.head(self.blocks(self.embedding(tokens))).sigmoid()
        return result.square().mean(), result


class Parted(Model):
    """Two graphs: of what the first returns, its own backward needs some, and nobody the rest."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.blocks(self.embedding(tokens))
        logits = self.head(hidden)
        torch._dynamo.graph_break()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return loss, logits, hidden


def letting_go(model: nn.Module) -> object:
    """A step that keeps the gradients alone."""
    model(TOKENS)[0].backward()
    return None


def holding(model: nn.Module) -> object:
    """One in which a variable has what the model returned."""
    loss, results = model(TOKENS)
    loss.backward()
    return results.shape


def keeping(model: nn.Module) -> object:
    """The same, through a backward that keeps its graph."""
    loss, results = model(TOKENS)
    loss.backward(retain_graph=True)
    return results.shape


def peak_of(model: nn.Module, take: Callable[[nn.Module], object]) -> int:
    """Measured bytes of a step from no gradients, with what is there before it."""
    model.zero_grad(set_to_none=True)
    return resident_nbytes(model, TOKENS) + measure_peak(lambda: take(model), device="cpu")


def budget_of(make: Callable[[], nn.Module]) -> int:
    model = make_seeded(make)
    letting_go(model)
    resident = resident_nbytes(model, TOKENS)
    return resident + int(SHARE * (peak_of(model, letting_go) - resident))


def trained(
    make: Callable[[], nn.Module], take: Callable[[nn.Module], object], **options: Any
) -> nn.Module:
    """A model after four steps."""
    model = optimized(make, budget_of(make), **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        take(model)
    return model


@pytest.mark.parametrize("make", [Model, Savable])
def test_a_step_that_lets_its_results_go_spends_all_of_its_budget(make: Callable[[], nn.Module]):
    """What is predicted is measured, and the gradients have the bits of a plan for more memory."""
    budget, model = budget_of(make), trained(make, letting_go)
    measured = peak_of(model, letting_go)
    assert 0.96 * budget <= measured <= budget
    report = autoremat.report(model)
    assert report.predicted_peak_nbytes == pytest.approx(measured, rel=0.01)
    reference = optimized(make, "1GB")
    letting_go(reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_what_a_backward_needs_of_its_results_holds_no_others():
    """The logits of the first graph are gone in the second one's backward, though hidden stays."""
    budget, model = budget_of(Parted), trained(Parted, letting_go)
    measured = peak_of(model, letting_go)
    assert measured <= budget
    report = autoremat.report(model)
    assert report.predicted_peak_nbytes == pytest.approx(measured, rel=0.001)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
@pytest.mark.parametrize("what", ["above the budget", "as slow"])
def test_plans_that_are_to_be_faster_are_taken_only_if_they_are(
    monkeypatch: pytest.MonkeyPatch, what: str
):
    """The step fits already: nothing is lost where a search that was cut short finds no better."""
    model = trained(Parted, letting_go)
    steps = optimized_call(model).session.steps
    before = dict(steps.graphs.parts)
    assert steps.replans.is_optional

    def found(steps: Any, graphs: Any) -> dict[str, list[Part]]:
        steps.graphs.room.leave(0, steps.surroundings.now)  # as where other forms are planned for
        scale = 2 if what == "above the budget" else 1
        parts = {
            name: replace(part, planned=scaled(part.planned.whole, scale))
            for name, part in steps.graphs.parts.items()
        }
        steps.graphs.parts = parts
        return {name: [part] for name, part in parts.items()}

    monkeypatch.setattr(settling, "planned_together", found)
    room = dict(vars(steps.graphs.room))
    taken = settling.plan_anew(steps, {})
    assert steps.graphs.parts == before
    assert {name: parts[0] for name, parts in taken.items()} == before
    assert vars(steps.graphs.room) == room
    made = list(steps.compiled_in)
    letting_go(model)
    assert steps.compiled_in == made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_of_the_least_that_can_be_no_plan_is_to_be_faster():
    """The whole step's takes less than its graphs' own, and may be slower."""
    model = optimized(Parted, "min")
    letting_go(model)
    steps = optimized_call(model).session.steps
    alone = steps.peak_nbytes
    model.zero_grad(set_to_none=True)
    letting_go(model)
    assert not steps.replans.is_optional
    assert steps.replans.count == 1
    assert steps.peak_nbytes < 0.9 * alone
    assert peak_of(model, letting_go) == steps.peak_nbytes


def test_a_backward_goes_on_where_nobody_can_tell_what_it_needs():
    def fails() -> Part:
        raise RuntimeError("no graph at these sizes")

    kept, gone = torch.ones(4), torch.ones(4)
    run = Run(None, None, torch.device("cpu"), find_graph=fails, returned=returned_by([kept, gone]))
    assert not run.is_let_go
    del gone
    assert not run.is_let_go
    del kept
    assert run.is_let_go


def scaled(planned: Planned, by: int) -> Planned:
    """The same plan, whose peak is so many times as high, and which takes as much less time."""
    choice = planned.choice
    timeline = choice.solution.timeline
    timeline = replace(timeline, time_us=timeline.time_us / by)
    solution = replace(choice.solution, timeline=timeline)
    choice = replace(choice, peak_nbytes=by * choice.peak_nbytes, solution=solution)
    return replace(planned, choice=choice)


def test_it_is_planned_anew_once():
    """Behind the second step, which has shown it; steps after that compile nothing."""
    model = trained(Model, letting_go)
    assert compiles(model)[:2] == [2, 3]


def test_results_that_are_held_are_left_their_room():
    """There is nothing to gain, and nothing is planned anew."""
    model = trained(Model, holding)
    assert compiles(model)[:1] == [1]
    assert peak_of(model, holding) <= budget_of(Model)


def test_results_that_are_held_later_are_told_of_and_planned_for():
    """For good: that step is above the budget, and no other that comes."""
    model = trained(Model, letting_go)
    with pytest.warns(autoremat.OverBudgetWarning):
        assert peak_of(model, holding) > budget_of(Model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        for take in (holding, letting_go, letting_go, letting_go, holding):
            assert peak_of(model, take) <= budget_of(Model)
    before, *_ = compiles(model)
    peak_of(model, letting_go)
    assert compiles(model)[0] == before


def test_a_backward_that_keeps_its_graph_tells_of_them_as_well():
    """Nobody is told of it later: the run goes on."""
    with torch._functorch.config.patch(donated_buffer=False):
        model = trained(Model, letting_go)
        with pytest.warns(autoremat.OverBudgetWarning):
            peak_of(model, keeping)
        peak_of(model, keeping)
        assert peak_of(model, keeping) <= budget_of(Model)


def test_the_report_shows_the_step_without_them():
    """Its timeline is the prediction's."""
    model = trained(Model, letting_go)
    (graph,) = autoremat.report(model).graphs
    assert max(graph.timeline.live_nbytes) <= budget_of(Model)


def test_a_report_in_the_midst_of_a_step_is_no_part_of_it():
    """Whoever logs what is planned between forward and backward is not warned of that."""
    budget = budget_of(Model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        model = optimized(Model, budget)
        for _ in range(2):
            model.zero_grad()
            loss = model(TOKENS)[0]
            assert autoremat.report(model).predicted_peak_nbytes <= budget
            loss.backward()


class Broken(Model):
    """Its graph ends where its logits are no more than passed on."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.embedding(tokens))
        torch._dynamo.graph_break()
        return logits.sum()


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_budget_that_fits_only_without_results_is_not_refused_before_a_break():
    """What goes on behind the break lets go of them, as the step shows."""

    def take(model: nn.Module) -> None:
        model(TOKENS).backward()

    plain = make_seeded(Broken)
    take(plain)
    model = optimized(Broken, budget := peak_of(plain, take))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)  # of the first step
        take(model)
    model.zero_grad(set_to_none=True)
    take(model)
    assert peak_of(model, take) <= budget
