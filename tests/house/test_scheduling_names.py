"""Smoke tests for what autoremat asks of Inductor's scheduler, and lets it do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from autoremat import _torch

pytestmark = pytest.mark.inductor

SIDE = 64
NBYTES = 4 * SIDE * SIDE


class Pass(_torch.CustomSchedulerPass):  # type: ignore[misc]
    """Calls a function with the scheduler nodes."""

    def __init__(self, seen: Callable[[Sequence[Any]], None]) -> None:
        self.seen = seen

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.seen(nodes)
        return nodes

    def uuid(self) -> str:
        return f"pass {time.time_ns()}"  # a hit in Inductor's cache would call nothing

    def __deepcopy__(self, memo: object) -> Any:
        return self


def source_of(
    function: Callable[..., Any], seen: Callable[[Sequence[Any]], None], **options: Any
) -> str:
    """The wrapper of a function of one square matrix, whose result is checked."""
    x = torch.eye(SIDE)
    assert _torch.pre_fusion_pass() is None
    run = torch.compile(function, options={"_pre_fusion_custom_pass": Pass(seen), **options})
    found, (source,) = run_and_get_code(run, x)
    assert all(map(torch.allclose, found, function(x)))
    return str(source)


def kernels_of(function: Callable[..., Any], **options: Any) -> _torch.Kernels:
    """The function's kernels before fusion."""
    found: list[_torch.Kernels] = []
    source_of(function, lambda nodes: found.append(_torch.kernels_before_fusion(nodes)), **options)
    return found[0]


def test_kernels_before_fusion():
    """Positions, buffers and what must run before."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return product.neg(), product @ x

    found = kernels_of(function)
    product, negative, last = found.buffers[-3:]
    assert sorted(found.numbers.values()) == [0, 1, 2]
    assert found.predecessors == ((), (0,), (0,))
    assert (product.makers, set(product.readers), product.is_kept) == ((0,), {1, 2}, False)
    assert {negative.makers, last.makers} == {(1,), (2,)}
    assert negative.is_kept
    assert last.is_kept
    assert {b.allocated_nbytes for b in found.buffers if b.makers} == {NBYTES}


def over_itself(x: Tensor) -> tuple[Tensor]:
    return (torch.tanh(x @ x) @ x,)


def over_what_was_read_before(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ x
    return product.tanh().sum(0), product.flip(0).contiguous() + product


def over_an_input(x: Tensor) -> tuple[Tensor]:
    return (x.tanh(),)


def over_what_is_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ x
    return product, product.tanh()


def by_a_library(x: Tensor) -> tuple[Tensor]:
    return ((x @ x) @ x,)


def test_what_ends_in_a_loop_is_written_over():
    """The product's storage takes the result, as the generated code says."""
    assert kernels_of(over_itself).overwrites == ((_torch.Overwrite(1, NBYTES, ()),),)
    assert "in_out_ptr0" in source_of(over_itself, lambda nodes: None)


@pytest.mark.parametrize(
    "function", [over_an_input, over_what_is_returned, by_a_library, over_what_was_read_before]
)
def test_what_may_not_be_written_over(function: Callable[..., Any]):
    """What the caller holds, what a library reads, and what is read in other places as well."""
    assert kernels_of(function).overwrites == ()
    assert "in_out_ptr" not in source_of(function, lambda nodes: None)


def test_nothing_is_written_over_where_the_user_forbids_it():
    """`inplace_buffers` of Inductor's configuration."""
    assert kernels_of(over_itself, inplace_buffers=False).overwrites == ()


def test_another_reader_has_to_come_before():
    """Unless the writer needs what it makes."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return (product * product.sum(1, keepdim=True)) @ x, product.amax(0)

    found = kernels_of(function)
    ((overwrite,),) = found.overwrites
    (largest,) = set(overwrite.earlier)
    made = {b.makers: b.allocated_nbytes for b in found.buffers}
    assert made[overwrite.kernel,] == NBYTES
    assert made[largest,] == 4 * SIDE


def test_nodes_know_no_more_of_memory_than_before():
    """Else Inductor's own planning would find nodes that are fused away."""
    changed: list[Any] = []

    def seen(nodes: Sequence[Any]) -> None:
        buffers = nodes[0].scheduler.name_to_buf.values()
        before = [b.mpi_buffer for b in buffers], [hasattr(n, "mpi_node") for n in nodes]
        _torch.kernels_before_fusion(nodes)
        after = [b.mpi_buffer for b in buffers], [hasattr(n, "mpi_node") for n in nodes]
        changed.append(any(map(lambda a, b: a is not b, before[0], after[0])))
        changed.append(before[1] != after[1])

    source_of(over_itself, seen)
    assert changed == [False, False]


def test_fusion_can_be_refused():
    """The pass sees scheduler nodes; it is asked what may become one kernel, by what is one."""
    asked: list[list[int]] = []
    origins: list[set[str]] = []

    def admits(fused: Sequence[int]) -> bool:
        asked.append(list(fused))
        return len(asked) == 1  # the first two, but not the third with them

    def seen(nodes: Sequence[Any]) -> None:
        origins.append(_torch.origin_names(nodes))
        _torch.limit_fusion(nodes, _torch.kernels_before_fusion(nodes).numbers, admits)

    source_of(lambda x: (x.neg(), x.abs(), x.exp(), x @ x), seen)
    assert len(origins[0]) == 4
    assert len(set(asked[0])) == 3
    assert asked[1:]
    assert all(fused == [0, 0, 0, 3] for fused in asked[1:])


class Mark(CustomGraphPass):
    """Has sines made where they stand."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                _torch.materialise(node)

    def uuid(self) -> str:
        return f"mark {time.time_ns()}"

    def __deepcopy__(self, memo: object) -> Any:
        return self


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_loop_is_made_where_it_stands(is_marked: bool):
    """Before the product, not where it is read after that."""

    def function(x: Tensor) -> tuple[Tensor]:
        wave = x.sin()
        return ((x @ x) * wave,)

    options = {"post_grad_custom_pre_pass": Mark()} if is_marked else {}
    found = kernels_of(function, **options)
    assert found.predecessors == (((), (), (0, 1)) if is_marked else ((), (0,)))


def test_parts_of_a_concatenation_have_its_memory():
    """Two halves that are computed into it, of which one goes on: it is there from the first on."""

    def function(x: Tensor) -> tuple[Tensor]:
        left, right = (x @ x).sin(), x.cos()
        return (torch.cat([left, right]) @ x,)

    found = kernels_of(function)
    made = [(b.makers, b.allocated_nbytes) for b in found.buffers if b.makers]
    assert sorted(nbytes for _, nbytes in made) == [NBYTES, 2 * NBYTES, 2 * NBYTES]
    assert ((1, 2, 3), 2 * NBYTES) in made


@pytest.mark.parametrize("every", [1, 2, 4])
def test_functions_end_where_they_are_told_to(every: int):
    """Loops that nothing fuses; by itself Inductor puts all of them into one."""
    seen: list[Sequence[_torch.Scheduled]] = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            x = x / (x.sum(1, keepdim=True) + 1.0)
        return (x,)

    def ends(kernels: Sequence[_torch.Scheduled]) -> set[int]:
        seen.append(kernels)
        return set(range(every - 1, len(kernels), every))

    def limit(nodes: Sequence[Any]) -> None:
        _torch.limit_joining(nodes, _torch.kernels_before_fusion(nodes).numbers, ends)

    source = source_of(function, limit, max_fusion_size=1)
    (kernels,) = seen
    assert len(kernels) == 4
    assert all(kernel.may_share for kernel in kernels)
    calls = source[source.index("def call(") :].count("cpp_fused")
    assert calls == -(-len(kernels) // every)


def test_a_concatenation_belongs_to_the_kernel_before_it():
    """It is none itself: Inductor never asks whether a function ends after it."""

    def function(x: Tensor) -> tuple[Tensor]:
        return (torch.cat([x.sin(), x.cos()]).sum(1),)

    def ends(kernels: Sequence[_torch.Scheduled]) -> set[int]:
        return {n for n, kernel in enumerate(kernels) if len(kernel.parts) > 1}

    def limit(nodes: Sequence[Any]) -> None:
        _torch.limit_joining(nodes, _torch.kernels_before_fusion(nodes).numbers, ends)

    source = source_of(function, limit, max_fusion_size=1)
    assert source[source.index("def call(") :].count("cpp_fused") == 2


@pytest.mark.parametrize(("limit_nbytes", "is_held"), [(1 << 40, True), (0, False)])
def test_what_is_free_is_held_for_later_only_within_the_limit(limit_nbytes: int, is_held: bool):
    """After the peak, three products later, a result has the size of the second."""
    first, second, third = torch.eye(SIDE, 512), torch.eye(512, SIDE), torch.eye(SIDE, 80)
    fourth, last = torch.eye(80, 96), torch.eye(96, SIDE)

    def function(x: Tensor) -> tuple[Tensor]:
        return (x @ first @ second @ third @ fourth @ last,)

    source = source_of(function, lambda nodes: _torch.limit_reuse(nodes, limit_nbytes))
    assert ("# reuse" in source) == is_held
