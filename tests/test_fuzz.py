"""Random small modules at random budgets: never another gradient, never a peak above the budget.

How many are tried is the hypothesis profile's: hundreds by default, the same ones each time;
thousands of others with `python -m pytest tests/test_fuzz.py --hypothesis-profile=nightly`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from autoremat_solver.bounds import certified
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoremat
from tests.planning.budget_sweep import sweep
from tests.random_modules import Machine, Program, batch, loss_alone, programs
from tests.training import (
    UNBOUNDED,
    close,
    copied,
    make_seeded,
    measured,
    optimized,
    same,
    scalar,
    step,
)

PARTS = 3  # of the longest test: the machine may be several times slower


def fuzzing(share: float) -> settings:
    """Settings for a share of the profile's number of cases."""
    return settings(
        max_examples=max(1, int(share * settings().max_examples)),
        deadline=None,
        phases=[Phase.generate],  # shrinking a failure would take minutes: do it by hand
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def apart(part: int) -> Callable[[Any], Any]:
    """Cases of a part of a test: others than those of its other parts, but for the simplest.

    A profile that asks for new cases each time gets them.
    """
    return seed(part) if settings().derandomize else lambda test: test


shares = st.floats(0.0, 1.0)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Even shorter proofs: thousands of plans have to be right, not good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified, "WORK", certified.WORK // 5)
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_random_modules_keep_gradients_and_budget(part: int):
    """At the smallest budget and two others: bitwise the step without recompute, and it fits.

    That step is close to eager mode.
    """

    @apart(part)
    @fuzzing(1 / PARTS)
    @given(program=programs, shares=st.lists(shares, min_size=2, max_size=2))
    def holds(program: Program, shares: list[float]) -> None:
        keeps_gradients_and_budget(program, shares)

    holds()


def keeps_gradients_and_budget(program: Program, shares: list[float]) -> None:
    """Fail unless a module does, at shares of what there is between the ends."""
    note(f"{program}")

    def make() -> nn.Module:
        return Machine(program)

    inputs = batch(program)
    planned, outcome = sweep(make, inputs, scalar)
    eager = step(make_seeded(make), inputs, scalar)
    if "dropout_in_place" in str(program) and not torch.allclose(eager.loss, outcome.loss):
        # On values that are not contiguous, torch's own graphs draw in another order.
        assert torch.allclose(traced_loss(make, inputs), outcome.loss, rtol=1e-9)
    else:
        close(eager, outcome, 1e-9)
    reference = planned.run(planned.choose(UNBOUNDED))
    for share in (0.0, *shares):
        budget = planned.at(share)
        choice = planned.choose(budget)
        assert choice.peak_nbytes <= budget
        for ours, expected in zip(planned.run(choice), reference, strict=True):
            assert_equal(ours, expected)
        assert planned.measured(choice) <= budget


def traced_loss(make: Callable[[], nn.Module], inputs: Sequence[Any]) -> Tensor:
    """The loss of torch's own graph of the module, op by op."""
    torch._dynamo.reset()
    model = make_seeded(make)
    model.compile(backend="aot_eager")
    torch.manual_seed(0)
    return scalar(model(*(copied(value) for value in inputs))).detach()


def assert_equal(one: Tensor | None, other: Tensor | None) -> None:
    """Fail unless two results are equal bit for bit."""
    if one is None or other is None:
        assert one is other
    else:
        assert torch.equal(one, other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compiler", "tolerance"),
    [("eager", 0.0), pytest.param("inductor", 1e-9, marks=pytest.mark.inductor)],
)
def test_whole_steps_keep_gradients_and_budget(compiler: str, tolerance: float):
    """The same of whole training steps, whose masks are those of the step without recompute."""

    @fuzzing(0.2 if compiler == "eager" else 0.01)
    @given(program=programs, share=shares)
    def holds(program: Program, share: float) -> None:
        note(f"{program}")
        torch._dynamo.reset()

        def make() -> nn.Module:
            return Machine(program)

        inputs = batch(program)
        unbounded = optimized(make, UNBOUNDED, compiler=compiler, time_limit=1.0)
        reference = step(unbounded, inputs)
        report = autoremat.report(unbounded)
        highest, resident = report.predicted_peak_nbytes, report.resident_nbytes
        budget = resident + int((0.3 + 0.7 * share) * (highest - resident))
        model = optimized(make, budget, compiler=compiler, time_limit=1.0)
        with warnings.catch_warnings(record=True) as told:  # of a loss in eager code
            warnings.simplefilter("always", autoremat.OverBudgetWarning)
            try:
                outcome = step(model, inputs)
            except autoremat.InfeasibleBudget as error:
                budget = max(budget + 1, error.smallest_peak_nbytes)
                model = optimized(make, budget, compiler=compiler, time_limit=1.0)
                outcome = step(model, inputs)
            peak = measured(model, inputs, loss_alone)
        if tolerance:
            close(reference, outcome, tolerance)
        else:
            same(reference, outcome)
        assert autoremat.report(model).predicted_peak_nbytes <= budget or told
        assert peak <= budget or told

    holds()
