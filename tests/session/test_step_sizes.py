"""Steps whose calls are of several sizes: each may be of the largest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import sympy
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.planning.ranges import Covered
from autoremat.session.step_sizes import StepSizes
from autoremat.watch.look import _more_nbytes
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


def budget_of(share: float) -> int:
    """Of a step of two calls of the largest sizes."""
    plain = make_seeded(Embedded)
    resident = resident_nbytes(plain, (ids(8, 128), wide(8, 128)))
    return int(share * (resident + measure_peak(contrasted(plain, ids(8, 128), wide(8, 128)))))


def wide(batch: int, sequence: int) -> Tensor:
    """Part of a longer text: torch has a graph of its own for it."""
    return ids(batch, 2 * sequence)[:, :sequence]


def peak(model: nn.Module, one: Tensor, other: Tensor) -> int:
    """Of a step in bytes, after one like it."""
    run = contrasted(model, one, other)
    run()
    return resident_nbytes(model, (one, other)) + measure_peak(run)


@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
def test_calls_of_one_step_may_be_of_several_sizes():
    """Each may be of the largest: that is planned for, and no more than that."""
    budget = budget_of(0.7)
    model = optimized(Embedded, budget, sizes=RANGES)
    for batch, sequence in [(8, 100), (5, 128), (3, 77), (8, 128), (2, 20), (8, 128)]:
        assert peak(model, ids(batch, sequence), wide(batch, sequence // 2)) <= budget
    steps = optimized_call(model).session.steps
    assert 0.9 * budget <= steps.peak_nbytes <= budget
    largest = peak(model, ids(8, 128), wide(8, 128))
    assert largest <= steps.peak_nbytes


@pytest.mark.filterwarnings("ignore:.*From the next step on:autoremat.OverBudgetWarning")
@pytest.mark.parametrize("sizes", [(40, 128), (128, 40)], ids=["small first", "large first"])
def test_plans_for_smaller_sizes_go_where_a_step_has_several(sizes: tuple[int, int]):
    """They were looked at beside each other, not beside those for the largest."""
    budget = budget_of(0.6)
    model = optimized(Embedded, budget, sizes=RANGES)
    for _ in range(4):
        peak(model, ids(8, 40), wide(8, 40))
    steps = optimized_call(model).session.steps
    assert all(part.smaller for part in steps.graphs.parts.values())
    one, other = sizes
    run = contrasted(model, ids(8, one), wide(8, other))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", autoremat.OverBudgetWarning)
        nbytes = resident_nbytes(model, (ids(8, one), wide(8, other))) + measure_peak(run)
    assert nbytes <= budget or told  # the first of them runs by what there is
    assert steps.step_sizes.are_several
    for one, other in [sizes, (40, 40), (128, 128)]:
        assert peak(model, ids(8, one), wide(8, other)) <= budget
    assert not any(part.smaller for part in steps.graphs.parts.values())


def test_what_waits_grows_with_its_own_sizes():
    """Not with those of the run whose backward comes: three runs, the last one first."""
    beside = SimpleNamespace(gradients_nbytes=10)
    figures = SimpleNamespace(gradients_nbytes=10)

    def reached(held_nbytes: int, growth: float, beside_nbytes: int):
        part = SimpleNamespace(
            own_peaks=(0, 0),
            resident_nbytes=0,
            corner=1.0,
            kept_growth=growth,
            figures=figures,
            peak_in_backward=lambda _: 0,
        )
        return SimpleNamespace(held_nbytes=held_nbytes, ran=None), part, beside, beside_nbytes

    mib = 1 << 20
    found = _more_nbytes(
        [reached(0, 4.0, 15 * mib), reached(5 * mib, 2.0, 10 * mib), reached(10 * mib, 1.0, 0)],
        0,
        4.0,
        keeps_graph=False,
    )
    assert list(found) == [20 * mib, 10 * mib, 0]  # gradients that were there before count nowhere


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
    assert sizes.note(part, {symbols[1]: 6})
    assert sizes.are_several
    assert not sizes.note(part, {symbols[1]: 7})
