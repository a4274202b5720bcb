"""Budgets that cannot be met: the error names the smallest peak, and that is accepted."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from autoremat_solver import CertificateWarning, Solution, Solver, simulate
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.plan import Status
from autoremat_solver.policies import recompute_all
from torch import Tensor, nn

import autoremat
import autoremat.planning.pipeline
from autoremat.memory.meter import resident_nbytes
from tests.tiny import Chain, Dropout, many_rows
from tests.training import (
    UNBOUNDED,
    measured,
    optimized,
    refusal,
    step,
)

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def test_an_infeasible_budget_names_the_smallest_peak():
    """The error is raised as itself before the step, and its smallest peak is then accepted."""
    model = optimized(Chain, 1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        model(many_rows())
    error = caught.value
    assert error.budget_nbytes == 1
    assert 0 < error.floor_nbytes <= error.smallest_peak_nbytes
    assert error.resident_nbytes == resident_nbytes(model, many_rows())
    assert error.largest[0].nbytes == many_rows().nbytes
    assert error.source.startswith("tiny.py:")
    assert error.step
    assert "Raise the budget" in str(error)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in model.parameters())
    accepted = optimized(Chain, error.smallest_peak_nbytes)
    step(accepted, (many_rows(),))
    assert measured(accepted, (many_rows(),)) <= error.smallest_peak_nbytes


@pytest.mark.thorough
def test_one_byte_less_than_the_proven_floor_is_refused():
    """The smallest peak of a plain chain is exact: one byte less raises again."""
    smallest = refusal(Chain, (many_rows(),)).smallest_peak_nbytes
    assert refusal(Chain, (many_rows(),), smallest - 1).smallest_peak_nbytes == smallest


@pytest.mark.thorough
def test_the_text_budget_of_the_remedy_is_accepted():
    """The error's own advice can be pasted."""
    smallest = refusal(Chain, (many_rows(),)).smallest_peak_nbytes
    step(optimized(Chain, f"{smallest}B"), (many_rows(),))


@pytest.mark.thorough
def test_an_infeasible_budget_survives_pickling():
    """A worker process may raise it."""
    error = refusal(Chain, (many_rows(),))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is autoremat.InfeasibleBudget
    assert str(again) == str(error)
    assert again.largest == error.largest


def test_the_argument_of_the_error_is_its_text():
    """As raised from within Dynamo: `args` and `repr` say what `str` does."""
    error = refusal(Chain, (many_rows(),))
    (text,) = error.args
    assert text.startswith(str(error))


def test_equal_values_are_named_in_the_order_in_which_they_are_made():
    """The same model gives the same message in every process, whatever Python hashes."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8, bias=False), nn.Dropout(0.5))]
    ask = {"budget": "2kB", "compiler": "eager", "policy": "save-all", "verbose": False}
    with pytest.raises(autoremat.OverBudget) as refusal:
        autoremat.plan(nn.Sequential(*layers), torch.randn(512, 8), **ask, time_limit=1.0)
    values = [value for value in refusal.value.largest if value.kind != "its workspace"]
    assert len({value.nbytes for value in values}) == 1
    expected = ["native_dropout#0", *(f"native_dropout_{n}#0" for n in range(1, 5))]
    assert [value.name for value in values] == expected[: len(values)]
    assert len(values) >= 4


def test_what_an_operation_needs_for_itself_is_named_among_what_is_live():
    """A convolution's backward copies what it reads; without it the sum could not be understood."""
    with pytest.raises(autoremat.InfeasibleBudget) as refusal:
        autoremat.plan(
            nn.Conv2d(32, 32, 7, padding=3, groups=32),
            torch.randn(2, 32, 16, 16),
            budget="150kB",
            compiler="eager",
            verbose=False,
        )
    error = refusal.value
    (own,) = (value for value in error.largest if value.kind == "its workspace")
    assert own.name == error.step
    live_nbytes = error.resident_nbytes + sum(value.nbytes for value in error.largest)
    assert 0 <= error.smallest_peak_nbytes - live_nbytes < own.nbytes


def test_a_refused_model_can_be_given_another_budget():
    """After the error the same object trains under a budget that fits."""
    model = optimized(Chain, 1)
    for _ in range(2):
        with pytest.raises(autoremat.InfeasibleBudget) as caught:
            model(many_rows())
    smallest = caught.value.smallest_peak_nbytes
    autoremat.optimize(model, smallest, compiler="eager", verbose=False)
    step(model, (many_rows(),))
    assert autoremat.report(model).budget_nbytes == smallest


class Codebook(nn.Module):
    """Vector quantisation whose codebook moves during the step."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)
        self.register_buffer("codes", torch.randn(16, 64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        nearest = torch.cdist(h.detach(), self.codes).argmin(-1)
        code = self.codes[nearest]
        self.codes.index_add_(0, nearest, 0.01 * h.detach())
        code = h + (code - h).detach()
        later = (h - self.codes[nearest].detach()).square().mean()
        return torch.tanh(self.b(code)).square().mean() + later


def test_no_budget_finds_less_than_the_smallest_peak():
    """The smallest peak that the error names is the smallest that any budget leads to."""
    x = torch.randn(128, 64)
    smallest = refusal(Codebook, (x,)).smallest_peak_nbytes
    model = optimized(Codebook, smallest)
    step(model, (x,))
    assert autoremat.report(model).predicted_peak_nbytes == smallest


class StarvedSolver(Solver):
    """Its search ended at the plan that runs everything again, draws from their states included."""

    def solve(self, budget_nbytes: int) -> Solution:
        plan = recompute_all(self.problem)
        timeline = simulate(self.problem, plan)
        return replace(self.fastest(), plan=plan, timeline=timeline, status=Status.INFEASIBLE)


def test_no_refusal_names_more_than_a_plan_needs_that_is_known(monkeypatch: pytest.MonkeyPatch):
    """With few rows the states of generators are most of it: only what repeats draws holds them."""
    inputs = (many_rows(4),)
    saved = optimized(Dropout, UNBOUNDED, policy="save-all")
    step(saved, inputs)
    save_all_nbytes = autoremat.report(saved).predicted_peak_nbytes
    monkeypatch.setattr(autoremat.planning.pipeline, "Solver", StarvedSolver)
    error = refusal(Dropout, inputs)
    assert error.floor_nbytes <= error.smallest_peak_nbytes <= save_all_nbytes
    model = optimized(Dropout, error.smallest_peak_nbytes)
    step(model, inputs)
    assert autoremat.report(model).predicted_peak_nbytes == error.smallest_peak_nbytes


def test_what_the_backward_makes_is_not_called_an_activation():
    """Activations are the forward's; gradients that arrive or are handed out are named as such."""
    error = refusal(Chain, (many_rows(),))
    kinds = {value.name: value.kind for value in error.largest}
    assert any(kind == "made by the backward" for kind in kinds.values())
    assert all(kind != "activation" for name, kind in kinds.items() if "backward" in name)


def test_a_bound_above_a_plan_costs_the_certificate_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is told with both numbers; whoever is strict gets an error."""
    monkeypatch.setattr(Bounds, "time_us", lambda *_, **__: 1e12)
    model = optimized(Chain, UNBOUNDED, strict=False)
    with pytest.warns(CertificateWarning, match="bound in us is 1000000000000, but"):
        step(model, (many_rows(),))
    report = autoremat.report(model)
    assert report.status is Status.UNPROVEN
    assert report.gap == float("inf")
    assert "no proven bound" in report.summary()
    with pytest.raises(autoremat.FallbackError, match="bound in us is 1000000000000, but"):
        step(optimized(Chain, UNBOUNDED, strict=True), (many_rows(),))


def test_a_budget_below_what_is_resident_is_refused_before_any_solve(
    monkeypatch: pytest.MonkeyPatch,
):
    """With what is resident by parts, and a budget that is accepted; nothing is searched for."""

    def solving(*_: object) -> Solution:
        raise AssertionError("a budget that no plan can fit was searched for")

    inputs = (many_rows(),)
    with monkeypatch.context() as patch:
        for name in ("solve", "smallest_peak", "fastest"):
            patch.setattr(Solver, name, solving)
        error = refusal(Chain, inputs, resident_nbytes(Chain(), inputs) - 1)
    assert error.is_resident_too_much
    assert error.resident.batch_nbytes == many_rows().nbytes
    assert error.resident.parameters_nbytes == sum(p.nbytes for p in Chain().parameters())
    assert error.floor_nbytes == error.resident_nbytes == resident_nbytes(Chain(), inputs)
    assert "batch)" in str(error)
    model = optimized(Chain, error.smallest_peak_nbytes)
    step(model, inputs)
    assert autoremat.report(model).predicted_peak_nbytes <= error.smallest_peak_nbytes


def test_a_policy_above_a_budget_below_what_is_resident_is_refused_before_any_solve(
    monkeypatch: pytest.MonkeyPatch,
):
    """The error names both peaks: of the policy, and of what `optimal` is accepted with."""

    def solving(*_: object) -> Solution:
        raise AssertionError("a budget that no plan can fit was searched for")

    monkeypatch.setattr(Solver, "solve", solving)
    error = refusal(Chain, (many_rows(),), 1, policy="save-all")
    assert isinstance(error, autoremat.OverBudget)
    assert error.resident_nbytes < error.optimal_peak_nbytes <= error.smallest_peak_nbytes
