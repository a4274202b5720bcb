"""What Inductor is expected to write over, and what the code that it generates takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from autoremat_solver import Problem
from autoremat_solver.model.indexed import index
from autoremat_solver.simulate import spans_of, taken_over
from torch import Tensor, nn

import autoremat
from autoremat.ask.options import Setting
from autoremat.inductor.in_place import as_loops
from autoremat.memory.meter import resident_nbytes
from autoremat.problem.lower import as_written
from autoremat.problem.subject import Subject
from tests.joint_graphs import subject_of
from tests.tiny import WIDTH

BATCH = 4 * WIDTH
LOGITS_NBYTES = 4 * BATCH * 64 * WIDTH
INDUCTOR = Setting(compiler="inductor")


def given() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def stated(make: Callable[[], nn.Module]) -> Subject:
    torch.manual_seed(0)
    return subject_of(make(), given(), INDUCTOR)


def overwritten(problem: Problem) -> dict[str, str]:
    """What ends in the results of operations where each of them runs once, by their names."""
    indexed = index(problem)
    steps = indexed.numbers(as_written(problem))
    found = taken_over(indexed, steps, spans_of(indexed, steps))
    ops, values = problem.ops, problem.values
    return {ops[steps[step]].name: values[span[0]].name for step, span in found.items()}


class Classifier(nn.Module):
    """Its loss takes more than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 64 * WIDTH)
        self.labels = torch.arange(BATCH)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), self.labels)


class Softmax(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x).softmax(-1).square() * 3.0).sum()


class Activation(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(x)).square().sum()


@pytest.mark.inductor
@pytest.mark.parametrize("make", [Classifier, Softmax, Activation])
def test_the_backward_works_in_the_memory_of_what_was_saved(make: Callable[[], nn.Module]):
    """One storage of the size of the logits, as in the code that is generated."""
    torch.manual_seed(0)
    model = make()
    found = autoremat.plan(model, given(), budget=1 << 40, policy="save-all", verbose=False)
    timeline = found.graphs[0].timeline
    assert timeline is not None
    resident = resident_nbytes(model, given())
    read, modelled = found.predicted_peak_nbytes - resident, timeline.peak_nbytes - resident
    assert modelled == pytest.approx(read, rel=0.1)
    assert read < 2 * LOGITS_NBYTES


class Transposed(Classifier):
    """The gradient comes back in another layout than what was saved has."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sigmoid(self.head(x)).t().contiguous().sin() ** 2).sum()


class Returned(Classifier):
    """The caller holds what the backward reads."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        found = torch.sigmoid(self.head(x))
        return found.square().sum(), found


def test_what_is_returned_is_not_written_over():
    """Whoever holds it may look at it."""
    subject = stated(Returned)
    (held,) = (n for n in subject.lowered.problem.outputs if n.startswith("sigmoid"))
    assert held not in overwritten(subject.lowered.problem).values()


def test_another_layout_is_not_written_over():
    """What is read across is still needed where the result would be left."""
    subject = stated(Transposed)
    nodes = subject.lowered.node_of
    found = overwritten(subject.lowered.problem)
    assert found
    for name, value in found.items():
        written, read = (nodes[n].meta["val"] for n in (name, value))
        assert written.numel() == read.numel()
        assert written.is_contiguous() == read.is_contiguous()


class Moved(Classifier):
    """The elements are taken from other places."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        return self.move(self.head(x)).square().sum()


@pytest.mark.parametrize(
    "move",
    [
        lambda y: y[:, torch.arange(y.shape[1]).flip(0)],
        lambda y: y.gather(1, torch.arange(y.shape[1]).flip(0).expand_as(y)),
        lambda y: y + torch.zeros_like(y).index_fill(1, torch.tensor([0]), 1.0),
    ],
    ids=["index", "gather", "like"],
)
def test_what_is_read_in_other_places_is_not_written_over(move: Callable[[Tensor], Tensor]):
    """Nor by what takes no more than its shape."""
    lowered = stated(lambda: Moved(move)).lowered
    nodes = {op.name: lowered.node_of[op.name] for op in lowered.problem.ops if op.overwrites}
    assert not {n for n, node in nodes.items() if torch.Tag.pointwise not in node.target.tags}


def test_the_users_configuration_is_asked():
    """No writes in place, or none over what the forward has saved for the backward."""
    with torch._inductor.config.patch(inplace_buffers=False):
        assert not overwritten(stated(Activation).lowered.problem)
    saved = overwritten(stated(Activation).lowered.problem)["sigmoid_backward"]
    with torch._functorch.config.patch(donated_buffer=False):
        kept = overwritten(stated(Activation).lowered.problem)
    assert saved == "sigmoid"
    assert "sigmoid_backward" not in kept
    assert kept["sigmoid"] == "addmm"  # the forward's own


def test_op_by_op_nothing_is_written_over():
    """Each operation of torch makes a tensor of its own."""
    subject = subject_of(Classifier(), given(), Setting(compiler="eager"))
    assert not any(op.overwrites for op in subject.lowered.problem.ops)


def test_what_inductor_makes_loops_of_has_no_workspace():
    """Whatever torch's own operators take, unlike those that are called as they are."""

    def function(x: Tensor) -> Tensor:
        return F.max_pool2d(torch.cat([x @ x, x]).sin()[None], 2).cumsum(-1).sort().values.sum()

    subject = subject_of(function, torch.randn(8, 8, requires_grad=True), Setting(compiler="eager"))
    graph = subject.lowered.graph
    forward = tuple(replace(op, workspace_nbytes=64) for op in graph.forward)
    given = replace(subject.lowered, graph=replace(graph, forward=forward))
    found = {op.name: op.workspace_nbytes for op in as_loops(given).graph.forward}
    loops = {"cat", "sin", "max_pool2d_with_indices", "sum_1", "zeros"}  # torch 2.11 has the last
    assert found == {name: 0 if name in loops else 64 for name in found}
    assert {"mm", "cumsum", "sort", *loops} - {"zeros"} <= found.keys()
