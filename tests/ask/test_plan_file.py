"""A plan as a file: applied on another day it gives the same graph, or says what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
import autoremat.planning.pipeline
from autoremat.ask.options import Options
from autoremat.ask.plan_file import NodeRecord, StoredGraph, StoredPlan, first_mismatch, read, write
from autoremat.ask.steering import Steering
from autoremat.errors import OverBudget, PlanMismatch, SteeringError
from autoremat.optimized import optimized_call
from tests.tiny import WIDTH, Dropout, many_rows
from tests.training import UNBOUNDED, optimized, recomputes, same, step


class Layers(nn.Module):
    """Linear layers with an activation that subclasses choose."""

    activation = staticmethod(F.gelu)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(self.activation(layer(x)), 0.1)
        return x.square().mean()


class WithRelu(Layers):
    activation = staticmethod(F.relu)


class NotDropping(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.activation(layer(x))
        return x.square().mean()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def planned(path: Path, make: Any = Layers, budget: Any = None, **options: Any) -> nn.Module:
    """A model trained for a step under a plan that recomputes, which is stored."""
    policy = "sqrt" if budget is None else "optimal"
    model = optimized(make, budget, policy=policy, **options)
    step(model, (many_rows(),))
    autoremat.save_plan(model, path)
    return model


def applied(path: Path, make: Any = Layers, budget: Any = None, **options: Any) -> nn.Module:
    model = optimized(make, budget, plan=path, **options)
    step(model, (many_rows(),))
    return model


def stored(model: nn.Module) -> StoredPlan:
    return optimized_call(model).session.stored_plan()


def test_a_plan_applied_is_the_plan(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Value by value and byte by byte, without a search, and the step is the same."""
    budget = autoremat.report(planned(path)).predicted_peak_nbytes
    first = planned(path, budget=budget)
    assert recomputes(first) > 0
    reference = step(first, (many_rows(),))
    monkeypatch.setattr(autoremat.planning.pipeline, "Solver", None)
    again = applied(path)
    same(reference, step(again, (many_rows(),)))
    one, other = autoremat.report(first), autoremat.report(again)
    assert one.values == other.values
    assert [graph.timeline for graph in one.graphs] == [graph.timeline for graph in other.graphs]
    assert one.method == other.method
    assert stored(again) == stored(first) == read(path)


def test_a_policys_plan_and_one_made_offline_are_files_too(path: Path):
    report = autoremat.plan(
        Layers(), many_rows(), policy="sqrt", compiler="eager", verbose=False, save_to=path
    )
    model = applied(path)
    assert autoremat.report(model).graphs[0].values == report.graphs[0].values


def test_plans_with_several_graphs(path: Path):
    planned(path, make=Dropout)
    first = read(path)
    write(replace(first, graphs=()), path)
    with pytest.raises(PlanMismatch, match=r"The plan has 0 graph\(s\), the model's step has more"):
        applied(path, make=Dropout)


IN_ANOTHER_PROCESS = """
import sys, warnings
import torch
from tests.ask.test_plan_file import Layers, many_rows
import autoremat

torch.manual_seed(0)
path, copy = sys.argv[1:]
other = autoremat.optimize(torch.nn.Sequential(torch.nn.Linear(2, 2)), "1GB", compiler="eager")
other(torch.ones(1, 2)).sum().backward()  # Dynamo counts its graphs per process
model = autoremat.optimize(Layers(), plan=path, compiler="eager", strict=True)
model(many_rows()).backward()
autoremat.save_plan(model, copy)
"""


@pytest.mark.thorough
def test_another_process_applies_it(path: Path, tmp_path: Path):
    """With another order of sets, and graphs of another model before it: the same file again."""
    planned(path)
    copy = tmp_path / "copy.json"
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "solver")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(path), str(copy)]
    subprocess.run(command, check=True, env=environment, cwd=root)
    assert copy.read_bytes() == path.read_bytes()


def test_the_optimizers_step_may_come_later(path: Path):
    """What a plan orders is forward and backward: an optimizer adds its step at the end."""
    planned(path)
    torch._dynamo.reset()
    model = Layers()
    optimizer = torch.optim.Adam(model.parameters())
    autoremat.optimize(model, plan=path, compiler="eager", optimizer=optimizer, verbose=False)
    model(many_rows()).backward()
    autoremat.save_plan(model, path)
    applied(path)


def test_another_model_is_refused_with_the_first_difference(path: Path):
    planned(path)
    expected = (
        r"In graph 0, node \d+: the plan has gelu = aten\.gelu\.default of float32 \(256, 32\), "
        r"reading addmm; the model has relu = aten\.relu\.default of float32 \(256, 32\)"
    )
    with pytest.raises(PlanMismatch, match=expected):
        applied(path, make=WithRelu)


def test_another_batch_is_refused(path: Path):
    planned(path)
    model = optimized(Layers, None, plan=path)  # type: ignore[arg-type]
    with pytest.raises(PlanMismatch, match=r"float32 \(256, 32\); the model has .*\(8, 32\)"):
        step(model, (many_rows(8),))


def test_one_graph_longer_than_the_other():
    """The one that ends is said to end."""
    node = NodeRecord("a", "aten.a", (), ("float32 (2,)",))
    assert first_mismatch((node,), (node,)) is None
    assert first_mismatch((node,), ()) == (
        "node 0: the plan has a = aten.a of float32 (2,); the model has no more nodes"
    )


def test_other_rules_for_random_numbers_are_refused(path: Path):
    """A plan that draws masks again is no plan where they are drawn once."""
    planned(path)
    with pytest.raises(PlanMismatch, match="are dropout=, repeatable= and offload= the same"):
        applied(path, dropout="save_masks")


def test_a_known_plan_is_taken_where_it_fits(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a search; another batch, and a budget that it does not fit, are searched."""
    first = planned(path, budget=UNBOUNDED)
    pipeline, searched = autoremat.planning.pipeline, []
    search = pipeline.search
    monkeypatch.setattr(pipeline, "search", lambda *a, **k: searched.append(a) or search(*a, **k))

    def trained(rows: int, budget: int) -> nn.Module:
        model = optimized(Layers, budget, known_plan=path)
        step(model, (many_rows(rows),))
        return model

    again = trained(len(many_rows()), UNBOUNDED)
    assert stored(again) == stored(first)
    assert not searched
    trained(8, UNBOUNDED)
    assert len(searched) == 1
    report = autoremat.report(again)
    peak_nbytes = report.predicted_peak_nbytes
    leaner = trained(len(many_rows()), int(0.85 * peak_nbytes))
    assert len(searched) == 2
    assert autoremat.report(leaner).predicted_peak_nbytes < peak_nbytes


def test_a_known_plan_of_another_compiler_or_beside_a_plan(path: Path):
    """Nothing of the one can be taken, and the other decides alone."""
    planned(path, budget=UNBOUNDED)
    assert parse_steering_of(path, "inductor").known is None
    with pytest.raises(SteeringError, match="drop known_plan="):
        optimized(Layers, None, plan=path, known_plan=path)


def parse_steering_of(path: Path, compiler: str) -> Steering:
    return Options.parse(budget=1, known_plan=path, compiler=compiler).setting.steering


def test_another_compiler_is_refused_at_once(path: Path):
    planned(path)
    with pytest.raises(PlanMismatch, match=r'pass compiler="eager"'):
        autoremat.optimize(Layers(), plan=path, compiler="inductor")


@pytest.mark.thorough
def test_a_budget_is_checked_if_it_is_given(path: Path):
    report = autoremat.report(planned(path))
    applied(path, budget=report.predicted_peak_nbytes)
    with pytest.raises(OverBudget, match=r'the peak of plan=".*plan\.json"') as caught:
        applied(path, budget=report.predicted_peak_nbytes - 1)
    assert caught.value.smallest_peak_nbytes == report.predicted_peak_nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "not JSON.*Is the file complete"),
        (lambda text: "", "not JSON"),
        (lambda text: "[]", "found 'list'"),
        (lambda text: text.replace("autoremat.plan/1", "autoremat.plan/9"), "newer autoremat"),
        (lambda text: text.replace("autoremat.plan/1", "autoremat.report/1"), "is no plan of a"),
        (lambda text: text.replace('"schedule"', '"order"'), "KeyError: 'schedule'"),
        (lambda text: text.replace('"is_own": true', '"is_own": 1'), "is_own is true or false"),
        (lambda text: text.replace('"in_order": true', '"in_order": 1'), "in_order is true or"),
        (lambda text: text.replace('"compiler": "eager"', '"compiler": 3'), "expected a text"),
    ],
)
def test_files_that_are_no_plans(path: Path, change: Any, message: str):
    write(StoredPlan((example_graph(),), "eager"), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(SteeringError, match=message):
        autoremat.optimize(Layers(), plan=path, compiler="eager")


def example_graph() -> StoredGraph:
    node = NodeRecord("a", "aten.a", ("b", "c"), ("float32 (2,)",))
    return StoredGraph((node, node), ("a", "a"), ("b",), "by hand")


def test_a_file_holds_what_was_written(path: Path):
    """And is JSON, with one node on a line."""
    loose = replace(example_graph(), in_order=False)
    plan = StoredPlan((example_graph(), loose), "eager", "cpu", "2.0")
    write(plan, path)
    assert read(path) == plan
    assert json.loads(path.read_text())["schema"] == "autoremat.plan/1"
    assert path.read_text().count('\n["a", "aten.a", ["b", "c"], ["float32 (2,)"]]') == 4


def test_a_file_of_before_there_were_two_forms_is_of_the_one_there_was(path: Path):
    """All plans were written out in their order then."""
    write(StoredPlan((replace(example_graph(), in_order=False),), "eager"), path)
    path.write_text(path.read_text().replace(', "in_order": false', ""))
    assert read(path).graphs == (example_graph(),)


def test_a_schedule_that_was_tampered_with_never_trains(path: Path):
    planned(path)
    plan = read(path)
    (graph,) = plan.graphs
    write(replace(plan, graphs=(replace(graph, schedule=graph.schedule[1:]),)), path)
    with pytest.raises(PlanMismatch, match="cannot be applied to graph 0"):
        applied(path)


def test_paths_that_cannot_be_used(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        autoremat.optimize(Layers(), plan=tmp_path / "absent.json")
    with pytest.raises(SteeringError, match="path of a stored plan"):
        autoremat.optimize(Layers(), plan=3)  # type: ignore[arg-type]
    model = optimized(Layers, UNBOUNDED)
    with pytest.raises(ValueError, match="Nothing is planned yet"):
        autoremat.save_plan(model, tmp_path / "plan.json")
    step(model, (many_rows(),))
    with pytest.raises(OSError, match="absent"):
        autoremat.save_plan(model, tmp_path / "absent" / "plan.json")


def test_a_plan_leaves_nothing_to_steer(path: Path):
    write(StoredPlan((example_graph(),), "eager"), path)
    with pytest.raises(SteeringError, match="drop policy="):
        autoremat.optimize(Layers(), plan=path, compiler="eager", policy="sqrt")
    with pytest.raises(SteeringError, match="drop policy="):
        autoremat.optimize(Layers(), plan=path, compiler="eager", save="layers.0")


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("make", "budget"), [(Layers, None), (Layers, UNBOUNDED), (NotDropping, UNBOUNDED)]
)
def test_under_inductor(path: Path, make: type[Layers], budget: int | None):
    """A plan of ours, and with room for it torch's own partition: both come back as they were.

    Torch's would save masks of dropout, which is slower than to draw them again.
    """
    first = planned(path, make, budget=budget, compiler="inductor")
    again = applied(path, make, compiler="inductor")
    assert stored(again) == stored(first)
    assert stored(first).graphs[0].is_own == (make is Layers)
    assert autoremat.verify(again, many_rows()).ok
