"""What trainers' callbacks have in common, without a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoremat
from autoremat.integrations.followed import PLAN, Followed

QUICK = {"compiler": "eager", "verbose": False}


def model() -> nn.Module:
    """One that has something to plan."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sin().square().mean()

    return Net()


def test_a_model_that_was_optimised_before_stays_as_it_is_and_that_is_told() -> None:
    """Another budget is not heeded in silence; a second run of the same trainer says nothing."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    with pytest.warns(UserWarning, match=r"optimised before.* budget '10MB'"):
        Followed("10MB", dict(QUICK)).begin(given, [])
    followed, plain = Followed("1GB", dict(QUICK)), model()
    followed.begin(plain, [])
    followed.begin(plain, [])


def test_a_plan_of_a_checkpoint_gives_way_to_what_the_user_decided(tmp_path: Path) -> None:
    """Options that no known plan goes with are taken as they are."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    autoremat.save_plan(given, tmp_path / PLAN)
    options = {**QUICK, "offload": f"disk:{tmp_path}"}
    Followed("1GB", options).begin(model(), [], tmp_path)
