"""What training scripts do around a model: precision, adapters, optimizers, wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autoremat
from tests.tiny import WIDTH, Layers, Residual, rows, sequences
from tests.training import (
    UNBOUNDED,
    close,
    gradients_hold,
    make_seeded,
    optimized,
    recomputes,
    refusal,
    step,
)

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


# --- precision ---------------------------------------------------------------------------------


def scaled_training(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Three steps of two micro-batches: autocast, scaler, clipping, SGD; the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = model(rows()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # accumulated gradients
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_mixed_precision_with_clipping_and_accumulation(dtype: torch.dtype):
    """A whole loop with `GradScaler`: bitwise the same under the smallest budget."""
    with torch.autocast("cpu", dtype):
        smallest = refusal(Residual, (rows(),), time_limit=60.0).smallest_peak_nbytes
    model = optimized(Residual, smallest, time_limit=60.0)
    tight = scaled_training(model, dtype)
    assert recomputes(model) > 0
    loose = scaled_training(optimized(Residual, UNBOUNDED), dtype)
    assert all(torch.equal(a, b) for a, b in zip(tight, loose, strict=True))
    eager = scaled_training(make_seeded(Residual), dtype)
    torch.testing.assert_close(loose, eager, rtol=1e-2, atol=1e-2)


def test_a_scaler_skips_the_step_of_infinite_gradients():
    """And halves its scale, as in eager mode."""
    model = optimized(Residual, UNBOUNDED)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(model(1e3 * rows())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_half_precision(dtype: torch.dtype):
    """Weights, activations and gradients of 16 bits."""
    make = lambda: Residual().to(dtype)  # noqa: E731
    gradients_hold(make, (rows(dtype),), tolerance=3e-2, time_limit=60.0)


ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.softplus,
    F.mish,
    F.hardswish,
    F.hardsigmoid,
    F.hardtanh,
    F.elu,
    F.selu,
    F.celu,
    F.leaky_relu,
    F.relu6,
    F.logsigmoid,
    F.tanhshrink,
    F.softsign,
    F.softshrink,
    lambda x: F.glu(torch.cat([x, x.sin()], -1)),
    lambda x: F.prelu(x, torch.full((WIDTH,), 0.2, dtype=x.dtype)),
    lambda x: F.normalize(x, dim=-1),
)


@pytest.mark.thorough
def test_activation_functions():
    """Twenty of them in one model, in float64."""

    class Activated(Layers):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for activation in ACTIVATIONS:
                h = h + 0.1 * activation(self.second(h))
            return h.square().mean()

    x = rows(torch.float64)
    gradients_hold(lambda: Activated().double(), (x,), tolerance=1e-11, time_limit=60.0)


# --- adapters ----------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer and a trainable product of low rank, which can be merged into it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, WIDTH))
        self.up = nn.Parameter(0.1 * torch.randn(WIDTH, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.t()) @ self.up.t()

    @torch.no_grad()
    def merge(self) -> None:
        """Into the frozen weight, in place; the adapter starts anew."""
        self.base.weight.add_(self.up @ self.down)
        self.up.zero_()


class Adapted(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter(layer) for layer in self.layers)


def test_adapters_on_frozen_weights():
    """LoRA: gradients for the adapters only; after a merge in place the plan still holds."""
    smallest = refusal(Adapted, (rows(),), time_limit=60.0).smallest_peak_nbytes
    ours, eager = optimized(Adapted, smallest, time_limit=60.0), make_seeded(Adapted)
    for _ in range(2):
        close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
        assert ours.first.base.weight.grad is None
        for model in (ours, eager):
            for layer in model.layers:
                layer.merge()


class MovesFrozenWeights(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.base.weight.add_(0.01 * (layer.up @ layer.down))
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.thorough
def test_frozen_weights_that_the_forward_moves():
    """A parameter that the step itself overwrites is read as the forward read it."""

    def outcome(budget: int | None) -> list[Tensor]:
        model = make_seeded(MovesFrozenWeights)
        if budget is not None:
            model = optimized(MovesFrozenWeights, budget, time_limit=60.0)
        x = rows().requires_grad_()
        model(x).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [x.grad, *found, *(p.detach() for p in model.parameters())]

    inputs = (rows().requires_grad_(),)
    smallest = refusal(MovesFrozenWeights, inputs, time_limit=60.0).smallest_peak_nbytes
    loose, tight, eager = (outcome(budget) for budget in (UNBOUNDED, smallest, None))
    assert all(torch.equal(a, b) for a, b in zip(loose, tight, strict=True))
    torch.testing.assert_close(loose, eager)


# --- optimizers --------------------------------------------------------------------------------


def trained(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The parameters after three steps."""
    optimizers = list(optimizers)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(rows()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p),
    ],
    ids=["AdamW fused", "Adam foreach", "SGD fused", "Adagrad"],
)
def test_fused_and_foreach_optimizers(make: Optimizers):
    """Given to `optimize`, so that their state counts; three steps end as in eager mode."""
    ours, eager = make_seeded(Residual), make_seeded(Residual)
    optimizer = make(ours.parameters())
    autoremat.optimize(
        ours, UNBOUNDED, optimizer=optimizer, compiler="eager", strict=True, verbose=False
    )
    mine = trained(ours, [optimizer])
    theirs = trained(eager, [make(eager.parameters())])
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


class Tied(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.first.weight


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # their state
def test_tied_weights_that_two_optimizers_step():
    """Each takes the whole gradient of the weight that both hold."""

    def outcome(model: nn.Module) -> list[Tensor]:
        one = torch.optim.SGD(model.first.parameters(), 0.1)
        other = torch.optim.AdamW(model.layers[1:].parameters(), 0.01)
        return trained(model, [one, other])

    smallest = refusal(Tied, (rows(),), time_limit=60.0).smallest_peak_nbytes
    tight = outcome(optimized(Tied, smallest, time_limit=60.0))
    torch.testing.assert_close(tight, outcome(make_seeded(Tied)), rtol=1e-5, atol=1e-5)


def test_a_moving_average_of_an_optimised_model():
    """`AveragedModel` copies the model: the copy is plain, and it follows the original."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    averages = [AveragedModel(model) for model in (ours, eager)]
    for model, average in zip((ours, eager), averages, strict=True):
        trained(model, [torch.optim.SGD(model.parameters(), 0.1)])
        average.update_parameters(model)
    mine, theirs = (list(average.parameters()) for average in averages)
    torch.testing.assert_close(mine, theirs)
    assert torch.allclose(averages[0](rows()), averages[1](rows()))


# --- wrappers and calls of other kinds ---------------------------------------------------------


class InHalves(nn.Module):
    """Calls a module once for each half of the batch, as data-parallel wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.module(half) for half in x.chunk(2)]).mean()


def test_a_wrapper_that_calls_an_optimised_model_twice():
    """Both calls share one plan, and their gradients add up."""
    ours, eager = InHalves(optimized(Residual, UNBOUNDED)), InHalves(make_seeded(Residual))
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    assert len(autoremat.report(ours.module).graphs) == 1


def test_parameters_from_elsewhere():
    """`torch.func.functional_call`: gradients go to the tensors that stand in for parameters."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    found = []
    for model in (ours, eager):
        given = {n: (1.1 * p.detach()).requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, given, (rows(),)).backward()
        assert all(p.grad is None for p in model.parameters())
        found.append([value.grad for value in given.values()])
    torch.testing.assert_close(*found)
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: torch.func.grad(
        lambda given: torch.func.functional_call(model, given, (rows(),))
    )({n: p.detach() for n, p in model.named_parameters()}),
    "vmap": lambda model: torch.func.vmap(
        lambda x: torch.func.functional_call(model, {}, (x,)).detach()
    )(rows().view(4, -1, WIDTH)),
    "jvp": lambda model: torch.func.jvp(lambda x: model(x).detach(), (rows(),), (rows(),)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name: str):
    """Results are eager mode's, which is told once (AR112); the next step is planned."""
    ours, eager = optimized(Residual, UNBOUNDED, strict=False), make_seeded(Residual)
    with pytest.warns(autoremat.FallbackWarning, match="AR112") as told:
        found = [TRANSFORMS[name](ours) for _ in range(2)]
    assert len([w for w in told if isinstance(w.message, autoremat.FallbackWarning)]) == 1
    torch.testing.assert_close(found, 2 * [TRANSFORMS[name](eager)])
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    assert autoremat.report(ours).graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
def test_weights_that_are_results_of_operations():
    """Meta-learning: a second call of the model with its weights after one step."""

    def meta_gradients(model: nn.Module) -> list[Tensor]:
        weights = dict(model.named_parameters())
        loss = torch.func.functional_call(model, weights, (rows(),))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        stepped = {
            name: weight - 0.1 * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
        torch.func.functional_call(model, stepped, (rows(),)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    for _ in range(2):  # the second time finds gradients
        torch.testing.assert_close(meta_gradients(ours), meta_gradients(eager))
    assert not autoremat.report(ours).fallbacks


def test_a_compiled_submodule():
    """The whole model is planned, the part that the user compiled included."""

    def make() -> nn.Module:
        model = Residual()
        model.second.compile(backend="aot_eager")
        return model

    ours = optimized(make, UNBOUNDED)
    close(step(make_seeded(Residual), (rows(),)), step(ours, (rows(),)), 1e-6)
    assert len(autoremat.report(ours).graphs) == 1


def test_torch_compile_of_an_optimised_model():
    """The plan stays: what is compiled around it is a graph of its own."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    torch.compile(ours, backend="aot_eager")(rows()).backward()
    eager(rows()).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(autoremat.report(ours).graphs) == 1


class AroundResidual(Layers):
    """A model of which the user optimises a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ResidualPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sin(self.part(torch.sin(self.first(x))))).square().mean()


class ResidualPart(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(F.gelu(layer(x)))
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("around", [AroundResidual, lambda: nn.Sequential(ResidualPart())])
def test_torch_compile_around_an_optimised_part(around: Callable[[], nn.Module]):
    """The part keeps its plan; in eval mode it is one with the whole."""
    ours, eager = make_seeded(around), make_seeded(around)
    part = next(module for module in ours.modules() if isinstance(module, ResidualPart))
    autoremat.optimize(part, UNBOUNDED, compiler="eager", strict=True, verbose=False)
    compiled = torch.compile(ours, backend="aot_eager")
    compiled.eval()
    compiled(rows())
    with pytest.raises(ValueError, match="Nothing is planned"):
        autoremat.report(part)
    compiled.train()
    for _ in range(2):
        compiled(rows()).square().mean().backward()
        eager(rows()).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, atol=1e-6)
    assert len(autoremat.report(part).graphs) == 1


def test_a_whole_graph_around_an_optimised_part_is_refused():
    """`fullgraph=True` leaves no place for it: the error says what to do."""
    ours = make_seeded(AroundResidual)
    autoremat.optimize(ours.part, UNBOUNDED, compiler="eager", verbose=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Optimize the outer module instead"):
        torch.compile(ours, backend="aot_eager", fullgraph=True)(rows())


def test_an_optimised_part_of_an_optimised_model():
    """There is one plan for all of it."""
    ours, eager = optimized(AroundResidual, UNBOUNDED), make_seeded(AroundResidual)
    autoremat.optimize(ours.part, UNBOUNDED, compiler="eager", strict=True, verbose=False)
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    found = autoremat.report(ours)
    assert len(found.graphs) == 1
    assert autoremat.report(ours.part).graphs == found.graphs


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x)
        return self.norm(x + y).pow(3).mean() + weights.square().mean()


@pytest.mark.thorough
def test_multihead_attention_of_torch():
    """With dropout, and its attention weights returned."""
    gradients_hold(Attends, (sequences(),), tolerance=1e-4, time_limit=60.0)


class Differentiates(Layers):
    def forward(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.first(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_gradient_inside_the_model_is_right_or_refused():
    """A double backward over a compiled graph raises; it gives no other numbers."""
    model = optimized(Differentiates, UNBOUNDED, strict=False)
    with pytest.raises(RuntimeError, match="double backward"):
        step(model, (rows().requires_grad_(),))
