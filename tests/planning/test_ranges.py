"""One plan for a range of sizes: proven at its upper corner, held against `simulate` on a grid."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from autoremat_solver import simulate
from torch import Tensor, nn

from autoremat.planning.part import Part
from autoremat.planning.ranges import _is_highest_in_corner, covered, largest_fitting
from autoremat.planning.sizes import sizes_of, subject_at
from autoremat.problem.subject import Subject
from tests.planning.test_formula import planned
from tests.sizing.test_fit import Convolutions, Layers, Words, images, rows, words

BATCH, SEQUENCE = sympy.symbols("batch sequence", positive=True, integer=True)
LOWEST, HIGHEST = {BATCH: 2, SEQUENCE: 8}, {BATCH: 32, SEQUENCE: 512}


@pytest.mark.parametrize(
    ("bytes_of", "is_highest"),
    [
        (4 * BATCH * SEQUENCE**2 + 12, True),
        (4 * BATCH * (SEQUENCE - 1), True),
        (512 * sympy.ceiling(4 * BATCH * SEQUENCE / 512), True),
        (4 * SEQUENCE * sympy.floor(SEQUENCE / 2), True),
        (4 * (600 - SEQUENCE), False),
        (BATCH * SEQUENCE - 40 * BATCH, True),
        (sympy.Mod(SEQUENCE, 7) * 4, False),
        (sympy.Mod(SEQUENCE, 8) * 4 + 64 * SEQUENCE, True),
    ],
    ids=str,
)
def test_what_is_largest_at_the_largest_sizes_is_proven_to_be(bytes_of: Any, is_highest: bool):
    """By its form, in the corners, or at all sizes."""
    assert _is_highest_in_corner(bytes_of, LOWEST, HIGHEST) is is_highest


def largest(part: Part, highs: tuple[int, ...]) -> tuple[Subject, dict[Any, str]]:
    """The subject at an upper corner, and names of its symbols."""
    symbols = sorted(sizes_of(part.subject), key=str)
    subject = subject_at(part.subject, dict(zip(symbols, highs, strict=True)))
    return subject, {symbol: f"size {n}" for n, symbol in enumerate(symbols)}


@pytest.mark.parametrize(
    ("model", "batch", "budget", "varying", "highs"),
    [
        (Layers, rows(12), 30_000, ((0, 0),), (40,)),
        (Words, words(6), 140_000, ((0, 0), (0, 1)), (8, 24)),
        pytest.param(
            Convolutions, images(6), 70_000, ((0, 0), (1, 0)), (32,), marks=pytest.mark.thorough
        ),
    ],
    ids=["layers", "batch and sequence", "convolutions"],
)
def test_a_proven_plan_is_simulated_to_be_highest_at_the_largest_sizes(
    model, batch, budget, varying, highs
):
    """On a grid over all smaller sizes."""
    part = planned(model(), batch, budget, varying)
    subject, names = largest(part, highs)
    plan = part.choice.solution.plan
    found = covered(subject, plan, names)
    assert found.is_proven
    assert dict(found.sizes) == {f"size {n}": high for n, high in enumerate(highs)}
    most_nbytes = simulate(subject.lowered.problem, plan).peak_nbytes
    axes = [range(2, high + 1, max(1, high // 8)) for high in highs]
    for numbers in itertools.product(*axes):
        at = subject_at(subject, dict(zip(names, numbers, strict=True)))
        assert simulate(at.lowered.problem, plan).peak_nbytes <= most_nbytes, numbers


class Padded(nn.Module):
    """Rows up to 64, and as many more as are missing: they become fewer as the rows become more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        missing = torch.ones(64 - x.shape[0], 32)
        return (F.gelu(self.layer(missing)).sum() + F.gelu(self.layer(x)).sum()).square()


def test_what_becomes_less_as_sizes_grow_is_simulated_instead():
    """It is said, and so is by how much smaller sizes are above the largest."""
    part = planned(Padded(), torch.randn(20, 32), 1_000_000, ((0, 0),))
    subject, names = largest(part, (60,))
    plan = part.choice.solution.plan
    found = covered(subject, plan, names)
    assert not found.is_proven
    assert found.checked == 5
    symbol = next(iter(names))
    peaks = [
        simulate(subject_at(subject, {symbol: n}).lowered.problem, plan).peak_nbytes
        for n in (2, 16, 31, 45, 60)
    ]
    assert found.above_nbytes == max(peaks) - peaks[-1]
    assert "not all of it grows with the sizes" in str(found)


def test_the_largest_sizes_that_fit_are_found_one_by_one():
    """The next one does not, beside the largest of the others."""
    part = planned(Words(), words(6), 200_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (16, 24))
    plan, budget = part.choice.solution.plan, 200_000
    each, is_each_enough = largest_fitting(subject, plan, budget, names)
    found = dict(each)
    assert is_each_enough
    assert set(found) == set(names.values())
    for symbol, name in names.items():
        peaks = [
            simulate(subject_at(subject, {symbol: n}).lowered.problem, plan).peak_nbytes
            for n in (found[name], found[name] + 1)
        ]
        assert peaks[0] <= budget < peaks[1]


def test_all_are_made_smaller_where_no_one_alone_is_enough():
    part = planned(Words(), words(6), 140_000, ((0, 0), (0, 1)))
    subject, names = largest(part, (4096, 24))
    plan, budget = part.choice.solution.plan, 75_000
    found, is_each_enough = largest_fitting(subject, plan, budget, names)
    assert not is_each_enough
    assert [name for name, _ in found] == list(names.values())
    at = subject_at(subject, dict(zip(names, (n for _, n in found), strict=True)))
    assert simulate(at.lowered.problem, plan).peak_nbytes <= budget
