"""Counts of values that play the same part in equal blocks: same optimum, fewer choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autoremat_solver import Problem
from autoremat_solver._pulp import LinearSolver
from autoremat_solver.classes import classes_of
from autoremat_solver.formulation import Formulation
from autoremat_solver.indexed import Indexed, index

from tests.test_solver_networks import mlp, transformer


def test_equal_layers_share_classes_and_a_slower_one_does_not() -> None:
    """Nine layers: values far from both ends are alike, until one operation's time differs."""
    problem = transformer(layers=9)
    indexed = index(problem)
    classes = classes_of(indexed)
    assert max(len(members) for members in classes) >= 5
    for members in classes:
        makers = [problem.ops[indexed.producer[v]] for v in members]
        assert len({(op.time_us, op.workspace_nbytes, op.phase) for op in makers}) == 1
        assert len({indexed.nbytes[v] for v in members}) == 1
    largest = max(classes, key=len)
    odd = problem.ops[indexed.producer[largest[len(largest) // 2]]]
    ops = tuple(replace(op, time_us=op.time_us * 1.01) if op is odd else op for op in problem.ops)
    slower = classes_of(index(replace(problem, ops=ops)))
    assert not any(set(largest) <= set(members) for members in slower)


def optimum(indexed: Indexed, share: float, *, with_counts: bool) -> float | None:
    """The integer optimum with the expected load of every third position within a budget."""
    formulation = Formulation(indexed, with_counts=with_counts)
    assert bool(formulation.count) == with_counts
    solver = LinearSolver(formulation.program)
    scale = max(1, sum(indexed.nbytes))
    for position in range(0, len(indexed.backward_ops), 3):
        load = formulation.expected_load(position)
        row = {column: nbytes / scale for column, nbytes in load.by_column.items()}
        solver.add_row(row, share * sum(row.values()))
    answer = solver.integer(60.0, 0.0)
    return None if answer is None else answer.objective


@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("problem", [transformer(4), mlp(10)], ids=["transformer", "mlp"])
def test_counts_keep_the_optimum_of_the_program(problem: Problem, share: float) -> None:
    """With memory rows that bind, the program with counts costs what the one without does."""
    indexed = index(problem)
    with_counts = optimum(indexed, share, with_counts=True)
    assert with_counts == pytest.approx(optimum(indexed, share, with_counts=False), abs=1e-6)
