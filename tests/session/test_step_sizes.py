"""Steps whose calls are of several sizes: each may be of the largest."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import sympy
from torch import Tensor, nn

from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.planning.ranges import Covered
from autoremat.session.step_sizes import StepSizes
from tests.session.test_sizes import RANGES, Tokens, ids
from tests.training import make_seeded, optimized

pytestmark = pytest.mark.shares_plans


class Embedded(Tokens):
    """A vector for each sample."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(self.words(ids)).mean(1)


def contrasted(model: nn.Module, one: Tensor, other: Tensor) -> Callable[[], None]:
    """A step that calls a model twice before its backward."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        (model(one) * model(other)).sum().square().backward()

    return run


@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_calls_of_one_step_may_be_of_several_sizes():
    """Each may be of the largest: that is planned for, and what is known of small ones as well."""
    largest = contrasted(make_seeded(Embedded), ids(8, 128), ids(8, 128).t().contiguous().t())
    resident = resident_nbytes(make_seeded(Embedded), (ids(8, 128), ids(8, 128)))
    largest()
    budget = int(0.7 * (resident + measure_peak(largest)))
    model = optimized(Embedded, budget, sizes=RANGES)
    sizes = [(8, 100), (5, 128), (3, 77), (8, 128), (2, 20), (8, 128)]
    for batch, sequence in sizes:
        run = contrasted(model, ids(batch, sequence), ids(batch, sequence)[:, : sequence // 2])
        run()
        given = resident_nbytes(model, (ids(batch, sequence),))
        assert given + measure_peak(run) <= budget, (batch, sequence)
    steps = optimized_call(model).session.steps
    assert steps.sizes.are_several
    assert not any(part.smaller for part in steps.graphs.parts.values())
    assert 0.9 * budget <= steps.peak_nbytes <= budget  # nor is anything counted that is not there


def test_inputs_of_one_call_may_have_several_sizes_of_one_name():
    """Whether graphs of a step are of one size is told by their calls."""
    symbols = sympy.symbols("s0:2")
    part = SimpleNamespace(covered=Covered((), names=dict.fromkeys(symbols, "sequence")))
    sizes = StepSizes()
    sizes.note(part, dict(zip(symbols, (4, 8), strict=True)))
    sizes.note(part, dict(zip(symbols, (8, 4), strict=True)))
    assert not sizes.are_several
    sizes.begin()
    sizes.note(part, {symbols[0]: 5})
    assert not sizes.are_several
    sizes.note(part, {symbols[1]: 6})
    assert sizes.are_several
