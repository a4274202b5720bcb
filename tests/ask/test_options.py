"""What the user asked for, as one value."""

from __future__ import annotations

import inspect

import pytest
import torch

import autoremat
from autoremat.ask.budget import Budget
from autoremat.ask.options import Options
from autoremat.cost.device_specs import find_spec
from autoremat.graph.devices import device_nbytes

CPU = torch.device("cpu")
WHO_NOT_WHAT = {"model", "optimizer"}  # what a mapping of options cannot say


def test_a_mapping_and_named_arguments_make_the_same_options() -> None:
    """What is not ours is Inductor's."""
    named = Options.parse(budget="1GB", policy="sqrt", save="layers.3", time_limit=2, strict=True)
    given = {"budget": 10**9, "policy": "sqrt", "save": ("layers.3",), "time_limit": 2.0}
    assert Options.from_mapping({**given, "strict": 1}) == named
    assert Options.from_mapping({"budget": "1GB", "max_autotune": False}) == (
        Options.parse(budget="1GB", inductor={"max_autotune": False})
    )
    with pytest.raises(ValueError, match="'inductor' is no option of autoremat, nor of Inductor"):
        Options.from_mapping({"budget": "1GB", "inductor": {}})


@pytest.mark.parametrize(
    "name", sorted(inspect.signature(autoremat.optimize).parameters.keys() - WHO_NOT_WHAT)
)
def test_the_backend_knows_each_option_of_optimize(name: str) -> None:
    """None of them goes on to Inductor, and each has the same default."""
    default = inspect.signature(autoremat.optimize).parameters[name].default
    given = {"budget": "1GB"} | ({} if name == "budget" else {name: default})
    assert Options.from_mapping(given) == Options.parse(budget="1GB")


def test_a_share_is_of_the_device_or_of_the_memory_that_is_planned_for() -> None:
    """The device at hand, unless the plan is for another."""
    assert Options.parse(budget="50%").budget_nbytes(CPU) == device_nbytes(CPU) // 2
    spec = find_spec("T4")
    assert Options.parse(budget="50%", spec=spec).budget_nbytes(CPU) == spec.memory_nbytes // 2
    assert Options.parse(budget=700, spec=spec).budget_nbytes(CPU) == 700


def test_a_strategy_without_a_budget_has_the_whole_device() -> None:
    """Only where it decides the plan alone."""
    assert Options.parse(policy="sqrt").budget == Budget.parse("100%")
    with pytest.raises(ValueError, match="needs a budget"):
        Options.parse()


@pytest.mark.parametrize("given", [-1, "soon", True, float("nan"), 10**400])
def test_a_time_limit_that_is_no_number_of_seconds(given: object) -> None:
    """As any option at fault, it is named."""
    with pytest.raises(ValueError, match="time_limit is a number of seconds"):
        Options.parse(budget="1GB", time_limit=given)  # type: ignore[arg-type]
