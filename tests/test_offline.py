"""`plan`: the plan of a step that does not run."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.cost import op_times as profile
from autoremat.cost.device_specs import SPECS, find_spec
from autoremat.errors import FallbackWarning, InfeasibleBudget
from autoremat.memory.fake_twin import Faker
from autoremat.reporting import Report

WIDTH, BATCH = 64, 512
BUDGET = 1_500_000


class Layers(nn.Module):
    """A few layers with a loss; the last one is tied to the first."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.layers[-1].weight = self.layers[0].weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * self.scale
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def planned(model: nn.Module, *inputs: Tensor, **options: object) -> Report:
    given = {"budget": BUDGET, "compiler": "eager", "verbose": False, "time_limit": 5.0} | options
    return autoremat.plan(model, *inputs, **given)  # type: ignore[arg-type]


def optimized(model: nn.Module, *inputs: Tensor) -> Report:
    autoremat.optimize(model, BUDGET, compiler="eager", verbose=False, time_limit=5.0)
    model(*inputs).backward()
    return autoremat.report(model)


def test_the_plan_is_the_one_that_optimize_makes():
    """Value by value, byte by byte: the same stages made it."""
    torch._dynamo.reset()
    model = Layers()
    offline, real = planned(model, batch()), optimized(model, batch())
    (one,), (other,) = offline.graphs, real.graphs
    assert one.values == other.values
    assert one.timeline == other.timeline
    assert offline.predicted_peak_nbytes == real.predicted_peak_nbytes <= BUDGET
    assert offline.resident_nbytes == real.resident_nbytes
    assert any(value.recomputes for value in one.values)


@pytest.mark.thorough
@pytest.mark.inductor
def test_under_inductor_the_generated_code_is_read_offline_too():
    torch._dynamo.reset()
    report = planned(Layers(), batch(), compiler="inductor")
    assert 0 < report.predicted_peak_nbytes <= BUDGET
    assert report.compiler == "inductor"


@pytest.mark.thorough
def test_a_model_without_weights_plans_as_one_with_weights():
    """Sizes decide: on the meta device the report is the same."""
    with torch.device("meta"):
        empty = Layers()
    report = planned(empty, torch.empty(BATCH, WIDTH, device="meta"), device="cpu")
    full = planned(Layers(), batch())
    assert report.graphs[0].values == full.graphs[0].values
    assert report.resident_nbytes == full.resident_nbytes


def test_a_source_line_is_never_ours():
    """A bare nn.Sequential has no line but the one that calls it: the module's path says it all."""
    report = planned(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), batch(), budget="1GB")
    assert {(value.source, value.module) for value in report.values} == {("", "0"), ("", "1")}
    with pytest.raises(InfeasibleBudget, match=r"At `\w+`, .* \(incoming gradient\)"):
        planned(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), batch(), budget="200kB")


@pytest.mark.parametrize("name", ["<b>x</b>", "[bold]x[/bold]", "[/x]", "a b"])
def test_modules_keep_their_names(name: str):
    """Whatever is in them: they are text everywhere."""
    model = nn.Sequential()
    model.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    report = planned(model, batch(), budget="1GB")
    assert {value.module for value in report.values} == {f"{name}.0", f"{name}.1"}


def test_nothing_of_the_users_changes():
    model, x = Layers(), batch()
    before = {name: p.clone() for name, p in model.named_parameters()}
    planned(model, x)
    assert model._compiled_call_impl is None
    assert all(p.grad is None for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name])


@pytest.mark.thorough
def test_an_optimised_model_can_be_planned():
    """Its own compiled call stays out of the twin."""
    torch._dynamo.reset()
    model = Layers()
    real = optimized(model, batch())
    assert planned(model, batch()).graphs[0].values == real.graphs[0].values


def test_a_device_that_is_not_here_is_planned_by_its_data_sheet():
    with torch.device("meta"):
        model = Layers()
    x = torch.empty(BATCH, WIDTH, device="meta")
    report = planned(model, x, device="H100", budget="1%", compiler="inductor")
    assert report.device == "NVIDIA H100 80GB"
    assert report.budget_nbytes == find_spec("H100").memory_nbytes // 100
    assert report.graphs[0].estimated_ops
    slower = planned(model, x, device="T4", budget="1%", compiler="inductor")
    assert slower.predicted_time_us > report.predicted_time_us


def test_the_optimizer_counts():
    model = Layers()
    adam = planned(model, batch(), optimizer=torch.optim.AdamW(model.parameters()), budget="1GB")
    alone = planned(model, batch(), budget="1GB")
    weights = sum(p.nbytes for p in model.parameters())
    assert adam.resident_nbytes - alone.resident_nbytes >= 2 * weights


@pytest.mark.thorough
def test_keyword_inputs_and_shared_storages():
    class Named(Layers):
        def forward(self, *, x: Tensor, shift: Tensor) -> Tensor:
            return super().forward(x + shift)

    x = batch()
    report = planned(Named(), x=x, shift=x[:1])
    assert report.resident_nbytes == planned(Layers(), x).resident_nbytes


class Parted(Layers):
    """A graph break between two runs of the same layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        torch._dynamo.graph_break()
        return super().forward(x)


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_graphs_of_a_step_share_its_budget():
    """As from the second step of training on."""
    x = batch()
    free = planned(Parted(), x, budget="1GB")
    assert len(free.graphs) == 2
    budget = free.graphs[0].predicted_peak_nbytes
    assert budget < free.predicted_peak_nbytes
    assert planned(Parted(), x, budget=budget).predicted_peak_nbytes <= budget


class ReadsBetween(Layers):
    """A graph break at which code reads a number."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.layers[0](x))
        torch._dynamo.graph_break()
        if float(x.detach().sum()) > 0:
            x = x * 2
        return super().forward(x)


def test_contents_that_are_not_known_end_the_plan_there():
    """AR108: what was planned until then stays in the report."""
    torch._dynamo.reset()
    with pytest.warns(FallbackWarning, match=r"AR108.*reads what a tensor holds"):
        report = planned(ReadsBetween(), batch(), budget="1GB")
    assert report.graphs
    assert [told.code for told in report.fallbacks] == ["AR108"]


@pytest.mark.thorough
def test_a_budget_out_of_reach_is_refused_as_in_training():
    with pytest.raises(InfeasibleBudget) as refusal:
        planned(Layers(), batch(), budget=100_000)
    assert planned(Layers(), batch(), budget=refusal.value.smallest_peak_nbytes).graphs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "H1000"}, "neither"),
        ({"device": "xpu"}, 'device is "cpu"'),
        ({"budget": "40 gigs"}, "Accepted"),
        ({"compiler": "nvcc"}, "compiler is"),
    ],
)
def test_malformed_arguments(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        planned(Layers(), batch(), **change)


def test_models_that_cannot_be_planned():
    with torch.device("meta"):
        empty = Layers()
    with pytest.raises(ValueError, match="say what to plan for"):
        planned(empty, batch())
    with pytest.raises(ValueError, match="eval mode"):
        planned(Layers().eval(), batch())
    with pytest.raises(ValueError, match="needs a gradient"):
        planned(Layers().requires_grad_(False), batch())
    with pytest.raises(TypeError, match=r"nn\.Module"):
        planned(len, batch())  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_has_to_be_named():
    with pytest.raises(ValueError, match="by its data sheet"):
        planned(Layers(), batch(), device="cuda")


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [("H100", 79), ("a100", 79), ("A100-40GB", 39), ("NVIDIA RTX 4090", 23), ("rtx4090", 23)],
)
def test_a_device_is_found_by_how_people_write_it(name: str, memory_gib: int):
    assert find_spec(name).memory_nbytes == memory_gib << 30


def test_the_table_is_consistent():
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert find_spec(spec.name) == spec
        assert spec.gflops(torch.bfloat16) > spec.gflops(torch.float32)
        assert 0 < spec.product_share < 1


def test_a_twin_shares_what_the_model_shares():
    model = Layers()
    model.view = model.scale[:8]  # a plain attribute that looks into a buffer
    twin = Faker(torch.device("cpu")).model(model)
    assert twin.layers[0].weight is twin.layers[-1].weight
    assert twin.view.untyped_storage()._cdata == twin.scale.untyped_storage()._cdata


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_no_weight_is_ever_made():
    """60 GB of weights in a process of a few hundred MiB."""
    code = """
import resource, torch, autoremat
from torch import nn
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(30_000, 30_000) for _ in range(16)])
    x = torch.empty(64, 30_000)
report = autoremat.plan(model, x, budget="200GB", device="H200", verbose=False, time_limit=1.0)
assert report.resident_nbytes > 50_000_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout.split()[-1]) < 2 << 20


def test_operations_whose_times_contradict_each_other_are_named(tmp_path, monkeypatch):
    """Each round is four times as fast as the one before: the report believes none."""
    rounds = itertools.count()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(profile, "call_time_us", lambda *_: 4.0 ** -next(rounds))
    report = planned(Layers(2), batch())
    assert "gelu (its measured times contradict each other)" in report.estimated_ops
    assert "without a sound measurement" in report.summary()


def test_pythons_garbage_collection_is_afterwards_as_it_was():
    """Also where no plan fits; and a user's that never collects stays so."""
    before = gc.get_threshold()
    try:
        for thresholds in ((701, 11, 12), (0, 10, 10)):
            gc.set_threshold(*thresholds)
            with pytest.raises(InfeasibleBudget):
                planned(Layers(), batch(), budget="10kB")
            assert gc.get_threshold() == thresholds
    finally:
        gc.set_threshold(*before)


class Encoding(nn.Module):
    """Reads one sequence, and is asked for another, of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = F.gelu(self.words(source)), torch.tanh(self.words(target))
        read = (x @ memory.transpose(1, 2)).softmax(-1) @ memory
        return F.cross_entropy(self.out(x + read).flatten(0, 1), target.flatten())


def test_one_plan_for_a_range_is_made_for_the_largest_sizes_and_proven():
    """Whatever the batch's own are; sizes as `torch.export` has them."""
    Dim = torch.export.Dim
    items, source, target = Dim("items", max=8), Dim("source", max=32), Dim("target", max=16)
    report = planned(
        Encoding(),
        torch.zeros(2, 5, dtype=torch.long),
        torch.zeros(2, 3, dtype=torch.long),
        sizes={"source": {0: items, 1: source}, "target": {0: items, 1: target}},
    )
    (fact,) = (fact.text for fact in report.facts if fact.name == "Sizes")
    assert "items up to 8, source up to 32, target up to 16: proven" in fact
    alone = planned(
        Encoding(), torch.zeros(8, 32, dtype=torch.long), torch.zeros(8, 16, dtype=torch.long)
    )
    assert report.predicted_peak_nbytes == alone.predicted_peak_nbytes
    formula = report.peak_formula
    assert formula is not None
    sizes = {one.name: one.planned for one in formula.symbols}
    assert (sizes["items"], sizes["source"], sizes["target"]) == (8, 32, 16)
    assert formula.at(**sizes) == report.predicted_peak_nbytes


def test_a_range_that_does_not_fit_is_refused_with_the_largest_that_does():
    few = torch.randn(8, WIDTH)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        planned(Layers(), few, budget="800kB", sizes={"x": {0: (2, 4096)}})
    ((name, largest),) = caught.value.largest_sizes
    assert (name, 2 < largest < 4096) == ("x.size(0)", True)
    planned(Layers(), few, budget="800kB", sizes={"x": {0: (2, largest)}})


def test_an_example_of_one_is_refused():
    with pytest.raises(ValueError, match="anything from 2 to 32"):
        planned(Layers(), torch.randn(1, WIDTH), sizes={"batch": (1, 32)})
