"""What looks into a step's memory neither changes training nor stands in its way."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.memory.meter import state_of
from autoremat.watch.ledger import _books, open_runs, returned_storages
from tests.tiny import Chain, many_rows
from tests.training import UNBOUNDED, make_seeded, optimized
from tests.watch.test_ledger import CPU, Step, told, whole_peak

BATCH = many_rows()


class Scores(Chain):
    """Returns what a loss is taken of."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_backward_of_something_else_while_a_loss_of_the_past_is_kept():
    """Its run is over: nobody has to be told of that backward."""
    model = optimized(Chain, UNBOUNDED)
    loss = model(BATCH)
    loss.backward()
    other = make_seeded(Chain)
    other(BATCH).backward()
    assert other.layers[0].weight.grad is not None


def test_a_loss_outlives_its_model():
    """Autograd's graph holds the parameters."""
    model = optimized(Scores, UNBOUNDED)
    loss, weight = model(BATCH).square().mean(), model.layers[0].weight
    del model
    gc.collect()
    loss.backward()
    assert weight.grad is not None


def test_hooks_unpack_as_often_as_without_us():
    """A look takes what they have packed as it is: some can be unpacked once only."""

    def unpacked(model: nn.Module) -> int:
        calls = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: calls.append(1) or x):
            loss = model(BATCH).sin().exp().mean()
        loss.backward()
        return len(calls)

    model = optimized(Scores, UNBOUNDED)
    assert len({unpacked(model) for _ in range(4)}) == 1


def test_a_checkpoint_outside_recomputes_once():
    """Reading what it saved would run it again."""
    calls = []

    def outside(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(torch.sin(x).exp())

    model = optimized(Scores, UNBOUNDED)
    checkpoint(outside, model(BATCH), use_reentrant=False).mean().backward()
    assert len(calls) == 2


def test_functions_of_users_may_keep_what_they_like():
    """Also under the name that autograd has for the parameter of a node."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.variable = 3
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    model = optimized(Scores, UNBOUNDED)
    Doubled.apply(model(BATCH)).mean().backward()
    assert model.layers[0].weight.grad is not None


@pytest.mark.thorough
def test_an_optimizer_whose_state_grows_with_each_step_is_told_of():
    """LBFGS keeps the directions of its latest steps in lists, for the first parameter."""
    batch = BATCH
    budget = whole_peak(make_seeded(Chain), lambda m: m(batch).backward(), batch)
    model = optimized(Chain, budget)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=8)

    def loss() -> Tensor:
        lbfgs.zero_grad()
        found = model(batch)
        found.backward()
        return found

    found = told(model, lambda _: lbfgs.step(loss), 12)
    state_nbytes = sum(tensor.nbytes for tensor in state_of([lbfgs]))
    measured = state_nbytes + whole_peak(model, lambda m: m(batch).backward(), batch)
    assert max(over.predicted_nbytes for over in found) == pytest.approx(measured, rel=0.02)


def test_losses_that_are_kept_cost_nothing_per_step():
    """And those that are gone leave nothing behind."""
    model = optimized(Chain, UNBOUNDED)
    kept = [torch.zeros(())]
    for number in range(200):
        loss = model(BATCH)
        loss.backward()
        kept += [loss.detach()] if number % 20 == 0 else []
    assert len(_books.returned) <= 3 * 64
    assert sum(nbytes for _, nbytes in returned_storages(CPU)) <= loss.nbytes * len(kept)


def two_calls(model: nn.Module) -> None:
    """Two calls before one backward."""
    (model(BATCH) + model(BATCH)).backward()


def loss_outside(model: nn.Module, batch: Tensor = BATCH) -> None:
    """Saves more than the model does."""
    classes = torch.zeros(len(batch), dtype=torch.long)
    F.cross_entropy(model(batch).repeat(1, 8), classes).backward()


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "take"), [(Chain, two_calls), (Scores, loss_outside)])
def test_a_warning_as_an_error_ends_one_step_only(make: type[nn.Module], take: Step):
    """The error holds no graph: the next step is planned anew, and trains."""
    plain = make_seeded(make)
    budget = int(0.93 * whole_peak(plain, take, BATCH))
    model = optimized(make, budget)
    gc.disable()
    try:
        with pytest.raises(autoremat.OverBudgetWarning):
            take(model)
        assert not open_runs(CPU)
    finally:
        gc.enable()
    assert not told(model, take)
    assert whole_peak(model, take, BATCH) <= budget
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


@pytest.mark.thorough
def test_backwards_of_other_models_do_not_use_up_the_looks():
    """Of two losses that end alike, each is looked into."""
    other = make_seeded(Chain)

    def take(model: nn.Module) -> None:
        loss = model(BATCH).repeat(1, 8).exp().sin().mean()
        for _ in range(3):
            other(BATCH).mean().backward()
        loss.backward()

    highest = whole_peak(make_seeded(Scores), take, BATCH)
    model = optimized(Scores, int(0.9 * highest))
    assert told(model, take)


@pytest.mark.thorough
def test_a_loss_taken_in_chunks_of_a_detached_copy_is_told_of():
    """Its backwards reach no planned graph, while one waits for its own."""

    def take(model: nn.Module) -> None:
        scores = model(BATCH)
        copy = scores.detach().requires_grad_()
        for chunk in copy.chunk(4):
            F.cross_entropy(chunk.repeat(1, 16), torch.zeros(64, dtype=torch.long)).backward()
        scores.backward(copy.grad)

    highest = whole_peak(make_seeded(Scores), take, BATCH)
    model = optimized(Scores, int(0.9 * highest))
    found = told(model, take)
    assert max(over.predicted_nbytes for over in found) == pytest.approx(highest, rel=0.1)


def test_code_outside_may_make_ragged_tensors():
    """Their gradients' sizes are not known before."""
    model = optimized(Scores, UNBOUNDED)
    ragged = torch.nested.nested_tensor_from_jagged(model(BATCH), torch.tensor([0, 3, 256]))
    (ragged * 2).sin().values().mean().backward()
    assert model.layers[0].weight.grad is not None


def three_calls(model: nn.Module, batch: Tensor) -> None:
    """Three calls before one backward."""
    (model(batch) + model(batch) + model(batch)).backward()


@pytest.mark.thorough
def test_a_larger_batch_is_looked_into_again():
    """Code with symbolic sizes runs it, and what is around grows with it: told."""
    large = many_rows(1024)
    budget = int(0.75 * whole_peak(make_seeded(Scores), lambda m: loss_outside(m, large), large))
    model = optimized(Scores, budget, time_limit=1)
    for count in (64, 96, 160):
        assert not told(model, lambda m, n=count: loss_outside(m, many_rows(n)))
    found = told(model, lambda m: loss_outside(m, large))
    measured = whole_peak(model, lambda m: loss_outside(m, large), large)
    highest = max(found, key=lambda over: over.predicted_nbytes)
    assert budget < measured <= highest.predicted_nbytes <= 1.1 * measured
    assert not highest.is_planned_anew


@pytest.mark.thorough
def test_a_larger_batch_of_several_calls_is_planned_anew():
    """The step that finds out is told of; the next one keeps the budget."""
    large = many_rows(1024)
    budget = int(0.75 * whole_peak(make_seeded(Chain), lambda m: three_calls(m, large), large))
    model = optimized(Chain, budget, time_limit=1)
    for count in (64, 96, 160):
        assert not told(model, lambda m, n=count: three_calls(m, many_rows(n)))
    found = told(model, lambda m: three_calls(m, large))
    assert all(over.is_planned_anew for over in found)
    assert not told(model, lambda m: three_calls(m, large))
    assert whole_peak(model, lambda m: three_calls(m, large), large) <= budget
