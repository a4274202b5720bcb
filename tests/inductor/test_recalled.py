"""A second process with the same step traces nothing below Dynamo, and plans nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from operator import attrgetter, methodcaller
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import fresh_cache

import autoremat
from autoremat.ask.options import Options
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.choice import Alone
from autoremat.planning.figures import Figures
from autoremat.planning.found_before import FoundBefore
from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part, Planned, Recalled
from autoremat.session import first_plan, recalling
from autoremat.session.recalled import Remembered, keeping, may_be_recalled
from autoremat.session.steps import Steps
from tests.tiny import Chain, many_rows
from tests.training import make_seeded, optimized

pytestmark = pytest.mark.inductor
BUDGET = "220kB"
MODULE = fx.symbolic_trace(nn.Identity())


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """No code, and no plan."""
    torch.compiler.reset()
    with fresh_cache():
        yield


def trained(budget: str | int = BUDGET, **options: Any) -> tuple[nn.Module, list[torch.Tensor]]:
    """As in another process: a model after a step, and the step's gradients."""
    torch.compiler.reset()
    model, x = make_seeded(Chain), many_rows()
    options = {"verbose": False, "strict": True, **options}
    model = autoremat.optimize(model, budget=budget, **options)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
    return model, [p.grad for p in model.parameters() if p.grad is not None]


def counting_plans() -> Any:
    """Searches for a plan, and plans that are stored, counted."""
    return mock.patch.object(first_plan, "choose", wraps=first_plan.choose)


def test_a_step_that_was_planned_before_is_planned_no_more() -> None:
    """Its gradients are the same to the bit; what a report tells is made when it is asked for."""
    with counting_plans() as plans:
        first, expected = trained()
        report = autoremat.report(first)
        assert plans.call_count == 1
        second, found = trained()
        assert plans.call_count == 1
        again = autoremat.report(second)
        assert plans.call_count == 2
    assert all(map(torch.equal, found, expected))
    assert again.predicted_peak_nbytes == report.predicted_peak_nbytes
    assert again.values == report.values
    assert again.graphs[0].method == report.graphs[0].method
    x = many_rows()
    second.zero_grad()
    before = resident_nbytes(second, x)
    measured = before + autoremat.measure_peak(lambda: second(x).backward(), device="cpu")
    assert measured <= again.predicted_peak_nbytes <= again.budget_nbytes


def test_without_what_was_kept_it_is_planned_anew() -> None:
    """Torch's cache alone tells of no plan; from then on both know."""
    trained()
    FoundBefore.remove()
    with counting_plans() as plans:
        _, found = trained()
        assert plans.call_count == 1
        _, again = trained()
        assert plans.call_count == 1
    assert all(map(torch.equal, found, again))


def test_another_budget_is_another_question() -> None:
    """It is planned."""
    trained()
    with counting_plans() as plans:
        trained("200MB")
    assert plans.call_count == 1


@pytest.mark.thorough
def test_a_plan_that_runs_is_the_plan_that_is_told() -> None:
    """Also where another one would be found by now."""
    first, _ = trained()
    report = autoremat.report(first)
    second, _ = trained()
    richer = autoremat.plan(make_seeded(Chain), many_rows(), budget="200MB", verbose=False)
    assert richer.predicted_peak_nbytes > report.predicted_peak_nbytes
    choose = first_plan.choose

    def choose_richer(subject: Any, budget: int, *given: Any, **keywords: Any) -> Any:
        return choose(subject, 200_000_000, *given, **keywords)

    with mock.patch.object(first_plan, "choose", choose_richer):
        again = autoremat.report(second)
    assert again.predicted_peak_nbytes == report.predicted_peak_nbytes
    assert [v.action for v in again.values] == [v.action for v in report.values]


@pytest.mark.thorough
def test_a_report_is_of_the_step_as_it_was_traced() -> None:
    """Under the casts that held then, whoever asks, and wherever."""
    with torch.autocast("cpu", torch.bfloat16):
        first, expected = trained("200kB")
    report = autoremat.report(first)
    with counting_plans() as plans, torch.autocast("cpu", torch.bfloat16):
        second, found = trained("200kB")
    assert plans.call_count == 0
    assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert autoremat.report(second).values == report.values
    with counting_plans() as plans:
        trained()
    assert plans.call_count == 1


@pytest.mark.thorough
def test_a_question_that_cannot_be_put_is_none() -> None:
    """The step is planned as ever."""
    with mock.patch.object(recalling, "question_of", side_effect=RuntimeError("no")):
        _, found = trained()
    assert found


SEARCHED = {"budget": "1MB"}
NOT_RECALLED = {
    "op by op": {"compiler": "eager"},
    "other plans are tried": {"tune": 3},
    "the budget varies": {"budget": "auto"},
    "modules are named": {"save": "layers.0"},
    "a strategy decides": {"policy": "every-layer"},
}


@pytest.mark.parametrize("options", NOT_RECALLED.values(), ids=NOT_RECALLED)
def test_what_torchs_key_does_not_tell_is_not_recalled(options: dict[str, Any]) -> None:
    """Names of modules, and what is another thing each time."""
    assert may_be_recalled(Steps(Options.parse(**SEARCHED)), MODULE, [torch.ones(2)])
    assert not may_be_recalled(
        Steps(Options.parse(**{**SEARCHED, **options})), MODULE, [torch.ones(2)]
    )


def test_operators_that_are_not_torchs_own_are_not_recalled() -> None:
    """Their autograd formulas are code that no key tells of."""
    library = torch.library.Library("autoremat_recalled", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    steps = Steps(Options.parse(**SEARCHED))
    packet = torch.ops.autoremat_recalled.twice
    for target in (packet, packet.default):
        module = fx.symbolic_trace(nn.Identity())
        node = next(iter(module.graph.nodes))
        with module.graph.inserting_after(node):
            module.graph.call_function(target, (node,))
        assert not may_be_recalled(steps, module, [torch.ones(2)])


def test_sizes_that_vary_are_not_recalled() -> None:
    """Nor numbers among the inputs."""
    assert not may_be_recalled(Steps(Options.parse(**SEARCHED)), MODULE, [torch.ones(2), 3])


@pytest.mark.parametrize("failed", ["", "NotImplementedError: of this"])
def test_nothing_is_kept_where_plans_with_copies_failed(failed: str) -> None:
    """A failure of this process is none of the next one."""
    with mock.patch.object(first_plan, "Planned", wraps=Planned) as made:
        model = optimized(Chain, "1MB")
        model(many_rows()).backward()
    planned = Planned(**_fields(made.call_args))
    choice = replace(planned.choice, alone=Alone(1.0, 1, fits=True, failed=failed))
    part = Part(replace(planned, choice=choice), 0, _resident(model))
    assert (keeping(part, "line", draws_differently=False) is None) == bool(failed)


def test_figures_outlive_their_graph() -> None:
    """As text and back, they tell of every way to run it what the graph tells."""
    with mock.patch.object(first_plan, "Planned", wraps=Planned) as made:
        model = optimized(Chain, "1MB")
        model(many_rows()).backward()
    planned = Planned(**_fields(made.call_args))
    part = Part(planned, 0, _resident(model))
    text = json.dumps(astuple(Remembered.of(part, "line", draws_differently=False)))
    kept = Remembered(*json.loads(text)).kept_figures
    figures = Figures(planned.subject, planned.choice, planned.counted)
    recalled_part = Part(Recalled(kept, lambda: planned), 0, part.resident)
    ways = attrgetter("run_again"), attrgetter("kept"), methodcaller("as_held", 0.0)
    for ours, theirs in ((way(recalled_part), way(part)) for way in ways):
        assert ours.own_peaks == theirs.own_peaks
        assert ours.peak_nbytes(Beside(5, 7)) == theirs.peak_nbytes(Beside(5, 7))
    assert recalled_part.gradients == part.gradients
    assert recalled_part.choice is planned.choice
    assert kept.crossing_nbytes == figures.crossing_nbytes


def _fields(call: Any) -> dict[str, Any]:
    names = ("subject", "choice", "counted", "explain", "stored", "curve")
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _resident(model: nn.Module) -> Any:
    from autoremat.memory.residents import resident_of

    return resident_of(model, (many_rows(),), None, torch.device("cpu"))


def test_a_plan_that_the_graph_cannot_have_is_told() -> None:
    """What is kept belongs to the code; of a graph that has become another, a report says so."""
    trained()
    with FoundBefore.open() as kept, kept._connection:
        rows = kept._connection.execute("SELECT key, value FROM found").fetchall()
        for key, value in ((key, json.loads(text)) for key, text in rows):
            if len(value) == len(fields(Remembered)) and isinstance(value[0], list):
                text = json.dumps(astuple(replace(Remembered(*value), saved=["nothing"])))
                kept._connection.execute("UPDATE found SET value = ? WHERE key = ?", (text, key))
    model, _ = trained()
    with pytest.raises(autoremat.errors.PlanMismatch, match="autoremat cache --clear"):
        autoremat.report(model)


def test_broken_records_are_planned_anew() -> None:
    """A record of another version is none."""
    trained()
    with FoundBefore.open() as kept, kept._connection:
        kept._connection.execute("UPDATE found SET value = '[1, 2]'")
    with counting_plans() as plans:
        trained()
    assert plans.call_count == 1
