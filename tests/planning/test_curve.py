"""The curve of a report: plans, classic strategies and torch's settings over one problem."""

from dataclasses import replace

import pytest
import torch

import autoremat
from autoremat.planning import curve
from autoremat.planning.curve import unbeaten
from autoremat.reporting import CurvePoint, PointKind
from tests.tiny import Layers, rows


class Residual(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh().sin()
        return x.square().mean()


def curve_of(model, budget="1GB", **options):
    options = {"compiler": "eager", "verbose": False, "time_limit": 40.0, "curve": 4} | options
    report = autoremat.plan(model, rows(), budget=budget, **options)
    return report, {point.label: point for point in report.curve}


@pytest.fixture(scope="module")
def whole():
    return curve_of(Residual(4))


def test_the_chosen_plan_is_a_point(whole):
    report, points = whole
    assert points["this plan"].kind is PointKind.CHOSEN
    assert points["this plan"].peak_nbytes == report.predicted_peak_nbytes


def test_torch_settings_are_points(whole):
    """A smaller budget of torch saves less; without one it is no slower than with one."""
    _, points = whole
    torchs = [point for point in points.values() if point.kind is PointKind.TORCH]
    assert {p.label for p in torchs} >= {"torch.compile", "torch, budget 0.5", "torch, budget 0.25"}
    assert points["torch, budget 0.25"].peak_nbytes <= points["torch, budget 0.5"].peak_nbytes
    assert points["torch.compile"].time_us <= points["torch, budget 0.25"].time_us
    assert points["torch, budget 0.25"].time_us > points["save-all"].time_us


def test_what_time_does_not_reach_is_told_of():
    """In the facts, hence in the JSON; in the summary; on the page."""
    report, points = curve_of(Residual(2), time_limit=0.001)
    assert points["this plan"]
    assert not [point for point in points.values() if point.kind is PointKind.TORCH]
    solved, settings = report.curve_left_out
    assert solved == "2 of 4 budgets were solved in the time limit"
    assert settings.startswith("without torch.compile; torch, budget 0.5; ")
    assert settings.endswith("(the time limit was over)")
    for sentence in report.curve_left_out:
        assert sentence in report.summary()
        assert sentence in report.to_html()
        assert sentence in report.to_json()


def test_a_whole_curve_lacks_nothing(whole):
    report, _ = whole
    assert not report.curve_left_out
    assert "Not all of it" not in report.to_html()


@pytest.mark.thorough
def test_a_partition_that_torch_cannot_make_is_left_out_with_the_reason(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("torch cannot")

    monkeypatch.setattr(autoremat._torch, "min_cut", fail)
    report, points = curve_of(Residual(2))
    assert points["save-all"].kind is PointKind.STRATEGY
    assert not [point for point in points.values() if point.kind is PointKind.TORCH]
    (sentence,) = report.curve_left_out
    assert sentence.startswith("without torch.compile; torch, budget 0.5")
    assert sentence.endswith("(RuntimeError: torch cannot)")


@pytest.mark.thorough
def test_no_plan_is_above_a_strategy_that_its_peak_holds(monkeypatch):
    """The solver finds only the two ends, and both at the worst time that it could have."""

    def slow(point):
        return replace(point, time_us=10 * point.time_us)

    point = curve._point

    def planned(subject, plan, label, kind):
        found = point(subject, plan, label, kind)
        return slow(found) if kind is PointKind.PLAN else found

    monkeypatch.setattr(curve, "_point", planned)
    report, _ = curve_of(Residual(4))
    shown = [p for p in report.curve if p.kind is PointKind.PLAN]
    rivals = [p for p in report.curve if p.kind is not PointKind.PLAN]
    for plan in shown:
        fits = [p.time_us for p in rivals if p.peak_nbytes <= plan.peak_nbytes]
        assert all(plan.time_us < time_us for time_us in fits)
    assert PointKind.STRATEGY in {point.kind for point in unbeaten(report.curve)}


def test_unbeaten_points_fall():
    """Of equal points the first one stays."""
    points = [
        CurvePoint(peak, time_us, label, PointKind.PLAN)
        for peak, time_us, label in [(3, 1, "c"), (1, 3, "a"), (2, 3, "slow"), (1, 3, "again")]
    ]
    assert [point.label for point in unbeaten(points)] == ["a", "c"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_several_graphs_have_no_curve_and_say_so():
    class Broken(Residual):
        def forward(self, x):
            x = self.layers[0](x).sin()
            torch._dynamo.graph_break()
            return super().forward(x)

    report, points = curve_of(Broken(2))
    assert not points
    assert report.curve_left_out == ("the curves of 2 graphs do not add up to one",)


@pytest.mark.parametrize("budget", ["1GB", "min"])
def test_a_curve_has_plans_whose_values_may_wait(budget, tmp_path):
    """Beside those without copies: as lean or leaner, and never slower at the same peak."""
    report, points = curve_of(Residual(4), budget, offload=f"disk:{tmp_path}")
    away = [point for point in report.curve if point.kind is PointKind.OFFLOAD]
    if report.graphs[0].waiting.trips:
        away.append(points["this plan"])
    alone = [point for point in report.curve if point.kind is PointKind.PLAN]
    assert away
    assert alone
    assert min(p.peak_nbytes for p in away) <= min(p.peak_nbytes for p in alone)
    for mine in away:
        leaner = [p.time_us for p in alone if p.peak_nbytes <= mine.peak_nbytes]
        assert all(mine.time_us < time_us for time_us in leaner)


def test_without_a_host_no_value_waits(whole):
    report, _ = whole
    assert PointKind.OFFLOAD not in {point.kind for point in report.curve}
