"""What operations take for themselves: measured at both ends of a range, foretold in between."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.cost.calls import OpCost
from autoremat.planning.part import Part
from autoremat.planning.sizes import sizes_of, subject_at
from autoremat.planning.workspaces import with_fixed_workspaces
from tests.planning.test_formula import planned
from tests.sizing.test_fit import Convolutions, images
from tests.training import UNBOUNDED, measured, optimized, step

pytestmark = pytest.mark.shares_plans

SIDE = torch.export.Dim("side", min=16, max=48)
RANGES = {"batch": (1, 4), "images": {2: SIDE, 3: SIDE}}


class Deep(nn.Module):
    """Convolutions whose workspaces are both their weights, and their images."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 48, 48)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths)
        )

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = torch.tanh(layer(images))
        return images.square().mean()


def batch(count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side)


def test_the_peak_is_predicted_at_both_ends_of_a_range_and_not_too_low_between():
    """Though weights are laid out anew whatever the batch is."""
    model = optimized(Deep, UNBOUNDED, sizes=RANGES)
    step(model, (batch(4, 48),))
    formula = autoremat.report(model).peak_formula
    assert formula is not None
    for count, side in [(4, 48), (2, 16), (4, 16), (2, 48), (3, 32)]:
        names = [symbol.name for symbol in formula.symbols]
        sizes = {name: count if name == "batch" else side for name in names}
        inputs = (batch(count, side),)
        step(model, inputs)
        ratio = formula.at(**sizes) / measured(model, inputs)
        assert ratio == 1 if (count, side) in [(4, 48), (2, 16)] else ratio >= 0.98, sizes


@pytest.fixture(scope="module")
def convolutions() -> Part:
    return planned(Convolutions(), images(8), 90_000, ((0, 0), (1, 0)))


def measuring(nbytes: int):
    return lambda nodes: {node: OpCost(1.0, nbytes, 0, measured=True) for node in nodes}


def with_workspaces(part: Part, nbytes: int):
    """The graph with so much for each operation, at the sizes it was planned for."""
    lowered = part.subject.lowered
    graph = lowered.graph
    forward, backward = (
        tuple(replace(op, workspace_nbytes=nbytes) for op in ops)
        for ops in (graph.forward, graph.backward)
    )
    graph = replace(graph, forward=forward, backward=backward)
    costs = dict.fromkeys(part.subject.costs, OpCost(1.0, nbytes, 0, measured=True))
    return replace(part.subject, lowered=replace(lowered, graph=graph), costs=costs)


def workspaces(subject) -> set[int]:
    graph = subject.lowered.graph
    return {op.workspace_nbytes for op in (*graph.forward, *graph.backward)}


@pytest.mark.parametrize("least_nbytes", [1_000, 250, 10])
def test_of_a_workspace_both_ends_are_as_measured(convolutions: Part, least_nbytes: int):
    """Where less is measured than in proportion, what grows faster is taken to be in proportion."""
    subject = with_workspaces(convolutions, 1_000)
    symbols = sizes_of(subject)
    said = dict.fromkeys(symbols, 2)
    found = with_fixed_workspaces(subject, said, measuring(least_nbytes))
    assert workspaces(found) == {1_000}
    at_least = workspaces(subject_at(found, said)) - {1_000}
    assert all(nbytes >= least_nbytes for nbytes in at_least)
    assert all(abs(nbytes - max(250, least_nbytes)) <= 2 for nbytes in at_least)


def test_what_takes_more_at_the_smallest_sizes_is_counted_with_that(convolutions: Part):
    subject = with_workspaces(convolutions, 1_000)
    said = dict.fromkeys(sizes_of(subject), 2)
    found = with_fixed_workspaces(subject, said, measuring(5_000))
    assert 5_000 in workspaces(found)
    assert workspaces(found) == workspaces(subject_at(found, said))


def test_what_cannot_be_measured_there_shrinks_in_proportion(convolutions: Part):
    subject = with_workspaces(convolutions, 1_000)
    said = dict.fromkeys(sizes_of(subject), 2)
    found = with_fixed_workspaces(
        subject, said, lambda nodes: {n: OpCost(1.0, 0, 0, measured=False) for n in nodes}
    )
    assert min(workspaces(subject_at(found, said))) == 250
