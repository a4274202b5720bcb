"""`goal="throughput"`: what a step does per second, and what other budgets would buy or cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.errors import InfeasibleBudget, OverBudgetWarning
from autoremat.reporting import Report
from autoremat.session import throughput
from tests.tiny import WIDTH, Layers, Residual, many_rows
from tests.training import optimized, step

pytestmark = pytest.mark.shares_plans

TIGHT = 260_000  # of `Residual`, with 256 rows: what needs no recompute takes 340 kB
ASKED = {"compiler": "eager", "verbose": False, "time_limit": 20.0}


class Broken(Layers):
    """Three graphs of two layers each."""

    def __init__(self) -> None:
        super().__init__(layers=6)

    def _pair(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + 2]:
            x = x + torch.tanh(F.gelu(layer(x)))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self._pair(x, 0)
        torch._dynamo.graph_break()
        x = self._pair(x, 2)
        torch._dynamo.graph_break()
        return self._pair(x, 4).square().mean()


class Tokens(nn.Module):
    """Looks tokens up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(F.gelu(self.table(tokens.view(-1, tokens.shape[1])))))
        return F.cross_entropy(hidden.flatten(0, 1), tokens.flatten())


def planned(make: Callable[[], nn.Module], budget: str | int, *given: Any, **asked: Any) -> Report:
    torch._dynamo.reset()
    inputs = given or (many_rows(),)
    return autoremat.plan(make(), *inputs, budget=budget, **(ASKED | asked))


def told(make: Callable[[], nn.Module], budget: str | int, *given: Any, **asked: Any) -> Report:
    return planned(make, budget, *given, goal="throughput", **asked)


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [Residual, Broken])
def test_figures_are_those_of_plans_for_these_budgets(make: type[nn.Module]) -> None:
    """Each is what `plan` finds at that budget by itself, not a point of a line between others.

    A tenth of the budget more, a tenth less, and one that nothing needs.
    """
    budget = TIGHT if make is Residual else 500_000
    report = told(make, budget)
    found = report.throughput
    assert found is not None
    assert found.here.budget_nbytes == budget == report.budget_nbytes
    assert found.here.time_us == pytest.approx(report.predicted_time_us)
    assert found.less.budget_nbytes == budget - budget // 10
    assert found.more.budget_nbytes == budget + budget // 10
    assert found.unlimited.budget_nbytes is None
    for at in (found.less, found.more, found.unlimited):
        alone = planned(make, at.budget_nbytes or "1GB")
        assert at.fits
        assert alone.predicted_time_us == pytest.approx(at.time_us)
        assert found.per_second(at) == pytest.approx(1e6 * 256 / alone.predicted_time_us)
    assert found.less.time_us > found.here.time_us > found.unlimited.time_us
    assert found.runs == len(report.graphs)


def test_from_what_is_enough_on_more_memory_buys_nothing() -> None:
    """At that budget the step is as fast as under a hundred times as much; below it, it is not."""
    found = told(Residual, TIGHT).throughput
    assert found is not None
    enough = found.enough_nbytes
    fastest = planned(Residual, 100 * enough).predicted_time_us
    assert planned(Residual, enough).predicted_time_us == fastest
    assert planned(Residual, TIGHT).predicted_time_us > fastest
    above = told(Residual, 2 * enough).throughput
    assert above is not None
    assert above.here.time_us == above.less.time_us == above.more.time_us == fastest
    assert above.enough_nbytes == enough
    assert "would buy nothing" not in found.text()
    assert "more would buy nothing" in above.text()
    assert "less would cost nothing" in above.text()


def test_the_goal_does_not_change_the_plan() -> None:
    """Of one batch, the fastest step is the one with the most samples per second."""
    one, other = planned(Residual, TIGHT), told(Residual, TIGHT)
    assert one.graphs[0].values == other.graphs[0].values
    assert one.throughput is None
    assert one.predicted_peak_nbytes == other.predicted_peak_nbytes


def test_a_budget_below_which_nothing_fits() -> None:
    """What a step of memory less would need is said, and is what a refusal names."""
    report = told(Residual, "min")
    found = report.throughput
    assert found is not None
    assert found.here.budget_nbytes == report.predicted_peak_nbytes
    assert not found.less.fits
    with pytest.raises(InfeasibleBudget) as caught:
        planned(Residual, found.less.budget_nbytes or 0)
    assert found.less.needed_nbytes == caught.value.smallest_peak_nbytes
    assert "would be too little: no plan fits" in found.text()


def test_tokens_are_counted_where_they_are_looked_up() -> None:
    tokens = torch.randint(0, 50, (4, 16))
    found = told(Tokens, "1GB", tokens).throughput
    assert found is not None
    assert (found.samples, found.tokens) == (4, 64)
    assert found.tokens_per_second(found.here) == pytest.approx(16 * found.per_second(found.here))
    assert "batch 4" in found.text()


def test_the_largest_batch_of_a_range_counts() -> None:
    """For which the plan is made."""
    found = told(Residual, "1GB", many_rows(8), sizes={"batch": (2, 256)}).throughput
    assert found is not None
    assert found.samples == 256


def test_training_is_told_of_without_being_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan for another budget is made before the report is asked for, and none a second time."""
    chosen: list[int] = []
    choose = throughput.choose

    def counted(subject: Any, budget_nbytes: int, *args: Any, **kwargs: Any) -> Any:
        chosen.append(budget_nbytes)
        return choose(subject, budget_nbytes, *args, **kwargs)

    monkeypatch.setattr(throughput, "choose", counted)
    model = optimized(Residual, TIGHT, goal="throughput", time_limit=20.0)
    for _ in range(2):
        step(model, (many_rows(),))
    assert not chosen
    first = autoremat.report(model).throughput
    assert 1 <= len(chosen) <= 3
    count = len(chosen)
    assert autoremat.report(model).throughput == first == told(Residual, TIGHT).throughput
    assert len(chosen) == count + count  # the second half is of the plan that is made apart
    step(model, (many_rows(),))
    assert autoremat.report(model).is_within_budget


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_of_several_graphs_is_told_of_once_it_is_planned_for_good() -> None:
    """Before, its plans are lean for a step or two: what they take says nothing."""
    model = optimized(Broken, 500_000, goal="throughput", time_limit=20.0)
    with pytest.warns(OverBudgetWarning):
        step(model, (many_rows(),))
    early = autoremat.report(model)
    assert early.throughput is None
    assert "planned for good" in early.no_throughput in early.summary()
    for _ in range(3):
        step(model, (many_rows(),))
    report = autoremat.report(model)
    found = report.throughput
    assert found is not None
    assert found.runs == 3
    assert found.here.time_us == pytest.approx(report.predicted_time_us)
    assert found.less.time_us >= found.here.time_us >= found.more.time_us
    step(model, (many_rows(),))
    again = autoremat.report(model)
    assert again.graphs == report.graphs  # what runs stays as it is
    assert again.throughput == found


def test_the_backend_takes_a_goal_too() -> None:
    torch._dynamo.reset()
    options = {"budget": TIGHT, "compiler": "eager", "verbose": False, "goal": "throughput"}
    model = Residual()
    compiled = torch.compile(model, backend="autoremat", options=options)
    compiled(many_rows()).backward()
    found = autoremat.report(model).throughput
    assert found is not None
    assert found.samples == 256


def test_a_search_that_fails_is_no_end_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = optimized(Residual, TIGHT, goal="throughput")
    step(model, (many_rows(),))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(throughput, "choose", fail)
    report = autoremat.report(model)
    assert report.throughput is None
    assert "RuntimeError: no memory left" in report.no_throughput


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match='goal is "time" or "throughput", not \'speed\''):
        autoremat.optimize(Residual(), "1GB", goal="speed")
    with pytest.raises(ValueError, match='which policy="sqrt" does not heed'):
        autoremat.optimize(Residual(), "1GB", goal="throughput", policy="sqrt")
    with pytest.raises(ValueError, match="not of what is reserved"):
        told(Residual, "1GB reserved", device="H100")


@pytest.mark.thorough
@pytest.mark.inductor
def test_generated_kernels_are_what_counts_where_their_times_are_known() -> None:
    """As in `fit`; a budget that torch's own partition fits is above the need."""
    report = told(Residual, 300_000, compiler="inductor")
    found = report.throughput
    assert found is not None
    assert found.is_of_kernels
    assert report.code_times_us is not None
    assert found.here.time_us == pytest.approx(report.code_times_us[1])
    less = planned(Residual, found.less.budget_nbytes or 0, compiler="inductor")
    assert less.code_times_us is not None
    assert found.less.time_us == pytest.approx(less.code_times_us[1])
    assert found.less.needed_nbytes == less.predicted_peak_nbytes
