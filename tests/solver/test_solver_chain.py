"""Multi-level recompute on deep networks."""

from __future__ import annotations

import math

import pytest
from autoremat_solver import Problem, Solver, Status, check

from tests.solver.exhaustive import cheapest_us
from tests.solver.plain_chains import NEVER, PlainChain, binomial_extra_steps
from tests.solver.test_solver_networks import MIB, chain, mlp, transformer, unet


def test_the_64_layer_chain_of_the_design_fits_45_mib() -> None:
    """x0 -> ... -> x63, 4 MiB each, 16 MiB of gradients: two levels reach 45 MiB."""
    problem = chain(64, 4 * MIB, gradient_nbytes=MIB // 4)
    found = Solver(problem, time_limit_s=6).solve(45 * MIB)
    assert found.timeline.peak_nbytes <= 45 * MIB
    assert check(problem, found.plan, 45 * MIB) == []
    assert found.timeline.time_us < 1.6 * Solver(problem).fastest().timeline.time_us


def test_a_plain_chain_reaches_the_square_root_regime_with_one_extra_forward() -> None:
    """100 values in room for 22: at most one extra run of each."""
    problem = chain(100, MIB)
    found = Solver(problem, time_limit_s=6).solve(22 * MIB)
    runs = [found.plan.schedule.count(f"op_x{i}") for i in range(100)]
    assert found.timeline.peak_nbytes <= 22 * MIB
    assert sum(runs) <= 200


@pytest.mark.thorough
def test_a_plain_chain_reaches_the_logarithmic_regime() -> None:
    """128 values in room for 11: binomial checkpointing needs at most four runs of each."""
    problem = chain(128, MIB)
    found = Solver(problem, time_limit_s=6).solve(11 * MIB)
    assert found.timeline.peak_nbytes <= 11 * MIB
    runs = sum(found.plan.schedule.count(f"op_x{i}") for i in range(128))
    assert runs <= 4 * 128


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("problem", "most_gap"),
    [(mlp(16), 0.05), (transformer(6), 0.05), (unet(4), 0.10)],
    ids=["mlp", "transformer", "unet"],
)
def test_the_gap_is_small_at_mid_budgets(problem: Problem, most_gap: float) -> None:
    """Half-way between the smallest peak and the fastest plan's, the proven gap is small."""
    solver = Solver(problem, time_limit_s=6)
    low = solver.smallest_peak().timeline.peak_nbytes
    high = solver.fastest().timeline.peak_nbytes
    found = solver.solve((low + high) // 2)
    assert found.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert found.gap <= most_gap


@pytest.mark.thorough
def test_the_smallest_peak_is_a_budget_that_a_new_solver_meets() -> None:
    """solve(smallest_peak) succeeds; one byte below the floor is infeasible with that plan."""
    problem = unet(3)
    low = Solver(problem, time_limit_s=3).smallest_peak()
    peak = low.timeline.peak_nbytes
    assert Solver(problem, time_limit_s=3).solve(peak).timeline.peak_nbytes <= peak
    below = Solver(problem, time_limit_s=3).solve(low.floor_nbytes - 1)
    assert below.status is Status.INFEASIBLE
    assert below.timeline.peak_nbytes > low.floor_nbytes - 1


VARIANTS = [
    (reads, gradient, start)
    for reads in ("out", "in", "in+out")
    for gradient in (0, 1)
    for start in ("resident", "value", "fixed")
]


def recomputes(chain: PlainChain, solver: Solver, units: int) -> int:
    """Runs beyond the first of each in the solver's plan for a budget."""
    found = solver.solve(units * chain.unit_nbytes)
    assert check(chain.problem(), found.plan, units * chain.unit_nbytes) == []
    return len(found.plan.schedule) - len(chain.problem().ops)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize(("reads", "gradient", "start"), VARIANTS)
def test_the_recurrence_of_plain_chains_is_exact(
    length: int, reads: str, gradient: int, start: str
) -> None:
    """What the tests below compare with is the exhaustive optimum on bytes."""
    chain = PlainChain(length, reads, gradient, start)
    problem = chain.problem()
    base = sum(op.time_us for op in problem.ops)
    for units in range(1, length + 4):
        cheapest = cheapest_us(problem, units)
        fewest = chain.fewest_recomputes(units)
        assert (fewest == NEVER) == (cheapest == float("inf"))
        assert fewest == NEVER or fewest == cheapest - base


@pytest.mark.thorough
@pytest.mark.parametrize(
    "length",
    [5, 9, pytest.param(16, marks=pytest.mark.slow), pytest.param(37, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("reads", "gradient", "start"), VARIANTS)
def test_plain_chains_reach_the_optimum_at_every_budget(
    length: int, reads: str, gradient: int, start: str
) -> None:
    """From the smallest peak, which is the least possible, to save-all."""
    chain = PlainChain(length, reads, gradient, start, unit_nbytes=MIB)
    solver = Solver(chain.problem())
    low = solver.smallest_peak().timeline.peak_nbytes
    assert low % MIB == 0
    assert chain.fewest_recomputes(low // MIB - 1) == NEVER
    for units in range(low // MIB, length + 4):
        assert recomputes(chain, solver, units) == chain.fewest_recomputes(units)


def assert_binomial(length: int, slots: int) -> None:
    """The formula, in the two forms of a plain chain in which s slots take s + 2 units.

    Those are s - 1 checkpoints, the start or the gradient, and the input and output of a step.
    """
    wanted = binomial_extra_steps(length, slots) - (length - 1)
    for plain in (
        PlainChain(length, "out", 1, "resident", MIB),
        PlainChain(length, "in", 1, "value", MIB),
    ):
        assert recomputes(plain, Solver(plain.problem()), slots + 2) == wanted


@pytest.mark.parametrize("slots", range(1, 7))
@pytest.mark.parametrize("length", [2, 8, 13, pytest.param(21, marks=pytest.mark.thorough)])
def test_plain_chains_need_as_many_steps_as_binomial_checkpointing(length: int, slots: int) -> None:
    """R l - C(s + r, s + 1) extra steps, the l - 1 of the first sweep among them."""
    assert_binomial(length, slots)


@pytest.mark.slow
@pytest.mark.parametrize("slots", range(1, 7))
def test_all_plain_chains_need_as_many_steps_as_binomial_checkpointing(slots: int) -> None:
    """The same for every length below 60."""
    for length in range(1, 60):
        assert_binomial(length, slots)


@pytest.mark.parametrize("length", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_deep_chains_reach_the_square_root_and_the_logarithmic_regime(length: int) -> None:
    """In 2 sqrt(l) units each step runs at most twice, in log2(l) + 2 at most log2(l) times."""
    chain = PlainChain(length, "out", 1, "resident", MIB)
    solver = Solver(chain.problem())
    root, logarithm = 2 * math.isqrt(length), round(math.log2(length)) + 2
    assert recomputes(chain, solver, root) < length
    assert recomputes(chain, solver, logarithm) < (logarithm - 2) * length
    for units in (root, logarithm):
        wanted = binomial_extra_steps(length, units - 2) - (length - 1)
        assert recomputes(chain, solver, units) == wanted
