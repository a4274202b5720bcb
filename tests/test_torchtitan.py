"""Tags on the graph of a whole step: what a pass for recompute makes of them keeps the budget."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, fx, nn
from torch._functorch._activation_checkpointing import (
    remat_using_tags_for_fwd_loss_bwd_graph_pass as torchs_pass,
)
from torch.distributed import _functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

import autoremat
from autoremat import torchtitan
from autoremat.memory.meter import measure_peak
from tests.process_group import lowest_peak, on_ranks

WIDTH, ROWS = 32, 256


class Blocks(nn.Module):
    """Residual blocks, with dropout if asked for."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
            for _ in range(depth)
        )
        self.back = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + F.dropout(back(layer(x)), self.dropout)
        return x.square().mean()


class Traced:
    """A step of a model as one graph: its loss, then its gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

        def step(*inputs: Tensor) -> list[Tensor]:
            *values, batch = inputs
            named = dict(zip(self._parameters, values, strict=True))
            with stateless._reparametrize_module(model, named):
                loss = model(batch)
            return [loss, *torch.autograd.grad(loss, values)]

        self.module = make_fx(step, tracing_mode="fake")(*self._inputs)
        self.module.graph.eliminate_dead_code()
        self.module.recompile()
        nodes = list(self.module.graph.nodes)
        loss = self.module.graph.output_node().args[0][0]
        for node in nodes[nodes.index(loss) + 1 : -1]:
            node.meta["autograd_backward"] = True  # as tracers note it, each in its own way
            node.meta["custom"] = {"remat_pass_tag": "is_backward"}  # for the pass of torch 2.11

    @property
    def _inputs(self) -> list[Tensor]:
        return [*self._parameters.values(), self._batch]

    @property
    def resident_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._inputs)

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        torch.manual_seed(0)
        results: list[Tensor] = self.module(*self._inputs)
        return results

    def peak_nbytes(self) -> int:
        return self.resident_nbytes + measure_peak(self.run)


def traced(**options: Any) -> Traced:
    torch.manual_seed(0)
    return Traced(Blocks(**options))


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.75, marks=pytest.mark.thorough),
        0.5,
        pytest.param(0.45, marks=pytest.mark.thorough),
    ],
)
def test_the_measured_peak_is_the_predicted_one(share: float) -> None:
    """As torch's own pass repeats what is tagged; results stay to the last bit."""
    step = traced()
    whole, expected = step.peak_nbytes(), step.run()
    budget = step.resident_nbytes + int(share * (whole - step.resident_nbytes))
    tagged = torchtitan.tag(step.module, budget)
    step.module = torchs_pass.remat_using_tags_for_fwd_loss_bwd_graph(step.module)
    assert step.peak_nbytes() == tagged.peak_nbytes <= budget < whole
    assert tagged.recomputed
    assert f"{len(tagged.recomputed)} operations" in str(tagged)
    for one, other in zip(expected, step.run(), strict=True):
        assert torch.equal(one, other)


def test_with_room_nothing_runs_again() -> None:
    """Then the prediction is the peak of the graph as it was traced."""
    step = traced()
    tagged = torchtitan.tag(step.module, "1GB")
    assert (tagged.recomputed, tagged.extra_us) == ((), 0.0)
    assert tagged.peak_nbytes == step.peak_nbytes()


def test_draws_are_saved() -> None:
    """The pass keeps no state of generators, and refuses to repeat them."""
    step = traced(dropout=0.5)
    expected, whole = step.run(), step.peak_nbytes()
    tagged = torchtitan.tag(step.module, (whole + step.resident_nbytes) // 2)
    step.module = torchs_pass.remat_using_tags_for_fwd_loss_bwd_graph(step.module)
    assert tagged.recomputed
    for one, other in zip(expected, step.run(), strict=True):
        assert torch.equal(one, other)


def test_what_is_beside_the_graph_counts() -> None:
    """An optimizer's state takes the same of the budget as an input of the graph."""
    step = traced()
    peak = torchtitan.tag(step.module, "1GB").peak_nbytes
    assert torchtitan.tag(step.module, "1GB", beside_nbytes=1000).peak_nbytes == peak + 1000


def name_modules(graph: fx.Graph, names: dict[bool, str]) -> None:
    """Note a name of torchtitan's on each node of the backward, or of the forward."""
    for node in graph.nodes:
        is_backward = bool(node.meta.get("autograd_backward", False))
        node.meta["custom"] = {"module_fqn": names[is_backward], "other": 1}


def names_of(graph: fx.Graph) -> list[str]:
    return [node.meta.get("custom", {}).get("module_fqn", "") for node in graph.nodes]


def test_sums_of_gradients_do_not_pass_for_the_loss() -> None:
    """The pass of torchtitan repeats nothing before the last node with the loss's name."""
    step = traced(depth=1)
    name_modules(step.module.graph, {False: "layers.0", True: "layers.0"})
    *_, last, _output = step.module.graph.nodes
    last.meta["custom"] = {"module_fqn": "loss", "other": 1}
    torchtitan.tag(step.module, "1GB")
    assert "loss" not in names_of(step.module.graph)
    assert last.meta["custom"] == {"other": 1}


def test_the_loss_s_own_backward_repeats_nothing() -> None:
    """What it reads is saved: torchtitan's pass begins behind it."""
    step = traced(depth=1)
    name_modules(step.module.graph, {False: "layers.0", True: "lm_head"})
    *_, last, _output = step.module.graph.nodes
    last.meta["custom"] = {"module_fqn": "layers.0"}
    whole = step.peak_nbytes()
    with pytest.raises(autoremat.InfeasibleBudget, match="smallest peak found"):
        torchtitan.tag(step.module, (whole + step.resident_nbytes) // 2)


def test_a_budget_that_no_plan_of_this_kind_fits_is_refused() -> None:
    """The error names a budget that is accepted."""
    step = traced()
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        torchtitan.tag(step.module, step.resident_nbytes + 4096)
    smallest = refused.value.smallest_peak_nbytes
    assert torchtitan.tag(step.module, smallest).peak_nbytes <= smallest


def test_a_graph_without_a_backward_is_refused() -> None:
    """As the one of a compiler's forward, or of a trace without metadata."""
    module = make_fx(lambda x: [x.sin()])(torch.randn(3))
    with pytest.raises(ValueError, match="no backward"):
        torchtitan.tag(module, "1GB")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Torchtitan's, as far as a policy sees it."""
    policies: dict[str, Any] = {}
    place = "torchtitan.experiments.graph_trainer.registry"
    for name in ("torchtitan", "torchtitan.experiments", "torchtitan.experiments.graph_trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(place)
    module.register_memory_policy = lambda name: functools.partial(policies.setdefault, name)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, place, module)
    return policies


def test_a_registered_policy_tags(
    registry: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It returns the graph that it was given, and says in the log what was chosen."""
    torchtitan.register("1GB", name="remat")
    step = traced()
    with caplog.at_level("INFO"):
        assert registry["remat"](step.module, config=None) is step.module
    assert "operations run again" in caplog.text


def test_a_malformed_budget_is_refused_when_it_is_registered(registry: dict[str, Any]) -> None:
    """Not hours later, where the trainer traces its first step."""
    with pytest.raises(ValueError, match="no number with a unit"):
        torchtitan.register("much")
    assert not registry


def test_a_graph_is_tagged_as_often_as_one_likes() -> None:
    """Tags of an earlier choice bind nothing."""
    step = traced()
    torchtitan.tag(step.module, (step.peak_nbytes() + step.resident_nbytes) // 2)
    assert torchtitan.tag(step.module, "1GB") == torchtitan.tag(traced().module, "1GB")


# --- several ranks -------------------------------------------------------------------------------

gathered = getattr(functional, "all_gather_single_autograd", None)  # of torch 2.13
gathered = gathered or functional.all_gather_tensor_autograd


class Gathering(nn.Module):
    """Residual layers whose weights are gathered from two ranks where they are used."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.randn(WIDTH * 16, WIDTH) / (4 * WIDTH) for _ in range(depth)
        )
        self.group = distributed.group.WORLD

    def forward(self, x: Tensor) -> Tensor:
        for shard in self.layers:
            weight = gathered(shard, 0, self.group)
            up, down = weight.chunk(2)
            x = x + F.gelu(x @ up.mT) @ down
        return x.square().mean()


def _tagged(
    share: float, repeatable: str | None = None
) -> tuple[tuple[str, ...], float, float, bool]:
    """Of a gathering step: what runs again, measured and predicted peak over budget, gradients."""
    step = Traced(Gathering())
    whole, expected = step.peak_nbytes(), step.run()
    budget = step.resident_nbytes + int(share * (whole - step.resident_nbytes))
    tagged = torchtitan.tag(step.module, budget, repeatable=repeatable)
    step.module = torchs_pass.remat_using_tags_for_fwd_loss_bwd_graph(step.module)
    equal = all(map(torch.equal, expected, step.run()))
    measured = lowest_peak(step.peak_nbytes, tagged.peak_nbytes)
    return tagged.recomputed, measured / budget, tagged.peak_nbytes / budget, equal


def gathered_once(_rank: int) -> Any:
    """Weights are kept from their forward to their backward."""
    return _tagged(0.8)


def gathered_again(_rank: int) -> Any:
    """They may be gathered again."""
    return _tagged(0.4, "_c10d_functional.all_gather_into_tensor")


def tagged_later(rank: int) -> Any:
    """The last rank tags when the other has done so; it need not search, nor could it."""
    step = Traced(Gathering())
    budget = 10 * step.resident_nbytes
    if rank:
        distributed.barrier()
        with mock.patch.object(torchtitan, "_chosen", side_effect=AssertionError):
            return torchtitan.tag(step.module, budget)
    tagged = torchtitan.tag(step.module, budget)
    distributed.barrier()
    return tagged


@pytest.mark.thorough
@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
def test_ranks_have_the_same_tags_and_gather_again_where_they_may(tmp_path: Path) -> None:
    """Whatever a rank's own search would have found; without the mark, gathers run once."""
    scenarios = (gathered_once, gathered_again, tagged_later)
    found = on_ranks({scenario.__name__: scenario for scenario in scenarios}, tmp_path)
    first, last = found.pop("tagged_later")
    assert first == last
    assert first.recomputed
    for name, (one, other) in found.items():
        assert one[0] == other[0], name
        for recomputed, measured, predicted, equal in (one, other):
            assert equal
            assert measured <= predicted <= 1.0
            again = [name for name in recomputed if "all_gather" in name]
            assert bool(again) == (name == "gathered_again")
