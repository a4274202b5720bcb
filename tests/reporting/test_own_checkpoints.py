"""Reports say where the user's own checkpoints cost more than they have to."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.planning import uncheckpointed
from autoremat.reporting import CHECKPOINTS, Fact, Report
from autoremat.session import own_checkpoints
from tests.reporting.report_samples import layered_report
from tests.training import UNBOUNDED, close, make_seeded, measured, optimized, step, unbounded

pytestmark = [
    # Dynamo looks at `.grad` of what a graph after a break is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.shares_plans,
]

WIDTH, BLOCKS = 32, 6


@pytest.fixture(autouse=True)
def errors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would be told where something fails."""
    monkeypatch.setattr("autoremat.session.reports.cost_of_checkpoints", own_checkpoints._told)


class Block(nn.Module):
    """A perceptron in a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Blocks, each in a checkpoint if asked."""

    def __init__(self, *, checkpointed: bool = True, breaks: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.breaks = checkpointed, breaks
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x.square().mean()


def plain() -> nn.Module:
    return Stack(checkpointed=False)


def rows() -> Tensor:
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, budget: int | None, **options: Any) -> Report:
    given = {"compiler": "eager", "verbose": False, "time_limit": 4.0} | options
    return autoremat.plan(model, rows(), budget=budget, **given)


def shares(report: Report) -> tuple[float, float]:
    """What is recomputed without the checkpoints and with them, in percent of a step."""
    (text,) = report.own_checkpoints
    free, now = re.findall(r"([\d.]+)%", text)
    return float(free), float(now)


def recomputed(report: Report) -> float:
    """The same of a step that has no checkpoints."""
    return 100 * (report.predicted_time_us / report.baseline_time_us - 1)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each search without the checkpoints."""
    found: list[object] = []
    search = uncheckpointed.Uncheckpointed._searched

    def counted(graph: Any, place: Any, time_limit_s: float) -> float:
        found.append(place)
        return search(graph, place, time_limit_s)

    monkeypatch.setattr(uncheckpointed.Uncheckpointed, "_searched", counted)
    return found


@pytest.mark.parametrize(
    "compiler",
    ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.thorough])],
)
def test_checkpoints_that_the_budget_does_not_need_are_told_of(compiler: str) -> None:
    """With room for everything nothing has to run again; the checkpoints run a forward again."""
    report = planned(Stack(), UNBOUNDED, compiler=compiler)
    free, now = shares(report)
    assert free == 0
    assert 15 < now < 50
    assert "gradient_checkpointing_enable()" in report.own_checkpoints[0]
    assert report.own_checkpoints[0] in report.summary()
    assert report.own_checkpoints[0] in report.to_html().replace("&#39;", "'")
    assert Report.from_json(report.to_json()).own_checkpoints == report.own_checkpoints


def test_the_share_without_them_is_that_of_the_model_without_them() -> None:
    """Within the same budget."""
    whole = planned(plain(), UNBOUNDED)
    budget = (whole.predicted_peak_nbytes + whole.resident_nbytes) // 2
    free, now = shares(planned(Stack(), budget))
    assert free == pytest.approx(recomputed(planned(plain(), budget)), abs=0.5)
    assert free < now


def test_checkpoints_that_a_plan_would_make_as_well_are_not_told_of() -> None:
    """At the smallest peak there is, it recomputes as much without them."""
    with pytest.raises(autoremat.InfeasibleBudget) as refused:
        planned(Stack(), 1, device="H100")
    smallest = refused.value.smallest_peak_nbytes
    told, looser = (planned(Stack(), n, device="H100") for n in (smallest, 2 * smallest))
    assert told.own_checkpoints == ()
    assert looser.own_checkpoints
    assert recomputed(planned(plain(), smallest, device="H100")) > 10


def test_a_model_without_checkpoints_is_told_nothing(searches: list[object]) -> None:
    whole = planned(plain(), UNBOUNDED)
    report = planned(plain(), (whole.predicted_peak_nbytes + whole.resident_nbytes) // 2)
    assert recomputed(report) > 2
    assert report.own_checkpoints == ()
    assert not searches


def test_a_plan_that_the_user_chose_is_not_compared() -> None:
    """Nor is what `recompute=` names anybody's checkpoint."""
    assert planned(Stack(), UNBOUNDED, policy="recompute-all").own_checkpoints == ()
    assert planned(plain(), UNBOUNDED, recompute="blocks.*").own_checkpoints == ()


def test_it_is_found_when_a_report_is_asked_for_and_once(searches: list[object]) -> None:
    """Training waits for nothing, and runs what it ran."""
    model = optimized(Stack, UNBOUNDED)
    close(step(model, (rows(),)), step(make_seeded(Stack), (rows(),)), 1e-5)
    assert not searches
    first, again = autoremat.report(model), autoremat.report(model)
    assert first.own_checkpoints == again.own_checkpoints != ()
    assert len(searches) == 1
    assert measured(model, (rows(),)) == first.predicted_peak_nbytes


def test_other_graphs_of_the_step_have_what_is_kept_beside_them() -> None:
    """After a graph break the loss runs while the blocks' values wait."""
    report = unbounded(lambda: Stack(breaks=True), (rows(),))
    assert len(report.graphs) == 2
    assert shares(report)[0] == 0


def test_one_more_advice_takes_no_line_of_its_own() -> None:
    """The longest summary still fits a screen."""
    told = replace(layered_report(), facts=(Fact(CHECKPOINTS, "Leave them out."),))
    lines = [line for line in told.summary().split("\n") if line.startswith("Advice")]
    assert lines == ["Advice       Leave them out."]
