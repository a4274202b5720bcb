"""Slices of all that there is: no operation and no copy, whatever the sizes are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from tests.joint_graphs import Captured, capture
from tests.training import same, step

Function = Callable[[Tensor], Tensor]

SLICES = {torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default}


def by_a_slice(x: Tensor) -> Tensor:
    """As language models take the positions that they want logits of: here all."""
    return (x.sin()[:, slice(0, None), :] * 2).exp().sum()


def of_a_sum(x: Tensor) -> Tensor:
    y = x.sin()
    return (y[:, :].exp() + y.cos()).sum()


WHOLE = [by_a_slice, of_a_sum]


def all_but_the_first(x: Tensor) -> Tensor:
    return x.sin()[:, 1:].exp().sum()


def every_second(x: Tensor) -> Tensor:
    return x.sin()[:, ::2].exp().sum()


def of_one_number(x: Tensor) -> Tensor:
    """The gradient is one number, seen as all of them."""
    return x.sin()[:, :].sum()


def of_a_part_of_more(x: Tensor) -> Tensor:
    """The gradient lies as what it is of does, in a storage twice as large."""
    return torch.cat((x.sin()[:, :], x.cos())).exp().sum()


def seen_otherwise(x: Tensor) -> Tensor:
    """The gradient is read as a view."""
    return (x.sin()[:, :].exp().flatten(1)).sum() + (x.cos().flatten(1)[:, :]).exp().sum()


def conjugate(x: Tensor) -> Tensor:
    """The gradient has a bit that says that its imaginary part is to be turned."""
    z = torch.view_as_complex(x.sin().unflatten(-1, (3, 2)).contiguous())[:, :].conj()
    return torch.view_as_real((z * z).resolve_conj()).exp().sum()


def turned(x: Tensor) -> Tensor:
    """The gradient has other strides than what it is of."""
    return x.sin()[:, :].transpose(0, 1).contiguous().exp().sum()


NOT_WHOLE = [all_but_the_first, every_second]
OTHERWISE = [of_one_number, turned, of_a_part_of_more]
WITH_BACKWARD = [*NOT_WHOLE, *OTHERWISE, seen_otherwise, conjugate]


def some(length: int = 4) -> Tensor:
    x = torch.randn(3, length, 6, generator=torch.Generator().manual_seed(length))
    return x.requires_grad_()


def captured_of(function: Function) -> Captured:
    """Its joint graph for a length that varies."""
    x = some()
    torch._dynamo.mark_dynamic(x, 1)
    return capture(function, x)


def slices(function: Function) -> tuple[int, int]:
    """How many slices and backwards of slices torch traces, and how many are left of them."""
    captured = captured_of(function)
    graphs = captured.module.graph.nodes, captured.prepared().nodes
    before, after = (sum(node.target in SLICES for node in nodes) for nodes in graphs)
    return before, after


@pytest.mark.parametrize("function", WHOLE)
def test_slices_of_all_are_left_out(function: Function):
    """Torch traces them for sizes that vary, with a buffer of zeros in the backward."""
    before, after = slices(function)
    assert before > after == 0


@pytest.mark.parametrize("function", NOT_WHOLE)
def test_slices_of_some_stay(function: Function):
    """A position less, or each second one."""
    before, after = slices(function)
    assert before == after > 0


@pytest.mark.parametrize("function", OTHERWISE)
def test_a_gradient_that_lies_otherwise_is_copied(function: Function):
    """What reads it may need its strides, and would keep all that it lies in; the slice goes."""
    before, after = slices(function)
    assert before > after
    targets = [node.target for node in captured_of(function).prepared().nodes]
    assert torch.ops.aten.slice_backward.default in targets


def test_an_output_is_the_slice_that_was_traced():
    """AOTAutograd knows which outputs are views of which: none becomes another."""
    outputs = captured_of(lambda x: x.sin()[:, :]).prepared().fwd_outputs
    assert [node.target for node in outputs] == [torch.ops.aten.slice.Tensor]


class Added(nn.Module):
    """Two inputs, seen otherwise and added up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        together = one.flatten(1)[:, :] + other.flatten(1)[:, :]
        return (together.exp() * self.scale).sum()


def test_no_two_gradients_share_memory():
    """Each input's is its own: a second backward adds to it, and so may whoever trains."""
    torch._dynamo.reset()
    ranges = {"sequence": (2, 9)}
    model = autoremat.optimize(Added(), "1GB", compiler="eager", verbose=False, sizes=ranges)
    one, other, plain = some(), some(), some()
    model(one, other).backward()
    model(one, other).backward()
    for _ in range(2):
        Added()(plain, plain.detach()).backward()
    assert one.grad is not None
    assert other.grad is not None
    assert one.grad.data_ptr() != other.grad.data_ptr()
    torch.testing.assert_close(one.grad, plain.grad, rtol=0, atol=0)


class Scaled(nn.Module):
    """A function of an input, and of a parameter."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.scale


@pytest.mark.parametrize("function", [*WHOLE, *WITH_BACKWARD])
def test_gradients_are_those_of_eager_mode_at_each_size(function: Function):
    """To the bit, by one graph."""
    torch._dynamo.reset()
    plain, planned = Scaled(function), Scaled(function)
    ranges = {"sequence": (4, 9)}
    autoremat.optimize(planned, "1GB", compiler="eager", verbose=False, sizes=ranges)
    graphs = _torch.dynamo_counters["stats"]["unique_graphs"]
    for length in (4, 5, 9, 6):
        same(step(plain, [some(length)]), step(planned, [some(length)]))
    assert _torch.dynamo_counters["stats"]["unique_graphs"] == graphs + 1
