"""What holds on a CPU holds on a GPU: budgets, gradients, predictions, measured costs.

Skipped where there is no GPU. Peaks are all that torch's own statistics of its allocator count.
Steps that have shown what no tensor does are planned for it: those after them are looked at.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.cost.calls import is_free
from autoremat.cost.op_times import profile_nodes
from autoremat.errors import OverBudgetWarning
from autoremat.host.measured import gpu_link
from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from autoremat.memory.meter import cuda_peaks, measure_peak, resident_nbytes
from autoremat.memory.unseen import workspaces
from autoremat.session.replans import usual_steps
from tests import training
from tests.joint_graphs import capture
from tests.models import example_gpt, unet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

DEVICE = torch.device("cuda")
LAYERS, BATCH = 4, 64
FIRST_STEPS, LATER_STEPS = 1 + usual_steps(DEVICE), 2
PREDICTED = 0.05  # how far a prediction may be from what is measured
# Sums in another order: atomic additions, and other algorithms of a library.
ROUNDING = 1e-4

inductor = pytest.param("inductor", marks=pytest.mark.inductor)


@dataclass(frozen=True)
class Step:
    """A model by the function that makes it, and its batch, on the GPU."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]


def gpt(dropout: float = 0.0) -> Step:
    """Causal attention, tied embeddings."""

    def make() -> nn.Module:
        return example_gpt(layers=LAYERS, dropout=dropout).model.to(DEVICE)

    return Step(make, tuple(x.to(DEVICE) for x in example_gpt(layers=1, batch=BATCH).inputs))


def cnn() -> Step:
    """A UNet: convolutions, norms, long skips."""
    return Step(lambda: unet().model.to(DEVICE), tuple(x.to(DEVICE) for x in unet().inputs))


CASES = {"gpt": gpt, "cnn": cnn}


@pytest.fixture(
    params=[
        ("gpt", "eager"),
        ("cnn", "eager"),
        pytest.param(("gpt", "inductor"), marks=pytest.mark.inductor),
    ],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> tuple[Step, str]:
    """A step, and what runs its planned graphs."""
    name, compiler = request.param
    return CASES[name](), compiler


def peak_nbytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Of one step from no gradients: all that was allocated, workspaces of libraries included."""
    model.zero_grad(set_to_none=True)
    found = cuda_peaks(lambda: model(*inputs).backward(), DEVICE)
    assert found is not None
    return found.allocated_nbytes


def settled(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The steps after which nothing is left to learn; what is told of them is told of the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverBudgetWarning)
        for _ in range(FIRST_STEPS):
            training.step(model, inputs)


@pytest.mark.parametrize("share", [0.6, 0.1])
def test_later_steps_stay_within_the_budget(case: tuple[Step, str], share: float) -> None:
    """At the predicted peak within a few percent, but for workspaces; gradients are unchanged."""
    step, compiler = case
    budget = training.peaks(step.make, step.inputs, compiler=compiler).at(share)
    model = training.optimized(step.make, budget, compiler=compiler)
    settled(model, step.inputs)
    for _ in range(LATER_STEPS):
        peak = peak_nbytes(model, step.inputs)
        assert peak <= budget
    report = autoremat.report(model)
    unseen = report.resident.unseen_nbytes  # a workspace for backwards, which may need none
    predicted = report.predicted_peak_nbytes
    assert (1 - PREDICTED) * peak <= predicted <= (1 + PREDICTED) * peak + unseen
    planned = training.step(model, step.inputs)
    unplanned = training.optimized(step.make, training.UNBOUNDED, compiler=compiler)
    training.close(training.step(unplanned, step.inputs), planned, ROUNDING)
    training.close(training.step(training.make_seeded(step.make), step.inputs), planned, ROUNDING)


@pytest.mark.parametrize("compiler", ["eager", inductor])
def test_dropout_draws_the_same_again(compiler: str) -> None:
    """What is recomputed has the mask of the forward."""
    step = gpt(dropout=0.2)
    peaks = training.peaks(step.make, step.inputs, compiler=compiler)
    unplanned = training.optimized(step.make, training.UNBOUNDED, compiler=compiler)
    wanted = training.step(unplanned, step.inputs)
    planned = training.optimized(step.make, peaks.at(0.1), compiler=compiler)
    training.close(wanted, training.step(planned, step.inputs), ROUNDING)


def test_under_autocast() -> None:
    """In bfloat16, with parameters in float32, as most people train."""
    step = gpt()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        budget = training.peaks(step.make, step.inputs).at(0.2)
        model = training.optimized(step.make, budget)
        settled(model, step.inputs)
        assert peak_nbytes(model, step.inputs) <= budget


def test_the_meter_reads_torchs_own_statistics() -> None:
    """What is there before a step does not count, nor what it has freed."""
    held = torch.empty(1 << 20, device=DEVICE)

    def step() -> Tensor:
        torch.empty(3 << 20, dtype=torch.uint8, device=DEVICE)
        return torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)

    assert measure_peak(step, device=DEVICE) == 3 << 20
    assert held.numel() == 1 << 20


def test_operations_are_measured_on_the_gpu(tmp_path: Path) -> None:
    """Nearly all of a step are run; a larger product takes longer, and what was found is kept."""
    step = gpt()
    nodes = capture(training.make_seeded(step.make), *step.inputs).prepared().nodes
    costs = profile_nodes(nodes, cache_path=tmp_path / "costs.sqlite3")
    priced = [cost for node, cost in costs.items() if not is_free(node)]
    assert all(cost.time_us > 0 for cost in priced)
    assert sum(cost.measured for cost in priced) > 0.9 * len(priced)
    again = profile_nodes(nodes, cache_path=tmp_path / "costs.sqlite3")
    assert [again[node].time_us for node in nodes] == [costs[node].time_us for node in nodes]


def test_workspaces_are_part_of_the_plan() -> None:
    """Libraries for matrix products keep them in torch's allocator: no tensor shows them."""
    step = gpt()
    model = training.optimized(step.make, training.UNBOUNDED)
    training.step(model, step.inputs)
    gc.collect()
    shown = resident_nbytes(model, step.inputs)
    unseen = autoremat.report(model).resident.unseen_nbytes
    assert sum(workspaces(torch.cuda.get_device_capability())) <= unseen
    assert 0 < torch.cuda.memory_allocated() - shown <= unseen


@pytest.mark.parametrize("compiler", ["eager", inductor])
def test_values_wait_in_the_memory_of_the_host(compiler: str) -> None:
    """Within a budget that recompute alone cannot keep, with the same gradients."""
    step = gpt()
    peaks = training.peaks(step.make, step.inputs, compiler=compiler)
    saved = {"save": ["aten.addmm", "aten.mm", "aten.native_layer_norm"]}
    budget = peaks.at(0.5)
    alone = training.optimized(step.make, budget, compiler=compiler, **saved)
    with pytest.raises(autoremat.InfeasibleBudget):
        training.step(alone, step.inputs)
    model = training.optimized(step.make, budget, compiler=compiler, offload="8GB", **saved)
    settled(model, step.inputs)
    assert peak_nbytes(model, step.inputs) <= budget
    waiting = autoremat.report(model).graphs[0].waiting
    assert waiting is not None
    assert waiting.trips
    assert not waiting.alone_fits
    plain = training.step(training.make_seeded(step.make), step.inputs)
    training.close(plain, training.step(model, step.inputs), ROUNDING)


def test_copies_to_the_host_have_the_same_bits() -> None:
    """There and back while the GPU computes, in page-locked memory."""
    torch.manual_seed(0)
    expected = torch.randn(1 << 24, 8, device=DEVICE).t()
    x = torch.empty_strided((8, 1 << 24), (1, 9), device=DEVICE)  # with gaps, as a compiler leaves
    busy = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy / 4096
    x.copy_(expected)  # behind all that
    host = OFFLOAD(x, "")
    sent = OFFLOADED(host, x)
    x.zero_()  # behind the copy, on the stream that computes
    back = RELOADED(RELOAD(sent, x.device), sent)
    assert sent.is_pinned()
    assert back.stride() == x.stride()
    assert torch.equal(back, expected)
    link = gpu_link(DEVICE)
    assert link.out_nbytes_per_us > 1e3
    assert link.in_nbytes_per_us > 1e3
