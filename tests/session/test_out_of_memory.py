"""Where memory runs out in a first call, it is taken once more under the leanest plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from tests.tiny import Chain, many_rows, rows
from tests.training import UNBOUNDED, close, make_seeded, optimized, recomputes, step

STAGES = ("autoremat.session.session.graph_of", "autoremat.session.steps.note_run")


@pytest.fixture
def runs_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets memory run out where a name of the package is called, so many times."""

    def let_run_out(name: str, times: int = 1, skipped: int = 0) -> None:
        left = [times, skipped]
        module, _, function = name.rpartition(".")
        original = getattr(importlib.import_module(module), function)

        def call(*args: Any, **kwargs: Any) -> Any:
            left[1] -= 1
            if left[0] and left[1] < 0:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            return original(*args, **kwargs)

        monkeypatch.setattr(name, call)

    return let_run_out


class Dropping(Chain):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Broken(nn.Module):
    """Its first graph has written its statistics when the second one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x)).square().mean()


@pytest.mark.parametrize("stage", STAGES)
def test_the_call_is_taken_again_as_lean_as_can_be(stage: str, runs_out: Callable[..., None]):
    """While it is recorded or as it runs; said once, and results are eager mode's."""
    runs_out(stage)
    model = optimized(Dropping, UNBOUNDED, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match="AR117: Memory ran out") as told:
        ours = step(model, (many_rows(),))
    assert len(told) == 1
    close(step(make_seeded(Dropping), (many_rows(),)), ours, 1e-6)
    report = autoremat.report(model)
    assert recomputes(model) > 0
    assert report.predicted_peak_nbytes == report.budget_nbytes
    step(model, (many_rows(),))  # nothing more is said


def test_it_is_taken_again_once(runs_out: Callable[..., None]):
    """Then it is the user's to decide; and so it is of the leanest plan, and where strict."""
    runs_out(STAGES[1], times=2)
    with pytest.raises(torch.OutOfMemoryError):
        step(optimized(Chain, UNBOUNDED, strict=False), (many_rows(),))
    for options in ({"budget": "min", "strict": False}, {"budget": UNBOUNDED}):
        runs_out(STAGES[1])
        with pytest.raises(torch.OutOfMemoryError):
            step(optimized(Chain, **options), (many_rows(),))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_call_that_has_written_in_place_is_not_taken_again(runs_out: Callable[..., None]):
    """Statistics would count the batch twice."""
    runs_out(STAGES[1], skipped=1)
    model = optimized(Broken, UNBOUNDED, strict=False)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        step(model, (rows(),))
    assert "has written to parameters, buffers or inputs" in raised.value.__notes__[0]
    assert model.norm.num_batches_tracked == 1


def test_a_step_that_is_known_is_not_guarded(runs_out: Callable[..., None]):
    """What runs out of memory later is not the plan's first run."""
    model = optimized(Chain, UNBOUNDED, strict=False)
    step(model, (many_rows(),))
    runs_out(STAGES[1])
    with pytest.raises(torch.OutOfMemoryError):
        step(model, (many_rows(),))
