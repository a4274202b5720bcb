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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autoremat
from tests.training import (
    UNBOUNDED,
    gradients_hold,
    make_seeded,
    optimized,
    recomputes,
    same,
    scalar,
    step,
)

WIDTH = 32
ROWS = 64


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of 64 rows of 32 numbers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)


def sequences() -> Tensor:
    """A batch of 2 sequences of 16 steps."""
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    """A batch of 4 images of 8 channels."""
    return torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """A stack of linear layers for subclasses to wire."""

    def __init__(self, layers: int = 3, out: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, out) for _ in range(layers))

    @property
    def first(self) -> nn.Module:
        return self.layers[0]

    @property
    def second(self) -> nn.Module:
        return self.layers[1]


# --- random numbers ----------------------------------------------------------------------------


class Dropout(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.3)
        return x.square().mean()


def test_dropout_masks_are_replayed():
    """The smallest plan draws masks again from the saved generator state."""
    gradients_hold(Dropout, (rows(),), shares=(0.0, 0.5))


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


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention(dropout: float):
    """Scaled dot-product attention, whose operator returns several results and may be random."""
    gradients_hold(lambda: Attention(dropout), (sequences(),))


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


# --- buffers and mutation ----------------------------------------------------------------------


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


def test_a_batch_norm_in_eval_mode():
    """A frozen norm reads its buffers and leaves them as they are."""
    make = lambda: FrozenNorm().double()  # noqa: E731
    gradients_hold(make, (rows(torch.float64),), tolerance=1e-9)


class Buffered(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(2, WIDTH))


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


# --- aliases -----------------------------------------------------------------------------------


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


def test_an_input_that_needs_a_gradient():
    """Its gradient is that of eager mode."""
    gradients_hold(Dropout, (rows().requires_grad_(),))


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


def test_sparse_gradients():
    """An embedding with sparse gradients."""

    class Sparse(Layers):
        def __init__(self) -> None:
            super().__init__(1)
            self.embedding = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.tanh(self.first(torch.tanh(self.embedding(tokens)))).square().mean()

    gradients_hold(Sparse, (torch.arange(16) % 7,))


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


def test_operators_with_several_results():
    """LayerNorm, max with indices, variance with mean, chunks of one storage."""
    gradients_hold(SeveralResults, (rows(),))


class Cumulated(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).cumsum(0) / 10)
            x = x * x.softmax(-1).cumprod(-1) + x.logsumexp(-1, keepdim=True)
        return x.square().mean()


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


def test_routing_decisions_are_made_once():
    """Topk and sort are not computed again, what lies behind them is."""
    gradients_hold(Routed, (rows(),))


class OneHot(Layers):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.first(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, WIDTH) * weights[..., None]
        return torch.tanh(self.second(x) * mask.sum(1)).square().mean()


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


def test_complex_numbers():
    """Complex parameters and a Fourier transform."""
    gradients_hold(Complex, (rows(torch.complex64),))


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


# --- the user's own checkpoints ----------------------------------------------------------------


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return x.square().mean()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(F.dropout(torch.tanh(layer(x)), 0.2))


def test_checkpoint_regions_are_honoured():
    """What the user wants recomputed is recomputed, even without a budget to keep."""
    found = gradients_hold(Checkpointed, (rows(),))
    model = optimized(Checkpointed, UNBOUNDED)
    step(model, (rows(),))
    assert recomputes(model) > 0
    assert found.smallest <= found.save_all


class ReturnsCheckpointed(Checkpointed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(torch.tanh, self.first(x), use_reentrant=False)
        return torch.sin(self.second(torch.sin(h))).square().mean(), h


def test_a_checkpoint_region_whose_value_is_returned():
    """An output is alive anyway."""
    gradients_hold(ReturnsCheckpointed, (rows(),), loss_of=lambda output: output[0])


def policy(context: object, target: object, *args: object, **keywords: object) -> CheckpointPolicy:
    """Save matrix products, recompute everything else."""
    if target is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> object:
    return create_selective_checkpoint_contexts(policy)


class SelectivelyCheckpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False, context_fn=selective_contexts)
        return x.square().mean()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(layer(x)) * 2)


def test_selective_checkpoint_policies_are_honoured():
    """Matrix products that the policy saves are saved at every budget."""
    found = gradients_hold(SelectivelyCheckpointed, (rows(),))
    model = optimized(SelectivelyCheckpointed, found.smallest)
    step(model, (rows(),))
    actions = {v.action for v in autoremat.report(model).values if v.op == "addmm"}
    assert actions <= {"save", "free"}


# --- the same graph, called again --------------------------------------------------------------


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

    smallest = gradients_hold(Dropout, (rows(),)).smallest
    one, other = trained(UNBOUNDED), trained(smallest)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


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
