"""Results that Inductor may leave in a buffer which the step updates again: all read copies.

The reference is eager PyTorch: `torch.compile` without autoremat gets most of this wrong, as a
result that it puts into the buffer changes with the buffer's next update.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.graph.storages import find_storages
from tests.joint_graphs import CPU, analyse, capture, leaf
from tests.tiny import WIDTH, Buffered, rows
from tests.training import UNBOUNDED, close, make_seeded, optimized, recomputes, step


@torch.library.custom_op("autoremat_tests::bump", mutates_args=("buffer",))
def bump(x: Tensor, buffer: Tensor) -> Tensor:
    """Adds the mean of the rows to a buffer."""
    buffer.add_(x.mean(0))
    return x * 1.0


@bump.register_fake
def _bump(x: Tensor, buffer: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("autoremat_tests::bump_all", mutates_args=("buffers",))
def bump_all(x: Tensor, buffers: list[Tensor]) -> None:
    """Adds the mean of the rows to several buffers."""
    for buffer in buffers:
        buffer.add_(x.mean(0))


def by_operator(x: Tensor, buffer: Tensor) -> None:
    torch.ops.autoremat_tests.bump(x, buffer)


def by_operator_of_lists(x: Tensor, buffer: Tensor) -> None:
    torch.ops.autoremat_tests.bump_all(x, [buffer])


def by_index(x: Tensor, buffer: Tensor) -> None:
    buffer[torch.arange(2)] = x.mean(0)[:2]


def by_slice(x: Tensor, buffer: Tensor) -> None:
    buffer[1:3] = x.mean(0)[:2]


def by_foreach(x: Tensor, buffer: Tensor) -> None:
    torch._foreach_add_([buffer], [x.mean(0)])


UPDATES = [by_operator, by_operator_of_lists, by_index, by_slice, by_foreach]


class UpdatesTwice(Buffered):
    """A buffer, a row of another and the first half of a third, updated and read in two layers.

    Each in a way of its own, if three are given.
    """

    def __init__(self, *updates: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.layers = self.layers[:2]
        self.updates = updates if len(updates) == 3 else 3 * updates
        self.register_buffer("halves", torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            buffers = (self.mean, self.table[0], self.halves[:WIDTH])
            for update, buffer in zip(self.updates, buffers, strict=True):
                update(x.detach(), buffer)
                x = torch.tanh(x * (buffer.sin() + 2))
            if layer is self.first:
                early = self.mean.clone()
        return x.square().mean(), early


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    return output[0] + 0.0 * output[1].sum()


@pytest.mark.parametrize("update", UPDATES)
def test_nothing_reads_such_a_result_but_its_copy(update: Callable[[Tensor, Tensor], None]):
    """Nor does the caller; the copy is the forward's, and made once."""
    buffer = torch.ones(4)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        update(x.detach(), buffer)
        y = (x * buffer.sin()).sin()
        early = buffer.clone()
        update(y.detach(), buffer)
        return (y * buffer.view(2, 2).sin().view(4)).sum(), early

    joint = capture(function, leaf(3, 4)).prepared()
    storages = find_storages(joint.nodes, CPU)
    results = [n for n in joint.overwritten if storages.resident.isdisjoint(storages.of_node[n])]
    assert results, "the test has nothing to show"
    for node in results:
        for reader in node.users:
            updates = node in [base for base, _ in _torch.in_place_results(reader)]
            is_copy = reader.target is torch.ops.prims.rev.default
            assert reader in joint.overwritten or updates or is_copy or "copy_" in reader.name
            assert not is_copy or (reader in joint.forward and reader not in joint.overwritten)


@pytest.mark.parametrize("update", [by_index, by_slice])
def test_an_update_is_never_made_again(update: Callable[[Tensor, Tensor], None]):
    """What it starts from is gone by then."""
    buffer = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        for _ in range(2):
            update(x.detach(), buffer)
            x = (x * buffer.sin()).sin()
        return x.sum()

    found = analyse(function, leaf(3, 4))
    updates = [node for node in found.joint.nodes if _torch.in_place_results(node)]
    assert len(updates) == 2
    assert set(updates) <= found.constraints.run_once.keys()


def test_results_in_no_input_are_left_alone():
    """What is written to memory that the step itself has made needs no copy."""

    def function(x: Tensor) -> Tensor:
        own = torch.ones(4)
        by_operator(x.detach(), own)
        return (x * own.sin()).sum()

    assert not capture(function, leaf(3, 4)).prepared().overwritten


def test_the_operators_own_result_is_not_copied():
    """Only what it has updated is: its result may be as large as an activation."""
    buffer = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        y = torch.ops.autoremat_tests.bump(x.detach(), buffer)
        return (x * y * buffer.sin()).sum()

    joint = capture(function, leaf(3, 4)).prepared()
    copies = joint.module.graph.find_nodes(op="call_function", target=torch.ops.prims.rev.default)
    assert [copy.meta["val"].shape for copy in copies] == [(4,)]


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_hold_op_by_op(update: Callable[[Tensor, Tensor], None]):
    """Each reader may be computed again: it reads the copy."""
    expected = step(make_seeded(lambda: UpdatesTwice(update)), (rows(),), loss_of)
    model = optimized(lambda: UpdatesTwice(update), None, policy="recompute-all")
    close(expected, step(model, (rows(),), loss_of), 1e-5)
    assert recomputes(model) > 0


def two_batches(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers after two forwards and then both backwards, and what they returned."""
    first, second = model(rows()), model(rows() + 1)
    (loss_of(first) + loss_of(second)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.buffers(), first[1], second[1]]


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("policy", ["save-all", "recompute-all"])
def test_gradients_hold_under_inductor(policy: str):
    """Also where a second forward runs before the first one's backward."""
    make = lambda: UpdatesTwice(by_operator, by_index, by_slice)  # noqa: E731
    expected = two_batches(make_seeded(make))
    model = optimized(make, None, policy=policy, compiler="inductor")
    for theirs, ours in zip(expected, two_batches(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.inductor
def test_verify_tells_wrong_kernels_from_rounding(monkeypatch: pytest.MonkeyPatch):
    """Without the copies, the plan is right run op by op, and what Inductor makes of it is not."""
    monkeypatch.setattr(_torch, "in_place_results", lambda node: [])
    model = optimized(lambda: UpdatesTwice(by_operator), UNBOUNDED, compiler="inductor")
    found = autoremat.verify(model, rows(), loss_fn=loss_of)
    assert not found.gradients_agree
    assert "run op by op the plan gives what it should" in found.explanation
