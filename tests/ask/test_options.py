"""What the user asked for, as one value."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.ask import free as free_memory
from autoremat.ask.budget import Budget
from autoremat.ask.options import Options
from autoremat.cost.device_specs import find_spec
from autoremat.errors import SteeringError
from autoremat.graph.devices import device_nbytes
from tests.tiny import Chain, Residual, many_rows
from tests.training import measured, optimized, refusal, step

CPU = torch.device("cpu")
WHO_NOT_WHAT = {"model", "optimizer"}  # what a mapping of options cannot say


class Broken(Chain):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__(layers=3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](torch.tanh(self.layers[1](x))))
        torch._dynamo.graph_break()
        return super().forward(x)


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


def test_auto_is_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the process holds already; of a device that is not here, all of it is free."""
    total, free, held = device_nbytes(CPU), 3 << 30, free_memory._process_nbytes()
    monkeypatch.setattr(free_memory, "free_nbytes", lambda _device: free)
    monkeypatch.setattr(free_memory, "_process_nbytes", lambda: held)
    reserve = max(int(0.05 * total), 512_000_000)
    found = Options.parse(budget="auto").on(CPU)
    assert found.budget_nbytes(CPU) == free + held - reserve
    spec = find_spec("T4")
    found = Options.parse(budget="auto", spec=spec).on(CPU)
    assert found.budget_nbytes(CPU) == int(0.95 * spec.memory_nbytes)
    given = Options.parse(budget="1GB")
    assert given.on(CPU) is given


def test_auto_where_nothing_is_left_or_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Never a guess."""
    monkeypatch.setattr(free_memory, "free_nbytes", lambda _device: 0)
    monkeypatch.setattr(free_memory, "_process_nbytes", lambda: 1000)
    with pytest.raises(SteeringError, match="kept in reserve: nothing is left"):
        Options.parse(budget="auto").on(CPU)
    monkeypatch.undo()
    monkeypatch.setattr(free_memory, "_PROCESS", tmp_path / "none")
    with pytest.raises(SteeringError, match="does not say how much of its memory is free"):
        Options.parse(budget="auto").on(CPU)


def test_auto_is_read_when_the_first_call_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: what the step itself takes then does not count against it."""
    found = iter((10**9, 1))
    monkeypatch.setattr("autoremat.ask.options.auto_nbytes", lambda _device: next(found))
    model = optimized(Chain, "auto")
    for _ in range(2):
        step(model, (many_rows(),))
    assert autoremat.report(model).budget_nbytes == 10**9


# Dynamo looks at `.grad` of what it resumes with after a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("make", [Residual, Broken])
def test_the_least_is_never_refused(make: type[nn.Module]) -> None:
    """It is what a refusal would name, and what is measured; nothing is told."""
    smallest = refusal(make, (many_rows(),)).smallest_peak_nbytes
    model = optimized(make, "min")
    for _ in range(2):  # of several graphs the first step shows how often each runs
        step(model, (many_rows(),))
    report = autoremat.report(model)
    assert report.is_within_budget
    assert report.budget_nbytes == report.predicted_peak_nbytes
    peak_nbytes = measured(model, (many_rows(),))
    if len(report.graphs) == 1:
        assert report.budget_nbytes == smallest == peak_nbytes
    else:  # gradients of layers that both graphs read count in each
        assert 0.96 * report.budget_nbytes <= peak_nbytes <= report.budget_nbytes


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


@pytest.mark.parametrize(("written", "nbytes"), [("2GB", 2 * 10**9), ("4096", 4096)])
def test_the_environment_gives_a_budget_where_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, written: str, nbytes: int
) -> None:
    """As text, in the forms of the command line; what is given in code counts more."""
    monkeypatch.setenv("AUTOREMAT_BUDGET", written)
    assert Options.parse().budget_nbytes(CPU) == nbytes
    assert Options.parse(budget="1GB").budget_nbytes(CPU) == 10**9


def test_a_malformed_budget_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other is."""
    monkeypatch.setenv("AUTOREMAT_BUDGET", "much")
    with pytest.raises(ValueError, match="no number with a unit"):
        Options.parse()
