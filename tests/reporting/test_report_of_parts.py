"""`report` of a module that was not optimised itself, but is around one that was, or in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BUDGET, WIDTH = "1MB", 32
QUICK: dict[str, Any] = {"compiler": "eager", "verbose": False, "time_limit": 1.0}


class Inner(nn.Module):
    """Layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Wrapper(nn.Module):
    """Calls others one after the other, and takes the mean."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.inner:
            x = one(x)
        return x.square().mean()


def take(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.randn(64, WIDTH)).sum().backward()


@pytest.mark.parametrize("optimised", [0, 1, 2])
def test_a_report_is_of_the_module_that_was_optimised(optimised: int, tmp_path: Path) -> None:
    """Whichever of three, one in the other, is asked for; a plan is stored of that one alone."""
    inner = Inner()
    wrapper = Wrapper(inner)
    modules = [inner, wrapper, nn.ModuleList([wrapper])]
    if optimised == 2:
        modules[2] = Wrapper(wrapper)
    asked = autoremat.optimize(modules[optimised], BUDGET, **QUICK)
    with pytest.raises(ValueError, match="Nothing is planned yet"):
        autoremat.report(modules[optimised - 1])
    take(modules[2] if optimised == 2 else wrapper)
    for module in (*modules, inner.layers[0]):
        assert autoremat.report(module) == autoremat.report(asked)
    with pytest.raises(ValueError, match=f"to be asked for: {type(asked).__name__}"):
        autoremat.save_plan(modules[optimised - 1], tmp_path / "plan.json")


def test_a_part_that_was_optimised_as_well_has_the_report_of_the_whole() -> None:
    """Its own plan is of no step: it is one with the whole."""
    inner = Inner()
    wrapper = Wrapper(inner)
    for module in (inner, wrapper):
        autoremat.optimize(module, BUDGET, **QUICK)
    take(wrapper)
    assert autoremat.report(inner) == autoremat.report(wrapper)


def test_of_several_with_budgets_of_their_own_the_error_names_which() -> None:
    """Where they share one, it is that one's."""
    parts = [Inner(), Inner()]
    for part in parts:
        autoremat.optimize(part, BUDGET, **QUICK)
    wrapper = Wrapper(*parts)
    take(wrapper)
    with pytest.raises(ValueError, match=r"Inner \(`inner.0`\), Inner \(`inner.1`\). Ask for one"):
        autoremat.report(wrapper)
    parts = [Inner(), Inner()]
    autoremat.optimize(parts, BUDGET, **QUICK)
    wrapper = Wrapper(*parts)
    take(wrapper)
    assert autoremat.report(wrapper) == autoremat.report(parts[0])


def test_a_module_that_has_to_do_with_none_was_not_optimised() -> None:
    """The error says what to call."""
    take(Wrapper(autoremat.optimize(Inner(), BUDGET, **QUICK)))
    with pytest.raises(ValueError, match=r"was not optimised: call autoremat\.optimize"):
        autoremat.report(Inner())
