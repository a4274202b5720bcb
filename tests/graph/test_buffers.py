"""What the step overwrites changes once, and the backward sees what the forward read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny import (
    WIDTH,
    Buffered,
    Layers,
    rows,
)
from tests.training import (
    gradients_hold,
    optimized,
    recomputes,
    step,
)


class Normalised(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return x.square().mean()


def test_batch_norm_updates_its_statistics_once():
    """In float64, where batch norm's gradients can be told from rounding."""
    make = lambda: Normalised().double()  # noqa: E731
    found = gradients_hold(make, (rows(torch.float64),), tolerance=1e-9, shares=(0.0, 0.5))
    model = optimized(make, found.smallest)
    step(model, (rows(torch.float64),))
    assert recomputes(model) > 0
    assert model.norms[0].num_batches_tracked == 1


class OneNormTwice(Normalised):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norms[0]
        return torch.tanh(norm(self.second(torch.tanh(norm(self.first(x)))))).square().mean()


@pytest.mark.thorough
def test_one_batch_norm_used_twice():
    """The second use starts from the statistics that the first one left."""
    make = lambda: OneNormTwice().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-9)


class ReadsStatistics(Normalised):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norms[0]
        h = torch.tanh(norm(self.first(x)) + norm.running_mean)
        return torch.tanh(self.second(h)).square().mean()


def test_running_statistics_that_the_model_reads():
    """The model itself reads the running mean right after the norm has updated it."""
    make = lambda: ReadsStatistics().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-9)


class FrozenNorm(Normalised):
    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norms[0].eval()
        return self


@pytest.mark.thorough
def test_a_batch_norm_in_eval_mode():
    """A frozen norm reads its buffers and leaves them as they are."""
    make = lambda: FrozenNorm().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-9)


class UsedBeforeAndAfterUpdate(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x) + self.mean)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        h = torch.sin(self.second(h) + self.mean)
        self.mean = self.mean * 2
        return torch.sin(h + self.mean.exp()).square().mean()


class OldValueKept(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        old = self.mean.clone()
        h = torch.sin(self.first(x) * old)
        self.mean.zero_()
        return torch.sin(self.second(h) * old).square().mean()


class ViewsOfBuffer(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        row = self.table[0]
        h = torch.sin(self.first(x) + row)
        self.table[0].add_(0.5)
        h = torch.sin(self.second(h) + row + self.table[1])
        self.table[1] = h.detach().mean(0)
        return torch.sin(h + self.table[1]).square().mean()


class Codebook(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        nearest = torch.cdist(h.detach(), self.table).argmin(-1)
        code = self.table[nearest]
        self.table.index_add_(0, nearest, 0.01 * h.detach())
        h = h + (code - h).detach()
        return torch.tanh(self.second(h) + self.table[nearest]).square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [UsedBeforeAndAfterUpdate, OldValueKept, ViewsOfBuffer, Codebook],
    ids=lambda m: m.__name__,
)
def test_buffers_that_the_step_overwrites(make: type[nn.Module]):
    """Nothing is computed again from a buffer that has changed since; each changes once."""
    gradients_hold(make, (rows(),), shares=(0.0, 0.5))


class OverwritesInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x.clone()) + x)
        x.add_(1.0)
        h = torch.sin(self.second(h + x))
        x.view(-1)[:5].zero_()
        return torch.sin(h + x).square().mean()


@pytest.mark.thorough
def test_an_input_that_the_step_overwrites():
    """The caller sees the new input, the backward the old one."""
    gradients_hold(OverwritesInput, (rows(),), shares=(0.0, 0.5))


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x).relu_()
            x = x + y
            x[:, :4].add_(2.0)
        return x.square().mean()


@pytest.mark.thorough
def test_in_place_operations():
    """Operations that write into intermediates, through views as well."""
    gradients_hold(InPlace, (rows(),))


class WritesConstant(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).clone()
        h[0] = 1.0
        return torch.tanh(self.second(h)).square().mean()


def test_a_constant_of_the_graph():
    """Writing a Python number into a slice puts a constant tensor into the graph."""
    gradients_hold(WritesConstant, (rows(),))


class AveragesWeights(Buffered):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.first.weight, 0.1)
        h = torch.tanh(x @ self.average.t().clone())
        return torch.tanh(self.first(h)).square().mean()


def test_a_moving_average_of_weights():
    """A buffer that is updated from a parameter and then used."""
    gradients_hold(AveragesWeights, (rows(),))


@pytest.mark.thorough
def test_reparametrised_weights():
    """Spectral norm updates its vectors once per call; weight norm recomputes its weight."""

    class Reparametrised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parametrizations = nn.utils.parametrizations
            self.a = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
            self.b = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(x)))).square().mean()

    gradients_hold(Reparametrised, (rows(),), tolerance=1e-4)


# --- updates in the backward --------------------------------------------------------------------


class CountsGradients(torch.autograd.Function):
    """Its backward adds to a buffer what it has seen."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.buffer.add_(gradient.abs().mean())
        return gradient * x.cos(), None


class ScalesByBuffer(torch.autograd.Function):
    """Its backward changes the buffer and then reads it."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * buffer

    @staticmethod
    def backward(ctx, gradient):
        ctx.buffer.add_(1.0)
        return gradient * ctx.buffer, None


class UpdatesInBoth(torch.autograd.Function):
    """Both passes change the buffer."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        buffer.mul_(0.9)
        return x.sin() * buffer

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.buffer.add_(1.0)
        return gradient * x.cos() * 0.9, None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "calls"),
    [(CountsGradients, 2), (ScalesByBuffer, 2), (UpdatesInBoth, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_buffer_that_the_backward_updates(function: type[torch.autograd.Function], calls: int):
    """As often as the backward runs, from the value that the forward left."""

    class Updates(Buffered):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:calls]:
                x = function.apply(torch.tanh(layer(x)), self.mean)
            return torch.sin(x).square().mean()

    gradients_hold(Updates, (rows(),), time_limit=60.0)
