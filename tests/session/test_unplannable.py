"""What Dynamo or the planner cannot plan runs all the same; test_fallbacks has each code."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
import autoremat.planning.pipeline
from autoremat.cost.calls import Call
from autoremat.cost.made_up_inputs import runs_alone
from tests.tiny import WIDTH, Chain, many_rows
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    optimized,
    step,
)

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


# --- models that cannot be planned -------------------------------------------------------------


def test_a_model_in_eval_mode():
    """It runs unchanged, with a message, until it is put into train mode."""
    with pytest.warns(autoremat.FallbackWarning, match=r"AR203.*eval"):
        model = autoremat.optimize(Chain().eval(), "1GB", compiler="eager", verbose=False)
    model(many_rows())
    with pytest.raises(ValueError, match="first training call"):
        autoremat.report(model)
    model.train()
    step(model, (many_rows(),))
    assert autoremat.report(model).graphs


def test_a_backward_in_eval_mode_is_told_of_once():
    """AR113: it runs unchanged. Without a backward, a call in eval mode has nothing to tell.

    It is no error even if the user is strict: the backward runs already.
    """
    model, x = optimized(Chain, UNBOUNDED, strict=True), many_rows()
    step(model, (x,))
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        with torch.no_grad():
            model(x)
    with pytest.warns(autoremat.FallbackWarning, match=r"AR113.*model\.train\(\)"):
        model(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).backward()
    assert [told.code for told in autoremat.report(model).fallbacks] == ["AR113"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True),
    ],
    ids=["Sequential", "TransformerEncoderLayer"],
)
def test_modules_of_torch_itself(make: Any):
    """An `nn.Sequential` is a model like any other."""
    model = optimized(make, UNBOUNDED)
    step(model, (many_rows().view(4, 64, WIDTH),))
    assert autoremat.report(model).graphs


class Skipped(Chain):
    """Its forward is a frame of a module that Dynamo leaves alone."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_model_that_dynamo_skips():
    """No silent fallback: a warning after the first training call, an error if strict."""
    model = optimized(Skipped, UNBOUNDED, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match="AR105"):
        step(model, (many_rows(),))


@pytest.mark.parametrize("name", ["mkldnn_rnn_layer_backward", "_cudnn_rnn_backward"])
def test_operators_with_opaque_workspaces_are_not_run_alone(name: str):
    """What another kernel packed cannot be made up."""
    target = getattr(torch.ops.aten, name).default
    assert not runs_alone(Call(target, (), {}, (), ()))


# --- when planning fails -----------------------------------------------------------------------


def _break_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **keywords: Any) -> Any:
        raise KeyError("a defect")

    monkeypatch.setattr(autoremat.planning.pipeline, "find_storages", broken)


@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_a_defect_of_the_planner_does_not_lose_the_step(monkeypatch):
    """The graph runs under torch's own partitioner, with a warning that names the reason."""
    _break_planning(monkeypatch)
    model = optimized(Chain, 1, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match=r"AR101.*KeyError.*a defect"):
        ours = step(model, (many_rows(),))
    close(step(make_seeded(Chain), (many_rows(),)), ours, 1e-6)
    report = autoremat.report(model)
    assert len(report.fallbacks) == 1
    assert report.fallbacks[0].code == "AR101"
    assert not report.graphs
    assert "torch" in report.summary()
