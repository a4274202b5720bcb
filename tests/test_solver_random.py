"""Random steps with every kind of operation and value: EITHER, must_save, run-once, outputs."""

from __future__ import annotations

import random

import pytest
from autoremat_solver import Op, Phase, Problem, ProblemError, Solver, Value, check


def random_problem(seed: int) -> Problem:
    """Up to 14 forward or EITHER operations and 10 backward ones, some with two outputs."""
    rng = random.Random(seed)
    values: list[Value] = []
    ops: list[Op] = []
    forward: list[str] = []
    either: list[str] = []
    for i in range(rng.randint(1, 14)):
        is_either = rng.random() < 0.3
        readable = forward + either if is_either else forward
        made = [f"v{i}_{j}" for j in range(rng.choice((1, 1, 1, 2)))]
        for name in made:
            draw = rng.random()
            values.append(
                Value(
                    name,
                    rng.randint(0, 50),
                    must_save=draw < 0.1,
                    must_recompute=draw > 0.97,
                    save_us=rng.choice((0.0, 0.0, 2.0)),
                )
            )
        ops.append(
            Op(
                f"o{i}",
                tuple(rng.sample(readable, min(len(readable), rng.randint(0, 3)))),
                tuple(made),
                float(rng.randint(0, 20)),
                rng.choice((0, 0, 20)),
                Phase.EITHER if is_either else Phase.FORWARD,
                recomputable=rng.random() < 0.85,
            )
        )
        (either if is_either else forward).extend(made)
    gradients: list[str] = []
    for k in range(rng.randint(0, 10)):
        reads = rng.sample(forward + either, min(len(forward + either), rng.randint(0, 3)))
        reads += rng.sample(gradients, min(len(gradients), 2))
        values.append(Value(f"g{k}", rng.randint(0, 30)))
        ops.append(
            Op(f"b{k}", tuple(reads), (f"g{k}",), float(rng.randint(0, 9)), phase=Phase.BACKWARD)
        )
        gradients.append(f"g{k}")
    made = forward + gradients + either
    outputs = tuple(rng.sample(made, min(len(made), rng.randint(0, 4))))
    return Problem(tuple(values), tuple(ops), outputs, rng.randint(0, 5))


@pytest.mark.parametrize("block", range(6))
def test_random_steps_get_valid_plans_within_their_bounds(block: int) -> None:
    """Every plan passes `check` at its own peak; bound <= time and floor <= peak throughout."""
    for seed in range(block * 25, block * 25 + 25):
        problem = random_problem(seed)
        try:
            solver = Solver(problem)
        except ProblemError:
            continue
        low, high = solver.smallest_peak(), solver.fastest()
        peaks = low.timeline.peak_nbytes, high.timeline.peak_nbytes
        assert low.floor_nbytes <= min(peaks)
        for share in (0.0, 0.3, 0.7):
            budget = int(peaks[0] + share * (peaks[1] - peaks[0]))
            found = solver.solve(budget)
            assert check(problem, found.plan, budget) == [], seed
            raw = solver._bounds.time_us(budget, 1.0)
            assert raw <= found.timeline.time_us + 1e-6, seed
            fastest = solver.fastest().timeline.time_us
            assert fastest <= found.timeline.time_us + 1e-6, seed
