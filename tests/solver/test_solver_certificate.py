"""A bound or a floor above a plan that exists is told with both numbers, and never trimmed."""

from __future__ import annotations

import pytest
from autoremat_solver import CertificateError, CertificateWarning, Problem, Solver, Status
from autoremat_solver.bounds.certified import Bounds
from autoremat_solver.certificate import NOISE, holds

from tests.solver.test_solver_networks import mlp


def lying(monkeypatch: pytest.MonkeyPatch, *, bound_us: float = 0.0, floor_nbytes: int = 0) -> None:
    """Let every bound be one that no plan keeps."""
    monkeypatch.setattr(Bounds, "time_us", lambda *_, **__: bound_us)
    original = Bounds.__init__

    def init(self: Bounds, *given: object) -> None:
        original(self, *given)  # type: ignore[arg-type]
        self.floor_nbytes = floor_nbytes or self.floor_nbytes

    monkeypatch.setattr(Bounds, "__init__", init)


def problem() -> Problem:
    """Too large for the exhaustive search, whose own answers need no bound."""
    return mlp(12)


def test_a_bound_above_its_plan_takes_the_certificate_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is what it was; its status is unproven and its gap unknown."""
    budget = Solver(problem(), time_limit_s=0).smallest_peak().timeline.peak_nbytes
    lying(monkeypatch, bound_us=1e12)
    with pytest.warns(
        CertificateWarning, match=r"bound in us is 1000000000000, but there is a plan of"
    ):
        found = Solver(problem(), time_limit_s=0).solve(budget)
    assert found.status is Status.UNPROVEN
    assert (found.bound_us, found.gap) == (0.0, float("inf"))
    assert found.timeline.peak_nbytes <= budget


def test_a_floor_above_a_plan_is_taken_back_to_what_is_resident(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No plan has less than that."""
    lying(monkeypatch, floor_nbytes=10**14)
    with pytest.warns(CertificateWarning, match="floor in bytes is 100000000000000, but"):
        found = Solver(problem(), time_limit_s=0).smallest_peak()
    assert found.floor_nbytes == problem().resident_nbytes


def test_who_is_strict_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a defect, which a test run should not pass over."""
    lying(monkeypatch, bound_us=1e12)
    with pytest.raises(CertificateError, match="please report it"):
        Solver(problem(), time_limit_s=0, strict=True).fastest()


def budgets_bounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The budgets that a bound is asked for from now on."""
    asked: list[int] = []
    original = Bounds.time_us

    def noted(self: Bounds, budget_nbytes: int, **options: float | None) -> float:
        asked.append(budget_nbytes)
        return original(self, budget_nbytes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Bounds, "time_us", noted)
    return asked


def test_what_bounds_the_fastest_plan_bounds_plans_that_take_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bound is told of plans under any budget: one for its own peak might be above theirs."""
    asked = budgets_bounded(monkeypatch)
    everything = sum(value.nbytes for value in problem().values)
    Solver(problem()).fastest()
    assert asked
    assert min(asked) >= everything + problem().resident_nbytes


@pytest.mark.parametrize(
    "share", [1.5, *(pytest.param(share, marks=pytest.mark.thorough) for share in (0.9, 1.0))]
)
def test_a_plan_without_its_certificate_is_the_one_that_has_it(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below the smallest peak; no bound is made for it."""
    smallest = Solver(problem()).smallest_peak().timeline.peak_nbytes
    budget = int(share * smallest)
    certified = Solver(problem(), bound_effort=0.05).solve(budget)
    asked = budgets_bounded(monkeypatch)
    assert Solver(problem(), bound_effort=0.05).plan(budget) == certified.plan
    without = len(asked)
    Solver(problem(), bound_effort=0.05).solve(budget)
    assert len(asked) == 2 * without + 1


def test_a_plan_is_asked_for_in_bytes() -> None:
    """As of `solve`."""
    with pytest.raises(ValueError, match="negative"):
        Solver(problem()).plan(-1)
    with pytest.raises(TypeError):
        Solver(problem()).plan(1.5)  # type: ignore[arg-type]


def test_noise_of_sums_is_no_defect() -> None:
    """Times added up in another order; anything above that is one."""
    assert holds("bound in us", 1.0 + NOISE / 2, 1.0, strict=True)
    with pytest.raises(CertificateError):
        holds("bound in us", 1.0 + 2 * NOISE, 1.0, strict=True)
