"""The examples train as their first lines say, and show it in one table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("lora", "diffusion")
BRIEF = ("--steps", "8", "--batch", "2", "--layers", "2", "--share", "0.75", "--compiler", "eager")


@pytest.fixture(params=NAMES)
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """As `python examples/NAME.py` finds it and what stands beside it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    yield importlib.import_module(request.param)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
            del sys.modules[name]


def test_a_model_is_the_same_each_time(example: ModuleType) -> None:
    """Before and after begin alike."""
    first, second = (example.make().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.thorough
def test_before_and_after(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The budget holds in every measured step, and the weights are those of the run without it."""
    before, after = example.main(BRIEF)
    assert after.peak_nbytes <= 0.75 * before.peak_nbytes
    assert after.loss == pytest.approx(before.loss, rel=1e-3)
    for ours, theirs in zip(after.weights, before.weights, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    shown = capsys.readouterr().out
    assert "| as it is " in shown
    assert "| autoremat, " in shown
