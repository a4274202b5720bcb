"""A budget changes when values are made, never what the step computes.

Each test trains a tiny model one step without a budget and at the smallest one, which recomputes
the most: losses, gradients, buffers and overwritten inputs must be equal bit for bit, and close to
those of eager mode.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from tests.tiny import (
    WIDTH,
    Dropout,
    Layers,
    images,
    rows,
)
from tests.training import (
    UNBOUNDED,
    gradients_hold,
    make_seeded,
    optimized,
    recomputes,
    refusal,
    same,
    scalar,
    step,
)

# --- parameters --------------------------------------------------------------------------------


class TiedLanguageModel(Layers):
    def __init__(self) -> None:
        super().__init__(2)
        self.embedding = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def test_tied_weights_embedding_and_cross_entropy():
    """The gradient of a weight used twice is the sum of both."""
    gradients_hold(TiedLanguageModel, (torch.arange(32).view(2, 16) % 20,))


class OneLayerManyTimes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + F.silu(self.first(x))
        return x.square().mean()


def test_one_layer_used_many_times():
    """Parameters that no path uses get no gradient, the used one gets all its parts."""
    gradients_hold(OneLayerManyTimes, (rows(),))


class PartlyFrozen(Layers):
    def __init__(self) -> None:
        super().__init__(4)
        for layer in self.layers[1:3]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_frozen_parts():
    """Layers in the middle need no gradient, those around them do."""
    gradients_hold(PartlyFrozen, (rows(),))


class PartlyWithoutGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.tanh(self.second(x))
        h = torch.tanh(self.first(x)) * target
        return (torch.tanh(self.second(h)) - target).square().mean()


def test_a_part_under_no_grad():
    """Values made under no_grad are constants for the backward."""
    gradients_hold(PartlyWithoutGradient, (rows(),))


class SparseEmbedding(Layers):
    def __init__(self) -> None:
        super().__init__(1)
        self.embedding = nn.Embedding(20, WIDTH, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.first(torch.tanh(self.embedding(tokens)))).square().mean()


def test_sparse_gradients():
    """An embedding with sparse gradients."""
    gradients_hold(SparseEmbedding, (torch.arange(16) % 7,))


def test_sparse_gradients_accumulate():
    """A step that adds to a sparse gradient, whose bytes are those of its indices and values."""
    tokens = torch.arange(16) % 7
    ours, eager = optimized(SparseEmbedding, UNBOUNDED), make_seeded(SparseEmbedding)
    for model in (ours, eager):
        for _ in range(3):
            model(tokens).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert mine.grad.is_sparse == theirs.grad.is_sparse
        assert torch.allclose(mine.grad.to_dense(), theirs.grad.to_dense())


# --- operators ---------------------------------------------------------------------------------


class SeveralResults(Layers):
    def __init__(self) -> None:
        super().__init__(2, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            a, b, c = layer(x).chunk(3, -1)
            largest, _ = torch.max(a, -1, keepdim=True)
            variance, mean = torch.var_mean(b, -1, keepdim=True)
            x = self.norm(x + a * b.sigmoid() + c * largest + mean * variance.sqrt())
        return x.square().mean()


@pytest.mark.thorough
def test_operators_with_several_results():
    """LayerNorm, max with indices, variance with mean, chunks of one storage."""
    gradients_hold(SeveralResults, (rows(),))


class Cumulated(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).cumsum(0) / 10)
            x = x * x.softmax(-1).cumprod(-1) + x.logsumexp(-1, keepdim=True)
        return x.square().mean()


@pytest.mark.thorough
def test_cumulative_sums_and_softmax():
    """Scans along rows and columns."""
    gradients_hold(Cumulated, (rows(),))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.relu(norm(convolution(x)))
        return F.max_pool2d(x, 2).square().mean()


@pytest.mark.thorough
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_in_both_memory_formats(memory_format: torch.memory_format):
    """Strides of recomputed values are those of the first run."""
    make = lambda: Convolutions().to(memory_format=memory_format)  # noqa: E731
    gradients_hold(make, (images().to(memory_format=memory_format),))


class Routed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        ordered, _ = x.sort(-1)
        mixed = 0.1 * ordered
        for number, expert in enumerate(self.layers):
            share = ((chosen == number) * weights).sum(-1, keepdim=True)
            mixed = mixed + torch.tanh(expert(x)) * share
        return mixed.square().mean()


@pytest.mark.thorough
def test_routing_decisions_are_made_once():
    """Topk and sort are not computed again, what lies behind them is."""
    gradients_hold(Routed, (rows(),))


class OneHot(Layers):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.first(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, WIDTH) * weights[..., None]
        return torch.tanh(self.second(x) * mask.sum(1)).square().mean()


@pytest.mark.thorough
def test_assertions_run_once():
    """`one_hot` asserts its range, and the backward has its input: it does not assert it again."""
    gradients_hold(OneHot, (rows(),))


class Selects(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        chosen = (h[:, 0] > 0).nonzero().squeeze(1)
        return h.index_add(0, chosen, torch.tanh(self.second(h[chosen]))).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_shapes_that_depend_on_data():
    """`nonzero` breaks the graph: both parts are planned and the gradients stay right."""
    for budget in (UNBOUNDED, 60_000):
        model = optimized(Selects, budget, strict=False)
        if budget < UNBOUNDED:
            with pytest.warns(autoremat.OverBudgetWarning):
                ours = step(model, (rows(),))
        else:
            ours = step(model, (rows(),))
        eager = step(make_seeded(Selects), (rows(),))
        assert torch.allclose(ours.loss, eager.loss)
        for name, gradient in eager.gradients.items():
            if gradient is not None:
                assert torch.allclose(ours.gradients[name], gradient, atol=1e-6)
        assert len(autoremat.report(model).graphs) == 2


def test_shapes_that_depend_on_data_in_one_graph():
    """With Dynamo told to capture `nonzero`, its result has a symbolic size."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gradients_hold(Selects, (rows(),), shares=(0.0, 0.5))


class Square(torch.autograd.Function):
    """Its backward is wrong on purpose, so that it is told from the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * gradient * x


class OwnFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(Square.apply(layer(x)))
        return x.square().mean()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_custom_autograd_function():
    """The user's backward runs, not the derivative of the user's forward."""
    gradients_hold(OwnFunction, (rows(),))


@torch.library.custom_op("autoremat_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    """An operator that counts its runs."""
    sine_runs.append(1)
    return x.sin()


sine_runs: list[int] = []


@sine.register_fake
def _(x):
    return torch.empty_like(x)


sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class OwnOperator(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(sine(layer(x)))
        return x.square().mean()


def test_a_custom_operator_runs_once():
    """Nobody knows whether it is repeatable, so its result is kept; the rest is recomputed."""
    smallest = gradients_hold(OwnOperator, (rows(),)).smallest
    model = optimized(OwnOperator, smallest)
    step(model, (rows(),))
    assert recomputes(model) > 0
    sine_runs.clear()
    step(model, (rows(),))
    assert len(sine_runs) == len(model.layers)


class MixedPrecision(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = x + F.gelu(layer(x))
        return x.float().square().mean()


def test_autocast():
    """Casts to bfloat16 are operations like any other."""
    gradients_hold(MixedPrecision, (rows(),), tolerance=1e-2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8 for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(torch.fft.fft(x @ weight) / 8)
        return x.abs().square().mean()


@pytest.mark.thorough
def test_complex_numbers():
    """Complex parameters and a Fourier transform."""
    gradients_hold(Complex, (rows(torch.complex64),))


@pytest.mark.thorough
def test_double_precision():
    """float64 throughout agrees with eager mode to rounding."""
    make = lambda: Dropout().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-12)


class Decompositions(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        gram = h.t() @ h + torch.eye(WIDTH, dtype=h.dtype)
        lower = torch.linalg.cholesky(gram)
        solved = torch.linalg.solve(gram, h.t())
        return lower.diagonal().log().sum() + solved.square().mean() + torch.logdet(gram)


@pytest.mark.thorough
def test_linear_algebra():
    """Factorisations, whose operators return several results that the backward reads."""
    make = lambda: Decompositions().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-9)


def test_a_hook_on_a_tensor():
    """A hook scales the gradient that passes through an intermediate."""

    class Hooked(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            h.register_hook(lambda gradient: 2 * gradient)
            return torch.tanh(self.second(h)).square().mean()

    gradients_hold(Hooked, (rows(),))


class Branches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.cond(
            h.sum() > 0,
            lambda value: torch.tanh(self.second(value)),
            lambda value: torch.sin(self.second(value)),
            (h,),
        )
        return torch.tanh(self.first(h)).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_higher_order_operator():
    """torch.cond is one operation that runs once; around it values are recomputed."""
    gradients_hold(Branches, (rows(),))


# --- the same graph, called again --------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # momentum was not given
def test_every_step_of_a_training_run_is_the_same():
    """Three SGD steps with dropout end at the same parameters, bit for bit."""

    def trained(budget: int) -> nn.Module:
        model = optimized(Dropout, budget)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            scalar(model(rows())).backward()
            optimizer.step()
        return model

    smallest = refusal(Dropout, (rows(),)).smallest_peak_nbytes
    one, other = trained(UNBOUNDED), trained(smallest)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.thorough
def test_the_same_problem_gives_the_same_plan():
    """Two models of one seed, planned apart, save and recompute the same values."""
    smallest = gradients_hold(Dropout, (rows(),)).smallest
    plans = []
    for _ in range(2):
        model = optimized(Dropout, smallest)
        outcome = step(model, (rows(),))
        plans.append([(v.name, v.action, v.recomputes) for v in autoremat.report(model).values])
    assert plans[0] == plans[1]
    same(outcome, step(model, (rows(),)))
