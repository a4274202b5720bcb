"""The default compiler: generated code keeps the budget, and its peak was known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
import autoremat.backend
from autoremat.inductor.hook import configured
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    measured,
    optimized,
    recomputes,
    refusal,
    same,
    step,
)

pytestmark = pytest.mark.inductor

WIDTH = 32
TAIL_VECTORS = "cpp.enable_loop_tail_vec"


class Chain(nn.Module):
    """Layers of `tanh(linear)`."""

    depth = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Encoder(nn.Module):
    """One BERT-like layer with dropout, embeddings tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embedding(tokens), 0.1)
        batch, steps, _ = x.shape
        q, k, v = self.project(x).view(batch, steps, 3, 2, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.norms[0](x + F.dropout(y, 0.1))
        x = self.norms[1](x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))
        return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


class Normalised(nn.Module):
    """Convolutions with BatchNorm, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + torch.relu(norm(convolution(x)))
        return x.square().mean()


def rows() -> Tensor:
    """A batch of 512 rows."""
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    """A batch of 8 sequences of 64 tokens."""
    return torch.randint(50, (8, 64), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    """A batch of 4 images of 8 channels, in float64."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 8, 16, 16, generator=generator, dtype=torch.float64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "batch", "tolerance"),
    [(Chain, rows, 0.0), (Encoder, tokens, 1e-6), (Normalised, images, 1e-12)],
    ids=["chain", "encoder", "batch norm"],
)
def test_the_smallest_budget_is_kept(
    make: Callable[[], nn.Module], batch: Callable[[], Tensor], tolerance: float
):
    """Measured within the budget and within 5 % of the prediction; gradients and buffers stay.

    The reference is the same code without a budget: it draws the same dropout masks.
    """
    inputs = (batch(),)
    unbounded = optimized(make, UNBOUNDED, compiler="inductor")
    reference = step(unbounded, inputs)
    highest = measured(unbounded, inputs)
    predicted = autoremat.report(unbounded).predicted_peak_nbytes
    assert predicted == pytest.approx(highest, rel=0.05)
    smallest = refusal(make, inputs, compiler="inductor").smallest_peak_nbytes
    model = optimized(make, smallest, compiler="inductor")
    ours = step(model, inputs)
    peak = measured(model, inputs)
    report = autoremat.report(model)
    assert peak <= smallest < highest
    assert report.predicted_peak_nbytes == pytest.approx(peak, rel=0.05)
    assert recomputes(model) > 0
    if tolerance:
        close(reference, ours, tolerance)
    else:
        same(reference, ours)


def test_gradients_are_those_of_eager_mode():
    """Without random numbers the two can be compared."""
    ours = step(optimized(Chain, UNBOUNDED, compiler="inductor"), (rows(),))
    close(step(make_seeded(Chain), (rows(),)), ours, 1e-5)


def test_with_room_torchs_own_partition_is_taken():
    """Nothing is faster than plain torch.compile where memory does not bind."""
    model = optimized(Chain, UNBOUNDED, compiler="inductor")
    step(model, (rows(),))
    report = autoremat.report(model)
    assert report.method == "torch's own partitioner"
    (graph,) = report.graphs
    assert graph.timeline is not None
    assert graph.timeline.peak_nbytes == graph.modelled_peak_nbytes
    fused = [value for value in report.values if value.reason.startswith("computed inside")]
    assert fused
    assert not any(value.time_us or value.action == "save" for value in fused)


class WideDropout(nn.Module):
    """Its masks are most of what there is to write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x).tanh(), 0.2)).square().mean()


def test_masks_that_are_slow_to_write_are_drawn_again_though_there_is_room():
    """On a processor, where Inductor's vectors write bools one by one; by what the code takes."""
    report = autoremat.plan(WideDropout(), torch.randn(512, WIDTH), budget=UNBOUNDED, verbose=False)
    assert report.method != "torch's own partitioner"
    assert report.code_times_us is not None
    torchs_us, ours_us = report.code_times_us
    assert ours_us < torchs_us


class StochasticDepth(nn.Module):
    """Drops whole rows: its masks are next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 1024), nn.Linear(1024, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones(len(x), 1), 0.2)
        return self.second(self.first(x).tanh() * kept).square().mean()


def test_masks_that_are_small_are_torchs():
    """Nothing is searched for."""
    report = autoremat.plan(
        StochasticDepth(), torch.randn(512, WIDTH), budget=UNBOUNDED, verbose=False
    )
    assert report.method == "torch's own partitioner"


class Pooled(nn.Module):
    """An average over steps, whose gradient Inductor writes into a view of other dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.pool = nn.Linear(WIDTH, WIDTH), nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.tanh(self.project(x)).transpose(1, 2)
        return self.pool(steps).flatten(1).square().mean()


def test_what_is_written_into_a_view_of_other_dimensions_has_a_size():
    """Swin was left to torch's partitioner for it (`strict` makes that an error)."""
    x = torch.randn(2, 9, WIDTH)
    ours = step(optimized(Pooled, UNBOUNDED, compiler="inductor", strict=True), (x,))
    close(step(make_seeded(Pooled), (x,)), ours, 1e-5)


@pytest.mark.thorough
def test_dropout_gradient_is_that_of_the_drawn_mask():
    """A finite difference under one seed, at a budget that recomputes masks."""

    class Dropping(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:3]:
                x = F.dropout(torch.tanh(layer(x)), 0.3)
            return x.square().mean()

    inputs = (rows()[:64].double(),)
    smallest = refusal(Dropping, inputs, compiler="inductor").smallest_peak_nbytes
    model = optimized(Dropping, smallest, compiler="inductor")
    gradient = step(model, inputs, seed=7).gradients["layers.0.weight"]
    assert gradient is not None
    model.zero_grad(set_to_none=True)
    weight = model.layers[0].weight
    losses = []
    with torch.no_grad():
        for shift in (1e-5, -1e-5):
            weight[2, 3] += shift
            with torch.enable_grad():  # without gradients the model would run in eager mode
                torch.manual_seed(7)
                losses.append(float(model(*inputs).detach()))
            weight[2, 3] -= shift
    difference = (losses[0] - losses[1]) / 2e-5
    assert difference == pytest.approx(float(gradient[2, 3]), rel=1e-3)


# --- torch.compile(backend="autoremat") --------------------------------------------------------


class ShortChain(Chain):
    depth = 3


def compiled(budget: Any, **options: Any) -> Callable[..., Any]:
    """A seeded chain behind the backend, called as the entry point would be."""
    torch._dynamo.reset()
    given = {"budget": budget, "verbose": False, "strict": True, **options}
    backend = autoremat.backend.autoremat
    return torch.compile(make_seeded(ShortChain), backend=backend, options=given)


def test_the_backend_takes_a_budget_and_options_of_inductor(monkeypatch):
    """What is not ours is passed on to Inductor's configuration."""
    seen: list[dict[str, Any]] = []
    original = autoremat.backend.Steps

    class Recording(original):  # type: ignore[misc, valid-type]
        def __init__(self, options: Any, *rest: Any, **keywords: Any) -> None:
            seen.append(options.inductor)
            super().__init__(options, *rest, **keywords)

    monkeypatch.setattr(autoremat.backend, "Steps", Recording)
    model = compiled(UNBOUNDED, max_autotune=False)
    ours = step(model, (rows(),))
    assert seen == [{"max_autotune": False}]
    reference = step(make_seeded(ShortChain), (rows(),))
    assert torch.allclose(ours.loss, reference.loss)


@pytest.mark.parametrize(("asked", "expected"), [({}, False), ({TAIL_VECTORS: True}, True)])
def test_loops_end_without_masked_vectors(asked: dict[str, bool], expected: bool, monkeypatch):
    """They gave wrong gradients (mamba in docs/compatibility.md); who asks for them has them."""
    seen: list[dict[str, Any]] = []

    def compile_fx(
        module: Any, _inputs: Any, *, config_patches: dict[str, Any], **_keywords: Any
    ) -> Any:
        seen.append(config_patches)
        return module

    monkeypatch.setattr(autoremat._torch, "compile_fx", compile_fx)
    graph = torch.fx.symbolic_trace(nn.Identity())
    autoremat.backend.autoremat(graph, [], options={"budget": "1GB", **asked})
    (patches,) = seen
    assert patches[TAIL_VECTORS] is expected
    with torch._inductor.config.patch(patches):  # torch knows the option by this name
        assert torch._inductor.config.cpp.enable_loop_tail_vec is expected


def test_small_sums_are_loops_unless_the_user_sets_a_limit():
    """By the configuration of the process or of the compile."""
    option = "unroll_reductions_threshold"
    config = torch._inductor.config
    before = config.unroll_reductions_threshold
    with configured({}):
        assert config.unroll_reductions_threshold == 1
    with configured({option: 3}):
        assert config.unroll_reductions_threshold == 3
    with config.patch({option: 5}), configured({}):
        assert config.unroll_reductions_threshold == 5
    assert config.unroll_reductions_threshold == before > 1


@pytest.mark.thorough
def test_the_backend_keeps_a_budget():
    """With no model to ask, what the graph reads is resident."""
    inputs = (rows(),)
    refused = compiled(1)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        step(refused, inputs)
    smallest = caught.value.smallest_peak_nbytes
    model = compiled(smallest)
    step(model, inputs)
    assert measured(model, inputs) <= smallest


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "needs a budget"),
        ({"budget": "40 gigs"}, "Accepted"),
        ({"budget": "1GB", "compiler": "tvm"}, "compiler"),
    ],
    ids=["no budget", "malformed budget", "unknown compiler"],
)
def test_the_backend_refuses_malformed_options(options: dict[str, Any], text: str):
    """The message survives Dynamo."""
    model = torch.compile(Chain(), backend=autoremat.backend.autoremat, options=options)
    with pytest.raises(Exception, match=text):
        model(rows())


def test_the_backend_has_no_modes():
    """`mode=` and `options=` exclude one another in torch.compile; the error says what to write."""
    with pytest.raises(ValueError, match=r"takes options.*\"triton.cudagraphs\": True}"):
        autoremat.backend.autoremat(None, (), mode="reduce-overhead")


@pytest.mark.thorough
def test_cuda_graphs_are_an_option_that_the_cpu_ignores():
    """What mode="reduce-overhead" stands for goes on to Inductor."""
    ours = step(compiled(UNBOUNDED, **{"triton.cudagraphs": True}), (rows(),))
    assert torch.allclose(ours.loss, step(make_seeded(ShortChain), (rows(),)).loss)


def test_the_backend_runs_op_by_op_too():
    """`compiler="eager"` is an option like any other."""
    ours = step(compiled(UNBOUNDED, compiler="eager"), (rows(),))
    assert torch.allclose(ours.loss, step(make_seeded(ShortChain), (rows(),)).loss)
