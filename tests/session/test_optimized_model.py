"""The life of an optimised model: several graphs, copies, other shapes, other modes."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
import autoremat.backend
import autoremat.optimized
import autoremat.session.session
from autoremat.planning.choice import Choice
from autoremat.planning.pipeline import choose
from autoremat.session import first_plan
from tests.tiny import WIDTH, Chain, many_rows, sequences
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    measured,
    optimized,
    peaks,
    recomputes,
    refusal,
    same,
    scalar,
    step,
)

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Broken(Chain):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


# --- several graphs ----------------------------------------------------------------------------


def test_a_graph_break_gives_two_planned_graphs():
    """The second gets what the first leaves; gradients are eager's."""
    model = optimized(Broken, UNBOUNDED)
    ours = step(model, (many_rows(),))
    close(step(make_seeded(Broken), (many_rows(),)), ours, 1e-6)
    report = autoremat.report(model)
    assert len(report.graphs) == 2
    assert report.predicted_time_us == pytest.approx(
        sum(graph.predicted_time_us for graph in report.graphs)
    )


class BrokenTwelve(Chain):
    """A graph break in the middle of twelve layers."""

    def __init__(self) -> None:
        super().__init__(12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:6]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.layers[6:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_two_graphs_share_the_budget_from_the_second_step_on(compiler: str):
    """The first took all of it before the second was known; then the step is planned as a whole."""
    x = many_rows()
    unbounded = optimized(BrokenTwelve, UNBOUNDED, compiler=compiler)
    reference = step(unbounded, (x,))
    budget = autoremat.report(unbounded).graphs[0].predicted_peak_nbytes
    model = optimized(BrokenTwelve, budget, compiler=compiler)
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on") as told:
        close(reference, step(model, (x,)), 1e-6)
    assert [warning.message.is_planned_anew for warning in told] == [True]
    assert autoremat.report(model).predicted_peak_nbytes > budget
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", autoremat.OverBudgetWarning)
            ours = step(model, (x,))
        close(reference, ours, 1e-6) if compiler == "inductor" else same(reference, ours)
    model.zero_grad(set_to_none=True)
    report = autoremat.report(model)
    assert measured(model, (x,)) <= report.predicted_peak_nbytes <= budget
    kept = [any(v.action == "recompute" for v in graph.values) for graph in report.graphs]
    assert kept[0], "the first graph keeps less than it could"


class LargeHead(Chain):
    """After the break, few activations and a large parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x.mean(0, keepdim=True)
        torch._dynamo.graph_break()
        return self.head(x).square().mean()


@pytest.mark.thorough
def test_the_gradients_of_later_graphs_are_live_in_the_backward_of_earlier_ones():
    """The step's peak is predicted (but for one row), and kept within a budget below it."""
    x = many_rows()
    model = optimized(LargeHead, UNBOUNDED)
    reference = step(model, (x,))
    model.zero_grad(set_to_none=True)
    report = autoremat.report(model)
    first, second = (graph.predicted_peak_nbytes for graph in report.graphs)
    assert first == report.predicted_peak_nbytes > second
    row_nbytes = 4 * WIDTH  # the first graph's output and its gradient: freed early
    assert first - 4 * row_nbytes <= measured(model, (x,)) <= first
    budget = first - 32 * 1024
    model = optimized(LargeHead, budget)
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on"):
        same(reference, step(model, (x,)))  # it has been told nothing of the head
    model.zero_grad(set_to_none=True)
    same(reference, step(model, (x,)))
    model.zero_grad(set_to_none=True)
    assert measured(model, (x,)) <= autoremat.report(model).predicted_peak_nbytes <= budget


def test_a_backend_tells_of_earlier_graphs_that_no_longer_fit():
    """Beside the gradients of later ones; nothing is planned anew there."""
    x = many_rows().repeat(32, 1)
    model = after_a_step(LargeHead, x)
    budget = autoremat.report(model).predicted_peak_nbytes - 1000
    torch._dynamo.reset()
    options = {"budget": budget, "compiler": "eager", "verbose": False}
    backend = autoremat.backend.autoremat
    model = torch.compile(make_seeded(LargeHead), backend=backend, options=options)
    with pytest.warns(autoremat.OverBudgetWarning, match="above the budget") as told:
        step(model, (x,))
    assert len(told) == 1, [str(w.message) for w in told]
    assert told[0].filename == __file__  # the model's own code, which is being compiled


def after_a_step(make: type[nn.Module], x: Tensor) -> nn.Module:
    """An optimised model that was never short of memory."""
    model = optimized(make, UNBOUNDED)
    step(model, (x,))
    return model


class BrokenLayer(nn.Module):
    """A layer with a graph break inside: two graphs, which every layer of a model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(x)))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(torch.tanh(x)))


class BrokenLayers(nn.Module):
    """Four of them; Dynamo leaves the loop, and the little that follows, to eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BrokenLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x[0, 0]


def test_a_graph_that_runs_in_every_layer_counts_as_often():
    """What all its runs hold is predicted, and kept within a budget, in the first step as well."""
    x = many_rows()
    model = optimized(BrokenLayers, UNBOUNDED)
    reference = step(model, (x,))
    model.zero_grad(set_to_none=True)
    report = autoremat.report(model)
    assert len(report.graphs) < 8
    highest, resident = report.predicted_peak_nbytes, report.resident_nbytes
    assert measured(model, (x,)) == highest
    budget = resident + int(0.8 * (highest - resident))
    model = optimized(BrokenLayers, budget)
    for _ in range(2):
        same(reference, step(model, (x,)))
        model.zero_grad(set_to_none=True)
    predicted = autoremat.report(model).predicted_peak_nbytes
    assert measured(model, (x,)) <= predicted <= budget


class Between(Chain):
    """The first layer's input is made by code before it, and kept for its weight's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.thorough
def test_what_eager_code_hands_to_a_graph_is_held_while_later_ones_run():
    """The first graph's backward reads it; the later graph's peak counts it."""
    x = many_rows()
    model = optimized(Between, UNBOUNDED)
    close(step(make_seeded(Between), (x,)), step(model, (x,)), 1e-6)
    model.zero_grad(set_to_none=True)
    assert measured(model, (x,)) <= autoremat.report(model).predicted_peak_nbytes


@pytest.mark.thorough
def test_models_of_one_class_do_not_use_up_each_others_recompiles():
    """Dynamo compiles one function a few times only; a break makes graphs of the class's own."""
    x = many_rows()
    models = [optimized(BrokenLayers, UNBOUNDED)]
    reference = step(models[0], (x,))
    options = {"compiler": "eager", "strict": True, "verbose": False}
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            models.append(autoremat.optimize(make_seeded(BrokenLayers), UNBOUNDED, **options))
            same(reference, step(models[-1], (x,)))
    peaks = {autoremat.report(model).predicted_peak_nbytes for model in models}
    assert len(peaks) == 1, "each is planned as the first one was"


@pytest.mark.thorough
def test_two_graphs_that_exceed_the_budget_together_say_so():
    """What fits one graph only: both run as lean as they can, warned of once more."""
    smallest = refusal(Broken, (many_rows(),)).smallest_peak_nbytes
    model = optimized(Broken, smallest)
    reference = step(optimized(Broken, UNBOUNDED), (many_rows(),))
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on"):
        same(reference, step(model, (many_rows(),)))
    model.zero_grad(set_to_none=True)
    with pytest.warns(autoremat.OverBudgetWarning, match="as lean as it can"):
        same(reference, step(model, (many_rows(),)))
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoremat.OverBudgetWarning)
        same(reference, step(model, (many_rows(),)))


def test_a_later_graph_is_planned_once_where_the_step_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
):
    """What fits beside the first graph is searched for at once; no lean plan is made before."""
    roomy = autoremat.report(after_step(optimized(Broken, UNBOUNDED)))
    highest, resident = roomy.predicted_peak_nbytes, roomy.resident_nbytes
    planned: list[str] = []

    def note(name: str, plan: Any, *given: Any, **more: Any) -> Any:
        planned.append(name)
        return plan(*given, **more)

    for name in ("choose", "choose_fixed", "choose_without_search"):
        noting = functools.partial(note, name, getattr(first_plan, name))
        monkeypatch.setattr(first_plan, name, noting)
    model = after_step(optimized(Broken, resident + int(0.9 * (highest - resident))))
    assert autoremat.report(model).is_within_budget
    assert planned == ["choose"] * len(roomy.graphs)


@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_a_plan_of_one_step_is_not_searched_for_at_length(monkeypatch: pytest.MonkeyPatch):
    """The later graph does not fit beside the first, and has another plan soon."""
    smallest = refusal(Broken, (many_rows(),)).smallest_peak_nbytes
    brief: list[bool] = []

    def note(*given: Any, is_passing: bool = False, **options: Any) -> Choice:
        found = choose(*given, is_passing=is_passing, **options)
        if not found.fits:
            brief.append(is_passing)
        return found

    monkeypatch.setattr(first_plan, "choose", note)
    after_step(optimized(Broken, smallest))
    assert brief == [True]


def after_step(model: nn.Module) -> nn.Module:
    """A model that has run a step."""
    step(model, (many_rows(),))
    return model


def test_a_loss_outside_the_model():
    """The model returns predictions; their gradient arrives from outside.

    The number that `mse_loss` returns lies in as much memory as its inputs take, which is told.
    """

    class Predicts(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    def loss_of(output: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, torch.ones_like(output))

    smallest = refusal(Predicts, (many_rows(),)).smallest_peak_nbytes
    model = optimized(Predicts, smallest)
    with pytest.warns(autoremat.OverBudgetWarning):
        ours = step(model, (many_rows(),), loss_of)
    with pytest.warns(autoremat.OverBudgetWarning) as told:
        peak = measured(model, (many_rows(),), loss_of)
    assert told[-1].message.predicted_nbytes == pytest.approx(peak, rel=1e-3)
    assert peak > smallest
    same(step(optimized(Predicts, UNBOUNDED), (many_rows(),), loss_of), ours)
    close(step(make_seeded(Predicts), (many_rows(),), loss_of), ours, 1e-6)


def test_an_optimised_part_of_a_larger_model():
    """Only the inner module is planned."""
    inner = optimized(Chain, UNBOUNDED)
    outer = nn.Linear(WIDTH, WIDTH)
    inner(outer(many_rows())).backward()
    assert outer.weight.grad is not None
    assert len(autoremat.report(inner).graphs) == 1


# --- the life of an optimised model ------------------------------------------------------------


@pytest.mark.thorough
def test_optimising_again_replaces_the_plan():
    """The last budget counts."""
    found = peaks(Chain, (many_rows(),))
    model = optimized(Chain, UNBOUNDED)
    reference = step(model, (many_rows(),))
    model.zero_grad(set_to_none=True)
    autoremat.optimize(model, found.smallest, compiler="eager", verbose=False, strict=True)
    same(reference, step(model, (many_rows(),)))
    assert autoremat.report(model).budget_nbytes == found.smallest


def test_a_state_dict_goes_in_and_out():
    """Weights can be loaded before and after planning."""
    model, other = optimized(Chain, UNBOUNDED), Chain()
    step(model, (many_rows(),))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(many_rows()), other.train()(many_rows()))


@pytest.mark.parametrize("make", [Chain, Broken])
def test_a_dropped_model_is_freed(make: type[Chain]):
    """Nothing keeps a model's parameters alive, nor what Dynamo has compiled of it."""
    model = optimized(make, UNBOUNDED)
    step(model, (many_rows(),))
    parameter = weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert parameter() is None


def test_other_batch_sizes():
    """Each gives eager's gradients."""
    model, eager = optimized(Chain, UNBOUNDED), make_seeded(Chain)
    for count in (256, 128, 64, 200):
        close(step(eager, (many_rows(count),)), step(model, (many_rows(count),)), 1e-6)
    assert not autoremat.report(model).fallbacks


@pytest.mark.thorough
def test_symbolic_batch_sizes_under_a_tight_budget():
    """A graph of symbolic sizes is planned by the size at hand."""

    def run(budget: int) -> Any:
        model = optimized(Chain, budget)
        batch = many_rows()
        torch._dynamo.mark_dynamic(batch, 0)
        model(batch).backward()
        return model

    reference = run(UNBOUNDED)
    budget = int(0.75 * autoremat.report(reference).predicted_peak_nbytes)
    model = run(budget)
    assert recomputes(model) > 0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Chain, Broken])
@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_a_smaller_batch_does_not_plan_for_the_full_ones_after_it(make: type[Chain]):
    """The last batch of an epoch leaves code with symbolic sizes: not for larger ones."""
    full, last = (many_rows(),), (many_rows(96),)
    unbounded = optimized(make, UNBOUNDED)
    reference = step(unbounded, full)
    report = autoremat.report(unbounded)
    highest, resident = report.predicted_peak_nbytes, report.resident_nbytes
    budget = resident + int(0.8 * (highest - resident))
    model = optimized(make, budget)
    for batch in (full, full, last):
        step(model, batch)
    same(reference, step(model, full))
    assert measured(model, full) <= autoremat.report(model).predicted_peak_nbytes <= budget


def test_a_batch_that_keeps_growing():
    """It is planned anew a few times, then for all sizes: Dynamo would give the model up."""
    model, eager = optimized(Chain, UNBOUNDED), make_seeded(Chain)
    compiles = []
    for count in range(16, 32):
        close(step(eager, (many_rows(count),)), step(model, (many_rows(count),)), 1e-6)
        compiles.append(len(autoremat.optimized.optimized_call(model).session.planned))
    assert compiles[-1] == compiles[-8]
    assert not autoremat.report(model).fallbacks


class CutAfterABreak(Chain):
    """Its second graph has a slice that takes all rows, however many there are."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:6]:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        x = torch.cat([x[:, :16].sin(), x[:, 16:].cos()], 1)
        for layer in self.layers[6:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
@pytest.mark.thorough
def test_graphs_of_symbolic_sizes_are_compiled_again_as_they_were():
    """By then a guard bounds the sizes that they are planned for: that leaves no slice out."""

    def make() -> nn.Module:
        return CutAfterABreak(12)

    plain = make_seeded(make)
    budget = int(0.55 * measured(plain, (many_rows(),)))
    model = optimized(make, budget, strict=False)
    for count in (256, 256, 256, 192, 256, 224, 256, 192, 128):
        close(step(plain, (many_rows(count),)), step(model, (many_rows(count),)), 1e-5)
    report = autoremat.report(model)
    assert not report.fallbacks
    assert report.predicted_peak_nbytes <= budget


class Flattening(nn.Module):
    """Each layer gives its result the shape of its input, as GPT-2's `Conv1D` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = F.layer_norm(x, (WIDTH,))
            flat = torch.addmm(layer.bias, h.view(-1, WIDTH), layer.weight)
            x = x + torch.tanh(flat.view(h.shape))
        return x.square().mean()


@pytest.mark.thorough
def test_sizes_read_off_values_that_are_recomputed():
    """The backward's views need them: they are taken in the forward, not recomputed with it."""

    def run(budget: int) -> Any:
        model = optimized(Flattening, budget, time_limit=0.5)
        batch = sequences()
        torch._dynamo.mark_dynamic(batch, 0)
        model(batch).backward()
        return model

    reference = run(UNBOUNDED)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        run(autoremat.resident_nbytes(make_seeded(Flattening), sequences()))
    model = run(caught.value.smallest_peak_nbytes)
    assert recomputes(model) > 0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.thorough
def test_a_larger_batch_than_any_plan_fits():
    """It is refused before its step runs, and the smaller one still trains."""
    model = optimized(Chain, refusal(Chain, (many_rows(),)).smallest_peak_nbytes)
    step(model, (many_rows(),))
    model.zero_grad(set_to_none=True)
    with pytest.raises(autoremat.InfeasibleBudget):
        model(many_rows(4096))
    gc.collect()  # until then the error's frames hold the batch, which counts
    step(model, (many_rows(),))


@pytest.mark.thorough
def test_tensors_without_elements():
    """An empty batch, and an empty part of a batch."""

    class Joined(Chain):
        def forward(self, x: Tensor) -> Tensor:
            empty = torch.tanh(self.layers[1](x[:0]))
            return super().forward(torch.cat([torch.tanh(self.layers[0](x)), empty]))

    found = peaks(Joined, (many_rows(),))
    close(
        step(make_seeded(Joined), (many_rows(),)),
        step(optimized(Joined, found.smallest), (many_rows(),)),
        1e-6,
    )
    model = optimized(Chain, UNBOUNDED)
    (model(many_rows(0).view(0, WIDTH)).nan_to_num()).backward()


def test_parameters_frozen_and_thawed_between_steps():
    """Each set of trainable parameters has its own plan."""
    model, eager = optimized(Chain, UNBOUNDED), make_seeded(Chain)
    for frozen in (3, 0, 5):
        for m in (model, eager):
            for number, layer in enumerate(m.layers):
                layer.requires_grad_(number >= frozen)
        close(step(eager, (many_rows(),)), step(model, (many_rows(),)), 1e-6)


@pytest.mark.thorough
def test_autocast_around_an_optimised_model():
    """The plan of another precision is another plan."""
    model = optimized(Chain, UNBOUNDED)
    step(model, (many_rows(),))
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(many_rows())
    loss.backward()
    scalar(loss)
    assert all(p.grad is not None for p in model.parameters())


def test_one_models_batch_does_not_make_anothers_symbolic():
    """Dynamo remembers which sizes varied: per model, not for all that autoremat compiles."""
    one = autoremat.optimize(Chain(), UNBOUNDED, compiler="eager", verbose=False)
    other = autoremat.optimize(Chain(2), UNBOUNDED, compiler="eager", verbose=False)
    one(many_rows(8)).backward()
    other(many_rows(16)).backward()
    values = autoremat.report(other).values
    assert all(isinstance(size, int) for value in values for size in value.shape)
