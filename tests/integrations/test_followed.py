"""What trainers' callbacks have in common, without a trainer."""

from __future__ import annotations

import warnings
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


def test_a_plan_of_another_device_or_compiler_is_set_aside_with_a_line(tmp_path: Path) -> None:
    """It was chosen by other times; the line says by which."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    path = tmp_path / PLAN
    autoremat.save_plan(given, path)
    text = path.read_text()
    path.write_text(text.replace('"device": "cpu"', '"device": "NVIDIA H100"'))
    with pytest.warns(UserWarning, match=r"on NVIDIA H100; this is .* on cpu"):
        Followed("1GB", dict(QUICK)).begin(model(), [], tmp_path)
    path.write_text(text)
    with pytest.warns(UserWarning, match=r'made with compiler="eager".*compiler="inductor"'):
        Followed("1GB", {"verbose": False}).begin(model(), [], tmp_path)


def test_a_plan_of_another_torch_is_named_where_its_graph_differs(tmp_path: Path) -> None:
    """Where the graph is the same, the plan is taken."""
    given = autoremat.optimize(model(), "1GB", **QUICK)
    given(torch.ones(4, 8)).backward()
    path = tmp_path / PLAN
    autoremat.save_plan(given, path)
    text = path.read_text().replace(f'"{torch.__version__}"', '"2.9.1"')
    for operator in ("aten.sin.default", "aten.sine.default"):
        path.write_text(text.replace("aten.sin.default", operator))
        followed, plain = Followed("1GB", dict(QUICK)), model()
        followed.begin(plain, [], tmp_path)
        followed.step_begins(is_measured=False)
        plain(torch.ones(4, 8)).backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            followed.step_ends()
        lines = [str(one.message) for one in told]
        if operator == "aten.sin.default":
            assert lines == []
        else:
            assert "set aside for 1 of 1 graphs" in lines[0]
            assert "(torch 2.9.1 then" in lines[0]
            assert "aten.sine.default" in lines[0]
