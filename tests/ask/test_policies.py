"""`policy=`: the classic strategies by name, with the step's results unchanged."""

from __future__ import annotations

import os
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import Op, Phase, Problem, Value, check
from autoremat_solver.policies import per_segment, recompute_all, save_all_but, sqrt_segments
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.ask.policy import parse_policy
from autoremat.backend import autoremat as backend
from autoremat.errors import OverBudget, SteeringError
from autoremat.reporting import Report, ValueAction
from tests.tiny import WIDTH, Chain, many_rows, rows
from tests.training import measured, optimized, recomputes, same, step

FIXED = ("recompute-all", "every-layer", "every-2", "sqrt", "selective-attention")


def four_layers() -> Problem:
    """`a -> b -> c -> d -> D -> C -> B -> A`: each backward step reads what its layer made."""
    names = "abcd"
    forward = tuple(
        Op(n, (f"v{names[i - 1]}",) if i else (), (f"v{n}",), 1.0) for i, n in enumerate(names)
    )
    backward = []
    for i, n in reversed(list(enumerate(names))):
        incoming = (f"g{names[i + 1]}",) if i < 3 else ()
        backward.append(Op(n.upper(), (f"v{n}", *incoming), (f"g{n}",), 1.0, phase=Phase.BACKWARD))
    values = tuple(Value(f"{kind}{n}", 8) for kind in "vg" for n in names)
    return Problem(values, (*forward, *backward), ("ga",))


def test_the_inside_of_each_segment_runs_again_when_its_backward_does():
    """Two segments of two: `vb` crosses and is saved; `vd` is read at once."""
    plan = per_segment(four_layers(), {"a": 0, "b": 0, "c": 1, "d": 1})
    assert " ".join(plan.schedule) == "a b c d D c C B a A"


def test_what_belongs_to_no_segment_is_saved():
    plan = per_segment(four_layers(), {"c": 0, "d": 0})
    assert " ".join(plan.schedule) == "a b c d D c C B A"


def test_nothing_dropped_is_nothing_recomputed():
    problem = four_layers()
    assert save_all_but(problem).schedule == tuple(op.name for op in problem.ops)


def test_recompute_all_makes_each_value_once_more_and_keeps_it():
    plan = recompute_all(four_layers())
    assert " ".join(plan.schedule) == "a b c d D a b c C B A"


def test_sqrt_is_a_valid_plan_that_recomputes():
    problem = four_layers()
    plan = sqrt_segments(problem)
    assert not check(problem, plan)
    assert len(plan.schedule) > len(problem.ops)


@pytest.mark.parametrize("name", ["every-12", "sqrt", "optimal", "every-layer"])
def test_names_that_are_policies(name: str):
    assert str(parse_policy(name)) == f'policy="{name}"'


@pytest.mark.parametrize("name", ["every-0", "every-", "every--2", "Sqrt", "", None, 2, "all"])
def test_names_that_are_none(name: object):
    with pytest.raises(ValueError, match=r'policy is one of "optimal", .*"every-2"'):
        parse_policy(name)


class Attention(nn.Module):
    """Attention written out, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)) / WIDTH**0.5
        return self.out(self.drop(scores.softmax(-1)) @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Blocks(nn.Module):
    """An embedding, four blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x).square().mean()

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class CheckpointedBlocks(Blocks):
    """What users write by hand."""

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)


def words() -> Tensor:
    return torch.randn(2, 48, WIDTH, generator=torch.Generator().manual_seed(1))


def report_of(make: type[nn.Module], policy: str, **options: object) -> Report:
    model = optimized(make, None, policy=policy, **options)  # type: ignore[arg-type]
    step(model, (words(),))
    return autoremat.report(model)


def saved_shapes(report: Report) -> Counter[tuple[int | str, ...]]:
    return Counter(v.shape for v in report.values if v.action is ValueAction.SAVE and v.nbytes > 64)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", FIXED)
def test_no_policy_changes_the_step(policy: str):
    """Bit for bit the gradients of the plan that saves everything, dropout included."""
    everything = optimized(Blocks, None, policy="save-all")  # type: ignore[arg-type]
    reference = step(everything, (words(),))
    model = optimized(Blocks, None, policy=policy)  # type: ignore[arg-type]
    same(reference, step(model, (words(),)))
    assert recomputes(model) > recomputes(everything)
    assert autoremat.report(model).method.startswith(policy)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["save-all", "every-layer"])
def test_the_peak_of_a_policy_is_known(policy: str):
    """Predicted, then measured: the same bytes."""
    model = optimized(Chain, None, policy=policy)  # type: ignore[arg-type]
    step(model, (many_rows(),))
    peak = autoremat.report(model).predicted_peak_nbytes
    assert measured(model, (many_rows(),)) == pytest.approx(peak, abs=256)


@pytest.mark.thorough
def test_every_layer_saves_what_checkpointing_each_layer_saves():
    """The same shapes, as often, as `torch.utils.checkpoint` around each layer.

    And what the last layer hands to the head: eager mode keeps it, compiled checkpoints do not.
    """
    by_hand = saved_shapes(report_of(CheckpointedBlocks, "save-all"))
    by_name = saved_shapes(report_of(Blocks, "every-layer"))
    assert by_name - by_hand == Counter({(2, 48, WIDTH): 1})
    assert not by_hand - by_name


@pytest.mark.thorough
def test_longer_segments_save_less():
    """One input per segment: four layers give four, two or one."""
    counts = {}
    for policy in ("every-layer", "every-2", "every-9"):
        report = report_of(Blocks, policy)
        counts[policy] = saved_shapes(report)[2, 48, WIDTH]
        assert (
            report.method
            == f"{policy}, { {'every-layer': 4, 'every-2': 2}.get(policy, 1) } segments"
        )
    assert counts["every-layer"] == counts["every-2"] + 2 == counts["every-9"] + 3


def test_selective_attention_recomputes_scores_and_nothing_else():
    report = report_of(Blocks, "selective-attention")
    again = {(v.op, v.module) for v in report.values if v.recomputes and v.nbytes > 64}
    scores = {v for v in report.values if v.shape[-2:] == (48, 48)}
    assert {value.op for value in scores if value.recomputes} >= {"_softmax", "native_dropout"}
    assert not any(v.action is ValueAction.SAVE for v in scores)
    assert not {op for op, _ in again} & {"addmm", "gelu", "native_layer_norm"}
    assert report.method == "selective-attention, 4 cores"


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v).square().mean()


def test_fused_attention_has_no_scores():
    """Its kernel keeps none, so there is nothing to recompute."""
    assert report_of(Fused, "selective-attention").method == "selective-attention, 0 cores"


def test_a_policy_needs_no_budget():
    """The device's memory is the budget then."""
    report = report_of(Blocks, "sqrt")
    assert report.budget_nbytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_planner_needs_one():
    with pytest.raises(ValueError, match="needs a budget"):
        optimized(Chain, None)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_policy_above_the_budget_is_refused_with_what_the_planner_can_do():
    everything = report_of(Blocks, "save-all")
    model = optimized(Blocks, everything.predicted_peak_nbytes - 1, policy="save-all")
    with pytest.raises(OverBudget) as caught:
        step(model, (words(),))
    error = caught.value
    assert error.smallest_peak_nbytes == everything.predicted_peak_nbytes
    assert error.optimal_peak_nbytes < everything.predicted_peak_nbytes
    assert 'the peak of policy="save-all"' in str(error)
    assert f'policy="optimal" fits the budget, with a peak of {error.optimal_peak_nbytes}' in str(
        error
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    within = optimized(Blocks, error.smallest_peak_nbytes, policy="save-all")
    step(within, (words(),))


def test_a_budget_that_nothing_fits():
    model = optimized(Chain, 1000, policy="every-layer")
    with pytest.raises(OverBudget, match=r'policy="optimal" reaches .* above the budget too'):
        step(model, (rows(),))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x)))).square().mean()


def test_a_model_without_repeated_layers_has_no_every_layer():
    with pytest.raises(SteeringError, match=r'finds no repeated layers.*policy="sqrt"'):
        optimized(Flat, None, policy="every-layer")  # type: ignore[arg-type]


class Shared(nn.Module):
    """One block, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())] * 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return x.square().mean()


def test_each_call_of_a_shared_layer_is_a_layer():
    model = optimized(Shared, None, policy="every-layer")  # type: ignore[arg-type]
    step(model, (rows(),))
    assert autoremat.report(model).method == "every-layer, 3 segments"


@pytest.mark.thorough
def test_a_policy_works_offline_and_in_the_backend():
    keywords = {"policy": "every-layer", "compiler": "eager", "verbose": False}
    offline = autoremat.plan(Blocks(), words(), **keywords)  # type: ignore[arg-type]
    assert offline.graphs[0].values == report_of(Blocks, "every-layer").graphs[0].values
    keywords["strict"] = True
    compiled = torch.compile(Blocks().train(), backend=backend, options=keywords)
    compiled(words()).backward()


@pytest.mark.thorough
@pytest.mark.inductor
def test_a_policy_under_inductor():
    """Gradients of the model, and a peak read from the generated code."""
    options = {"policy": "recompute-all", "compiler": "inductor"}
    model = optimized(Chain, None, **options)  # type: ignore[arg-type]
    step(model, (many_rows(),))
    found = autoremat.verify(model, many_rows())
    assert found.ok
    assert found.measured_peak_nbytes <= found.predicted_peak_nbytes * 1.02
    assert recomputes(model) > 0


@pytest.mark.thorough
def test_the_pages_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/steering.md, block after block, as a reader would paste them."""
    page = (Path(__file__).parents[2] / "docs" / "steering.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "steering"}
    for block in blocks:
        exec(compile(block, "steering.md", "exec"), names)
    assert len(blocks) == 6
    report = autoremat.report(names["again"])  # type: ignore[arg-type]
    assert report.method == "sqrt"
    assert (tmp_path / "plan.json").exists()


def test_the_page_names_every_policy():
    page = (Path(__file__).parents[2] / "docs" / "steering.md").read_text(encoding="utf-8")
    assert {name for name in ("optimal", "save-all", *FIXED) if f'| `"{name}"' not in page} == set()


def test_what_only_the_backward_makes_is_no_recompute():
    """Saving all recomputes nothing, though some masks and factors are made late."""
    model = autoremat.optimize(Chain(), policy="save-all", compiler="eager", verbose=False)
    model(many_rows()).backward()
    values = autoremat.report(model).values
    assert [value.name for value in values if value.recomputes] == []
    assert {v.action for v in values} <= {"save", "free"}
