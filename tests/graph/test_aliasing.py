"""Tensors that share memory: outputs, inputs, parameters and buffers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from tests.tiny import ROWS, WIDTH, Buffered, Dropout, Layers, rows
from tests.training import UNBOUNDED, gradients_hold, make_seeded, optimized


class ReturnsAliases(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.first(x))
        z = torch.tanh(self.second(torch.tanh(h)))
        return z, h, h.t(), x, x.view(-1), h[0], z.view(-1)


def test_outputs_that_alias_inputs_and_intermediates():
    """Views of the input, of one another and of values that the backward reads."""
    gradients_hold(ReturnsAliases, (rows(),))
    model = optimized(ReturnsAliases, UNBOUNDED)
    x = rows()
    z, h, transposed, same_x, flat_x, _, _ = model(x)
    assert same_x is x
    assert flat_x.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert transposed.untyped_storage()._cdata == h.untyped_storage()._cdata
    assert z.requires_grad


class Dictionary(Layers):
    def forward(self, x: Tensor) -> dict[str, object]:
        h = torch.tanh(self.first(x))
        z = torch.tanh(self.second(h))
        return {"loss": z.square().mean(), "h": h, "d": h.detach(), "n": 3, "none": None, "l": [z]}


def test_outputs_in_containers_keep_their_structure():
    """A dict with numbers, None, a list and detached tensors comes back as it is."""
    gradients_hold(Dictionary, (rows(),), loss_of=lambda output: output["loss"])
    output = optimized(Dictionary, UNBOUNDED)(rows())
    assert output["n"] == 3
    assert output["none"] is None
    assert not output["d"].requires_grad
    assert isinstance(output["l"], list)


@pytest.mark.thorough
def test_an_input_that_needs_a_gradient():
    """Its gradient is that of eager mode."""
    gradients_hold(Dropout, (rows().requires_grad_(),))


class OverwritesAlias(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.sin(self.first(x.clone()) + x)
        y.mul_(0.5)
        return torch.sin(self.second(torch.sin(h + y)) + x).square().mean()


# What both views look into is four rows more than the model is given.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("tight", [False, True])
def test_inputs_that_share_memory_of_which_one_is_overwritten(shift: int, tight: bool):
    """The same tensor twice, and two views that overlap: the other one sees the change."""

    def outcome(model: nn.Module) -> list[Tensor]:
        base = torch.randn(ROWS + 4, WIDTH, generator=torch.Generator().manual_seed(3))
        loss = model(base[:ROWS], base[shift : shift + ROWS])
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss.detach(), base, *found]

    budget = UNBOUNDED
    if tight:
        batch = torch.empty(ROWS + 4, WIDTH)
        resident = autoremat.resident_nbytes(OverwritesAlias(), batch)
        with pytest.raises(autoremat.InfeasibleBudget) as caught:
            outcome(optimized(OverwritesAlias, resident, time_limit=60.0))
        budget = caught.value.smallest_peak_nbytes
    ours = outcome(optimized(OverwritesAlias, budget, time_limit=60.0))
    torch.testing.assert_close(ours, outcome(make_seeded(OverwritesAlias)))


class TakesItsWeight(Layers):
    def forward(self, weight: Tensor, x: Tensor) -> Tensor:
        h = torch.sin(F.linear(x, weight) + self.first(x))
        return torch.sin(self.second(h)).square().mean()


def test_an_input_that_is_a_parameter():
    """Its gradient has the parts of both ways in."""
    found = []
    for model in (optimized(TakesItsWeight, UNBOUNDED), make_seeded(TakesItsWeight)):
        model(model.first.weight, rows()).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*found)


class Adds(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.first(torch.tanh(x + y))).square().mean()


def test_a_storage_is_charged_once():
    """Two views of one storage, and one tensor given twice."""
    weights = sum(parameter.nbytes for parameter in Adds().parameters())
    storage = torch.randn(2 * ROWS, WIDTH)
    for inputs, nbytes in (
        ((storage[:ROWS], storage[ROWS:]), storage.nbytes),
        ((storage, storage), storage.nbytes),
    ):
        model = optimized(Adds, UNBOUNDED)
        model(*inputs).backward()
        resident = autoremat.report(model).resident
        assert resident.parameters_nbytes + resident.batch_nbytes == weights + nbytes


class ReturnsState(Buffered):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.sin(self.first(x) + self.mean)
        self.mean.add_(1.0)
        loss = torch.sin(self.second(h)).square().mean()
        return loss, self.mean, self.first.weight, self.first.weight.t(), self.mean[:4], x[0]


def test_outputs_that_are_parameters_and_buffers():
    """The buffer comes back as the step left it; a loss may read the weight itself."""
    gradients_hold(
        ReturnsState,
        (rows(),),
        loss_of=lambda output: output[0] + output[2].square().sum(),
        time_limit=60.0,
    )


class WritesThroughViews(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).clone()
        h.view(-1)[:100].mul_(2).add_(1)
        h.t()[3].copy_(h.unbind(1)[0].clone())
        h[h > 1.5] = 0.0
        z = torch.empty_like(h).copy_(h.sin())
        z.scatter_(0, torch.zeros(1, WIDTH, dtype=torch.long), 1.0)
        return torch.tanh(self.second(z)).square().mean()


@pytest.mark.thorough
def test_writes_through_views():
    """Flat and transposed views, masks, copies and scatters of one storage."""
    gradients_hold(WritesThroughViews, (rows(),), time_limit=60.0)


class ReturnsPredictions(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.second(torch.sin(torch.tanh(self.first(x)))))


def test_an_output_that_the_user_overwrites():
    """In place, before the loss."""
    gradients_hold(
        ReturnsPredictions,
        (rows(),),
        loss_of=lambda output: output.mul_(2).square().mean(),
        time_limit=60.0,
    )
