"""Gradients of parts of one tensor: one buffer where they are disjoint, and never other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoremat
from autoremat import _torch
from tests.joint_graphs import capture
from tests.tiny import WIDTH, sequences
from tests.training import peaks, same, step

Function = Callable[[Tensor], Tensor]


def some(dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf of 3 x 4 x 6 numbers."""
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return x.requires_grad_()


def by_iteration(x: Tensor) -> Tensor:
    q, k, v = x
    return (q.sin() * k.cos() + v.tanh()).sum()


def by_index(x: Tensor) -> Tensor:
    return (x[0].sin() * x[1].cos() + x[-1].tanh()).sum()


def by_index_in_the_middle(x: Tensor) -> Tensor:
    q, k, v, w = (x[:, i].t().contiguous() for i in range(4))
    return (q.sin() * k.cos() + v.tanh() * w.exp()).sum()


def by_slices(x: Tensor) -> Tensor:
    return (x[..., :2].sin() * x[..., 2:4].cos() + x[..., 4:].tanh()).sum()


def by_index_and_slice(x: Tensor) -> Tensor:
    return (x[:, 0].exp() + x[:, 1:].sin().sum(1)).sum()


def with_gaps(x: Tensor) -> Tensor:
    return (x[..., 1:2].exp() * x[..., 4].sin().unsqueeze(-1)).sum()


def halves_turned(x: Tensor) -> Tensor:
    """As rotary positions turn them."""
    angles = x.detach()
    straight = x * angles.cos()
    return (straight + torch.cat((-x[..., 3:], x[..., :3]), -1) * angles.sin()).sum()


def of_a_part(x: Tensor) -> Tensor:
    inner = x[:, 1:].sin()[:, :2]
    return (inner[..., :3].exp() * inner[..., 3:].cos() + x[:, :1, :3].tanh()).sum()


def position_by_position(x: Tensor) -> Tensor:
    state = x[:, 0].sin()
    for position in range(1, 4):
        state = (state * x[:, position]).tanh()
    return state.sum()


DISJOINT = [
    by_iteration,
    by_index,
    by_index_in_the_middle,
    by_slices,
    by_index_and_slice,
    with_gaps,
    halves_turned,
    of_a_part,
    position_by_position,
]


def overlapping(x: Tensor) -> Tensor:
    return (x[..., :4].sin() * x[..., 2:].exp()).sum()


def one_part_twice(x: Tensor) -> Tensor:
    return (x[0].sin() * (x + 0.0)[0].cos()).sum() + (x[1:2].exp() * x[1].tanh()).sum()


def every_second(x: Tensor) -> Tensor:
    return (x[..., ::2].sin() * x[..., 1::2].exp()).sum()


def one_part(x: Tensor) -> Tensor:
    return x[:, 0].exp().sum()


def along_two_dimensions(x: Tensor) -> Tensor:
    return (x[0, :, :3].sin() * x[1, :, 3:].exp()).sum() + x[..., 0].sin().sum()


def with_the_whole_first(x: Tensor) -> Tensor:
    y = x.sin()
    part = y[0].exp() * y[1].cos()
    return (part.tanh() + y.square()).sum()


def views_of_more(x: Tensor) -> Tensor:
    """What comes back to the parts is a view of the gradient of all that was put together."""
    wide = torch.ones(12, 4, 6)
    return torch.cat((x[0].unsqueeze(0), x[1].unsqueeze(0), wide)).square().sum()


LEFT = [
    overlapping,
    one_part_twice,
    every_second,
    one_part,
    along_two_dimensions,
    with_the_whole_first,
    views_of_more,
]


BACKWARDS = {torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default}


class Scaled(nn.Module):
    """A function of an input, and of a parameter."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.scale


def backwards(nodes: Iterable[fx.Node]) -> int:
    """How many gradients of parts are as large as the whole."""
    return sum(node.target in BACKWARDS for node in nodes)


def check_gradients(function: Function, dtype: torch.dtype) -> None:
    """Loss and gradients are eager mode's, to the bit but for the sign of a zero."""
    torch._dynamo.reset()
    plain = Scaled(function)
    planned = autoremat.optimize(Scaled(function), "1GB", compiler="eager", verbose=False)
    expected, found = step(plain, [some(dtype)]), step(planned, [some(dtype)])
    same(expected, found)
    mine, theirs = (outcome.gradients["input 0"] for outcome in (found, expected))
    assert mine is not None
    assert theirs is not None
    assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("function", DISJOINT)
def test_disjoint_parts_get_no_tensor_of_the_size_of_the_whole_each(function: Function):
    """One buffer; what is left in the last function is of single parts."""
    captured = capture(function, some())
    assert backwards(captured.module.graph.nodes) > 1
    assert backwards(captured.prepared().nodes) == (2 if function is of_a_part else 0)


@pytest.mark.parametrize("function", LEFT)
def test_other_sums_of_parts_stay(function: Function):
    """What would be rounded otherwise, or wait longer, or is not contiguous."""
    captured = capture(function, some())
    before = backwards(captured.module.graph.nodes)
    assert before == backwards(captured.prepared().nodes) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", DISJOINT + LEFT)
def test_gradients_of_parts_are_those_of_eager_mode(function: Function, dtype: torch.dtype):
    """Values, types and strides."""
    check_gradients(function, dtype)


@pytest.mark.parametrize("function", [by_index, by_slices, with_gaps, every_second])
def test_sizes_that_vary_get_no_guard(function: Function):
    """One graph serves all lengths, and a symbol beside the parts' dimension changes nothing."""
    x = some()
    torch._dynamo.mark_dynamic(x, 1)
    captured = capture(function, x)
    assert any(map(_torch.is_symbolic, captured.module.graph.nodes))
    assert (backwards(captured.prepared().nodes) == 0) == (function is not every_second)
    torch._dynamo.reset()
    plain, planned = Scaled(function), Scaled(function)
    options = {"budget": "1GB", "compiler": "eager", "verbose": False}
    planned.compile(backend="autoremat", dynamic=True, options=options)
    graphs_before = graphs()
    for length in (4, 5, 7):
        x = torch.randn(3, length, 6, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        same(step(plain, [x]), step(planned, [x]))
    assert graphs() == graphs_before + 1


def graphs() -> int:
    """How many graphs Dynamo has handed over."""
    return int(_torch.dynamo_counters["stats"]["unique_graphs"])


class Block(nn.Module):
    """Attention whose queries, keys and values are taken out of one projection."""

    def __init__(self, takes: str) -> None:
        super().__init__()
        self.takes = takes
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One head."""
        all_three = self.project(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        if self.takes == "unbind":
            q, k, v = all_three.unbind(0)
        elif self.takes == "iteration":
            q, k, v = all_three
        else:
            q, k, v = all_three[0], all_three[1], all_three[2]
        return x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))


def test_taking_parts_by_index_costs_no_memory():
    """The smallest peak is that of `unbind`, whose gradient autograd stacks by itself."""

    def smallest(takes: str) -> int:
        make = lambda: nn.Sequential(*(Block(takes) for _ in range(3)))  # noqa: E731
        return peaks(make, [sequences()]).smallest

    assert smallest("index") == smallest("iteration") == smallest("unbind")
