"""A random operation is drawn once: its recompute replays the draw, and two draws stay two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tiny import (
    ROWS,
    WIDTH,
    Dropout,
    Layers,
    rows,
    sequences,
)
from tests.training import (
    UNBOUNDED,
    gradients_hold,
    make_seeded,
    optimized,
    recomputes,
    step,
)


def test_dropout_masks_are_replayed():
    """The smallest plan draws masks again from the saved generator state."""
    gradients_hold(Dropout, (rows(),), shares=(0.0, 0.5))


@pytest.mark.thorough
def test_dropout_gradient_is_that_of_the_drawn_mask():
    """Under one seed a finite difference of the loss gives the gradient, so the masks agree."""
    make = lambda: Dropout().double()  # noqa: E731
    smallest = gradients_hold(make, (rows(torch.float64),), tolerance=1e-12).smallest
    model = optimized(make, smallest)
    outcome = step(model, (rows(torch.float64),), seed=7)
    assert recomputes(model) > 0
    weight = dict(model.named_parameters())["layers.0.weight"]
    with torch.no_grad():
        losses = []
        for shift in (1e-6, -1e-6):
            weight[2, 3] += shift
            torch.manual_seed(7)
            losses.append(float(model(rows(torch.float64))))
            weight[2, 3] -= shift
    difference = (losses[0] - losses[1]) / 2e-6
    gradient = outcome.gradients["layers.0.weight"]
    assert gradient is not None
    assert difference == pytest.approx(float(gradient[2, 3]), rel=1e-4)


class DropsInPlace(nn.Module):
    """Dropout in place on a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).t(), 0.5, inplace=True).square().mean()


def test_a_mask_on_a_transposed_value_is_the_one_of_torchs_own_graph():
    """There torch's graphs draw in another order than eager mode does, with or without us."""
    ours = step(optimized(DropsInPlace, UNBOUNDED), (rows(),))
    torch._dynamo.reset()
    traced = make_seeded(DropsInPlace)
    traced.compile(backend="aot_eager")
    assert torch.equal(ours.loss, step(traced, (rows(),)).loss)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # two steps are open at once
def test_interleaved_steps_keep_their_own_masks():
    """forward, forward, backward, backward: each backward replays the draw of its forward."""

    def gradients(budget: int, order: tuple[int, int]) -> list[Tensor]:
        model = optimized(Dropout, budget)
        torch.manual_seed(3)
        losses = [model(rows()), model(rows())]
        parameters = list(model.parameters())
        found: dict[int, list[Tensor]] = {}
        for which in order:
            found[which] = list(torch.autograd.grad(losses[which], parameters))
        return found[0] + found[1]

    smallest = gradients_hold(Dropout, (rows(),)).smallest
    reference = gradients(UNBOUNDED, (0, 1))
    for order in ((0, 1), (1, 0)):
        for mine, theirs in zip(gradients(smallest, order), reference, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.thorough
def test_a_backward_leaves_the_random_stream_alone():
    """What the user draws after a step is the same with recompute and without."""
    smallest = gradients_hold(Dropout, (rows(),)).smallest
    drawn = []
    for budget in (UNBOUNDED, smallest):
        step(optimized(Dropout, budget), (rows(),), seed=5)
        drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1])


class Noise(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + 0.1 * torch.randn_like(x))
            x = x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.rand(1)
            x = F.rrelu(x, training=True) + x[torch.randperm(ROWS)]
        return x.square().mean()


@pytest.mark.thorough
def test_other_random_operations_are_replayed_too():
    """Normal, uniform, Bernoulli, permutation, randomised ReLU."""
    gradients_hold(Noise, (rows(),))


DRAWS = {
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.4)),
    "rand_like": torch.rand_like,
    "dropout": lambda h: F.dropout(torch.ones_like(h), 0.3),
    "randn_like": torch.randn_like,
    "randint_like": lambda h: torch.randint_like(h, 5),
    "uniform_": lambda h: torch.empty_like(h).uniform_(),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "exponential_": lambda h: torch.empty_like(h).exponential_(),
    "geometric_": lambda h: torch.empty_like(h).geometric_(0.3),
    "log_normal_": lambda h: torch.empty_like(h).log_normal_(),
    "gumbel_softmax": lambda h: F.gumbel_softmax(torch.zeros_like(h)),
    "rrelu": lambda h: F.rrelu(-torch.ones_like(h), training=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWS)
def test_two_draws_stay_two_draws(name: str):
    """Equal calls of a random operator give different numbers, those of eager mode."""

    class DrawsTwice(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.first(x))
            return (h * DRAWS[name](h.detach()) + h.cos() * DRAWS[name](h.detach())).square().mean()

    gradients_hold(DrawsTwice, (rows(),), tolerance=1e-5)


class Attention(Layers):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(2, 3 * WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        for layer in self.layers:
            q, k, v = layer(x).view(batch, steps, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
            x = x + y.transpose(1, 2).reshape(batch, steps, width)
        return x.square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention(dropout: float):
    """Scaled dot-product attention, whose operator returns several results and may be random."""
    gradients_hold(lambda: Attention(dropout), (sequences(),))


@pytest.mark.thorough
def test_the_encoder_of_torch():
    """nn.TransformerEncoder in train mode: attention, LayerNorm and dropout together."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x).square().mean()

    gradients_hold(Encoder, (sequences(),), tolerance=1e-4)
