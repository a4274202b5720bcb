"""The curve of a report: plans, classic strategies and torch's settings over one problem."""

import pytest

import autoremat
from autoremat.reporting import PointKind
from tests.tiny import Layers, rows


class Residual(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh().sin()
        return x.square().mean()


def curve_of(model, **options):
    options = {"compiler": "eager", "verbose": False, "time_limit": 40.0, "curve": 4} | options
    report = autoremat.plan(model, rows(), budget="1GB", **options)
    return report, {point.label: point for point in report.curve}


@pytest.fixture(scope="module")
def curve():
    return curve_of(Residual(4))


def test_the_chosen_plan_is_a_point(curve):
    report, points = curve
    assert points["this plan"].kind is PointKind.CHOSEN
    assert points["this plan"].peak_nbytes == report.predicted_peak_nbytes


def test_torch_settings_are_points(curve):
    """A smaller budget of torch saves less; without one it is no slower than with one."""
    _, points = curve
    torchs = [point for point in points.values() if point.kind is PointKind.TORCH]
    assert {p.label for p in torchs} >= {"torch.compile", "torch, budget 0.5", "torch, budget 0.25"}
    assert points["torch, budget 0.25"].peak_nbytes <= points["torch, budget 0.5"].peak_nbytes
    assert points["torch.compile"].time_us <= points["torch, budget 0.25"].time_us
    assert points["torch, budget 0.25"].time_us > points["save-all"].time_us


def test_settings_that_time_does_not_reach_are_left_out():
    _, points = curve_of(Residual(2), time_limit=0.001)
    assert points["this plan"]
    assert not [point for point in points.values() if point.kind is PointKind.TORCH]


def test_a_partition_that_torch_cannot_make_is_no_error(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("torch cannot")

    monkeypatch.setattr(autoremat._torch, "min_cut", fail)
    _, points = curve_of(Residual(2))
    assert points["save-all"].kind is PointKind.STRATEGY
    assert not [point for point in points.values() if point.kind is PointKind.TORCH]
