"""Gradients that exist already, optimizers, and backward calls of every order."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoremat
import autoremat.session.session
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.session.residual_blocks import ResidualBlocks
from tests.tiny import WIDTH, Chain, Residual, many_rows, rows
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    optimized,
    peaks,
    recomputes,
    refusal,
    step,
    unbounded,
)

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.shares_plans,
]


# --- optimizers and gradients that exist -------------------------------------------------------


def test_optimizer_state_counts():
    """Adam's two moments are resident although they do not exist yet."""
    plain = optimized(Chain, UNBOUNDED)
    step(plain, (many_rows(),))
    torch._dynamo.reset()
    model = make_seeded(Chain)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    autoremat.optimize(model, UNBOUNDED, optimizer=optimizer, compiler="eager", verbose=False)
    step(model, (many_rows(),))
    moments = 2 * sum(p.nbytes for p in model.parameters())
    added = autoremat.report(model).resident_nbytes - autoremat.report(plain).resident_nbytes
    assert moments <= added <= moments + 64 * len(list(model.parameters()))
    assert not optimizer.state


def test_a_whole_training_step_keeps_the_budget():
    """zero_grad, forward, backward and Adam's step together, from the second step on."""

    def trained(budget: int) -> tuple[nn.Module, int]:
        torch._dynamo.reset()
        model = make_seeded(Chain)
        optimizer = torch.optim.Adam(model.parameters())
        autoremat.optimize(
            model, budget, optimizer=optimizer, compiler="eager", verbose=False, strict=True
        )
        batch = many_rows()

        def whole() -> None:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

        whole()
        optimizer.zero_grad()
        resident = resident_nbytes(model, batch, optimizer)
        return model, resident + measure_peak(whole, device="cpu")

    model, _ = trained(UNBOUNDED)
    budget = int(0.8 * autoremat.report(model).predicted_peak_nbytes)
    model, peak = trained(budget)
    assert recomputes(model) > 0
    assert peak <= budget


@pytest.mark.thorough
def test_accumulated_gradients():
    """Three backward passes add up to eager's gradients."""
    smallest = refusal(Chain, (many_rows(),)).smallest_peak_nbytes
    ours, eager = optimized(Chain, smallest), make_seeded(Chain)
    ours(many_rows()).backward()
    loss = ours(many_rows())  # gradients exist; they may still go before the backward
    with pytest.warns(autoremat.OverBudgetWarning) as told:  # they have stayed: two do not fit
        loss.backward()
    assert told[0].filename == __file__
    ours(many_rows()).backward()
    for _ in range(3):
        eager(many_rows()).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-7)


@pytest.mark.thorough
def test_accumulated_gradients_keep_the_budget():
    """The second micro-batch of a step, whose gradients exist, peaks within the budget too."""
    wide = lambda: Wide()  # noqa: E731
    found = peaks(wide, (many_rows(64),))
    model = optimized(wide, found.save_all)
    batch = many_rows(64)
    model(batch).backward()
    resident = resident_nbytes(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        peak = resident + measure_peak(lambda: model(batch).backward(), device="cpu")
    assert peak <= found.save_all or autoremat.report(model).predicted_peak_nbytes >= peak


class Accumulating(ResidualBlocks):
    """Its gradients leave a second plan no room for some of what the first one saves."""

    def __init__(self) -> None:
        super().__init__(32, 8)


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def accumulated(model: nn.Module, take: Callable[[Callable[[], object]], int]) -> list[int]:
    """What is taken of each of three backwards, the first of which finds no gradients."""
    model.zero_grad(set_to_none=True)
    return [resident_nbytes(model, X) + take(lambda: model(X).backward()) for _ in range(3)]


def accumulated_peak_nbytes(model: nn.Module) -> int:
    """Of a step after three others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(3):
            accumulated(model, lambda run: int(run() is not None))
    return max(accumulated(model, functools.partial(measure_peak, device="cpu")))


@pytest.mark.parametrize(
    ("share", "other"), [(0.6, "without gradients"), (0.65, "beside 271.5 kB of gradients")]
)
def test_of_two_plans_of_a_step_the_report_is_of_the_higher_one(share: float, other: str):
    """With or without gradients, whichever takes more; the other is named."""
    budget = int(share * accumulated_peak_nbytes(optimized(Accumulating, UNBOUNDED)))
    torch._dynamo.reset()
    model = optimized(Accumulating, budget)
    measured = accumulated_peak_nbytes(model)
    report = autoremat.report(model)
    assert measured == report.predicted_peak_nbytes <= budget
    assert len(report.otherwise) == 1
    assert other in report.otherwise[0]
    assert report.otherwise[0] in report.summary(width=200)


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_a_plan_that_no_step_runs_by_any_more_is_not_reported():
    """Gradients are zeroed in place: only the first step found none."""
    budget = int(0.65 * accumulated_peak_nbytes(optimized(Accumulating, UNBOUNDED)))
    torch._dynamo.reset()
    model = optimized(Accumulating, budget)
    for _ in range(4):
        model(X).backward()
        model.zero_grad(set_to_none=False)
    resident = resident_nbytes(model, X)
    measured = resident + measure_peak(lambda: model(X).backward(), device="cpu")
    report = autoremat.report(model)
    assert report.otherwise == ()
    assert measured == report.predicted_peak_nbytes <= budget


class Wide(nn.Module):
    """Gradients larger than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 512)
        self.b = nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x)))).square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("set_to_none", [True, False])
def test_existing_gradients_are_resident(set_to_none: bool):
    """Zeroed gradients that stay allocated count, and the peak with them is predicted."""
    model = make_seeded(Chain)
    model(many_rows()).backward()
    model.zero_grad(set_to_none=set_to_none)
    autoremat.optimize(model, UNBOUNDED, compiler="eager", verbose=False, strict=True)
    batch = many_rows()
    resident = resident_nbytes(model, batch)
    model(batch).backward()
    model.zero_grad(set_to_none=set_to_none)
    peak = resident + measure_peak(lambda: model(batch).backward(), device="cpu")
    report = autoremat.report(model)
    assert report.resident_nbytes == resident
    assert report.predicted_peak_nbytes == pytest.approx(peak, rel=0.02)


# --- unusual backward calls --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # the first frees nothing
def test_retain_graph():
    """A first backward that keeps the graph can be repeated."""
    model = optimized(Chain, refusal(Chain, (many_rows(),)).smallest_peak_nbytes)
    loss = model(many_rows())
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 2 * once[name])


class Widened(nn.Module):
    """A residual block, four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(nn.Module):
    """Eight of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Widened() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class DeepWithDropout(Deep):
    """And dropout between them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.2)
        return x.square().mean()


def two_backwards(model: nn.Module, x: Tensor) -> None:
    """Of one loss."""
    model.zero_grad(set_to_none=True)
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def peak_of_two(model: nn.Module, x: Tensor) -> int:
    """Measured in the third step."""
    for _ in range(3):
        two_backwards(model, x)
    model.zero_grad(set_to_none=True)
    return resident_nbytes(model, x) + measure_peak(lambda: two_backwards(model, x), device="cpu")


def test_what_a_kept_graph_keeps_decides_its_plan():
    """The leanest plan for one backward keeps more for a second one than one by segments."""
    x = many_rows(512)
    budget = int(0.53 * peak_of_two(make_seeded(Deep), x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        model = optimized(Deep, budget)
        assert peak_of_two(model, x) <= budget
    assert len(caught) == 1  # in the first step
    report = autoremat.report(model)
    assert report.predicted_peak_nbytes <= budget
    assert report.graphs[0].method.startswith("every")


def test_a_kept_graph_above_the_budget_is_told_of_for_good():
    """Not as something that the next step will mend."""
    x = many_rows(512)
    model = optimized(Deep, int(0.45 * peak_of_two(make_seeded(Deep), x)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        peak_of_two(model, x)
    first, second = (str(w.message) for w in caught)
    assert "From the next step on it is planned for that" in first
    assert "leaves too little" in second


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_a_kept_graph_is_searched_beside_what_crosses():
    """Leaner than every plan by segments, of which the leanest takes 1.15 times the budget."""
    x = many_rows(512)
    budget = int(0.45 * peak_of_two(make_seeded(Deep), x))
    model = optimized(Deep, budget)
    peak = peak_of_two(model, x)
    assert peak <= 1.03 * budget
    report = autoremat.report(model)
    assert peak == report.predicted_peak_nbytes
    assert "beside" in report.graphs[0].method


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_draws_are_the_same_in_every_backward_of_a_kept_graph():
    """Of a plan that makes dropout's masks again: each backward gives eager mode's gradients."""
    x = many_rows(512)
    plain = make_seeded(DeepWithDropout)
    model = optimized(DeepWithDropout, int(0.45 * peak_of_two(plain, x)), time_limit=1.0)
    peak_of_two(model, x)
    assert "beside" in autoremat.report(model).graphs[0].method
    assert recomputes(model)
    for each in (plain, model):
        torch.manual_seed(1)
        two_backwards(each, x)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_retain_graph_later_is_explained():
    """Once compiled to free saved values early, the backward refuses with the remedy."""
    model = optimized(Chain, UNBOUNDED)
    model(many_rows()).backward()
    with pytest.raises(RuntimeError, match=r"retain_graph.*donated_buffer=False"):
        model(many_rows()).backward(retain_graph=True)


def test_a_backward_of_the_backward_is_refused():
    """As under torch.compile: an error, not a wrong gradient; its note says what helps."""
    model = optimized(Chain, UNBOUNDED)
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(model(many_rows()), parameters[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward") as caught:
        gradient.square().sum().backward()
    assert "torch.func.grad" in "".join(caught.value.__notes__)


class Penalised(nn.Module):
    """The gradient of a chain's own result, and its square in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, rows: Tensor) -> Tensor:
        return torch.func.grad(lambda given: self.chain(given))(rows).square().sum()


def test_a_gradient_inside_the_forward_is_planned():
    """What the note of a refused backward of a backward asks for."""
    model = optimized(Penalised, UNBOUNDED)
    model(many_rows()).backward()
    plain = make_seeded(Penalised)
    plain(many_rows()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(autoremat.report(model).graphs) == 1


def test_gradients_dropped_between_forward_and_backward():
    """`loss = model(x); optimizer.zero_grad(); loss.backward()` is the order of many scripts."""
    budget = unbounded(Wide, (many_rows(64),)).predicted_peak_nbytes
    model = optimized(Wide, budget)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        for _ in range(3):
            loss = model(many_rows(64))
            model.zero_grad(set_to_none=True)
            loss.backward()
    assert not [w for w in seen if w.category is autoremat.OverBudgetWarning]


class BreaksFirst(Chain):
    """Something that Dynamo does not trace comes after the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = untraced(x)
        return super().forward(x)


@torch._dynamo.disable
def untraced(x: Tensor) -> Tensor:
    """Runs in eager mode between two graphs."""
    return torch.sin(x)


def test_no_budget_of_one_byte_is_accepted_with_a_graph_break():
    """The first graph does not fit: that is an error, whatever comes after it."""
    assert refusal(BreaksFirst, (many_rows(),)).smallest_peak_nbytes > many_rows().nbytes


def test_gradients_of_some_parameters_only():
    """`torch.autograd.grad` for one layer."""
    model, eager = optimized(Chain, UNBOUNDED), make_seeded(Chain)
    mine, theirs = (
        torch.autograd.grad(m(many_rows()), m.layers[2].weight)[0] for m in (model, eager)
    )
    assert torch.allclose(mine, theirs, atol=1e-7)


def test_gradients_that_the_user_keeps_after_they_are_reset():
    """They were there at one call and are still alive at the next, which finds none."""
    model, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    step(model, (rows(),))
    model(rows()).backward()
    kept = [p.grad for p in model.parameters()]
    close(step(eager, (rows(),)), step(model, (rows(),)), 1e-6)
    assert all(gradient is not None for gradient in kept)
