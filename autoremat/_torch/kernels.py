"""Private names of Inductor's scheduler: the loops that it has generated, and what is in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V

from autoremat._torch.inductor import size_hint_of_expr

__all__ = ["LOADS_OF_BOOLS", "STORES_OF_BOOLS", "Loop", "generated_loops"]

# Names in `Loop.computed` that are none of Inductor's.
LOADS_OF_BOOLS, STORES_OF_BOOLS = "load of bool", "store of bool"


@dataclass(frozen=True)
class Loop:
    """What one kernel of generated code moves and computes.

    Attributes:
        moved_nbytes: read and written, what stays inside of the kernel left out.
        computed: by the name of an operation, for how many elements it is computed; by names of our
            own, how many bools are read and written.
        flops: of the matrix product in a template, else 0.
        dtype: of that product.
    """

    moved_nbytes: int
    computed: Mapping[str, int]
    flops: int = 0
    dtype: torch.dtype = torch.float32


def generated_loops(graph: Any) -> list[Loop]:
    """The kernels of a graph whose code is generated, but for calls of libraries.

    Raises:
        ValueError: if of one of them nobody knows what it does.
    """
    with V.set_graph_handler(graph):
        return list(_loops(graph.scheduler.nodes))


def _loops(nodes: Any) -> Iterator[Loop]:
    for node in nodes:
        if any(isinstance(part.node, ir.UserDefinedTritonKernel) for part in node.get_nodes()):
            raise ValueError("How long a kernel of the user's takes is not known.")
        parts = [part for part in node.get_nodes() if isinstance(part, SchedulerNode)]
        if not parts or node.is_extern():
            continue
        computed = Counter[str]()
        for part in parts:
            computed += _computed(part)
        computed += _bools(node)
        moved_nbytes = int(node.get_read_write_buffers_sizes())
        if node.is_template():
            dtype, flops = node.get_template_node().get_dtype(), node.estimate_flops()
            if flops is None:
                raise ValueError("How much a template computes is not known.")
            yield Loop(moved_nbytes, dict(computed), int(flops), dtype)
        else:
            yield Loop(moved_nbytes, dict(computed))


def _bools(node: Any) -> Counter[str]:
    """A byte each; what stays inside of a kernel is no read and no write."""

    def moved(**which: bool) -> int:
        nbytes_by_buffer = node.get_read_write_buffer_accesses(**which)
        return sum(n for name, n in nbytes_by_buffer.items() if _dtype_of(name) == torch.bool)

    return Counter(
        {
            LOADS_OF_BOOLS: moved(include_reads=True, include_writes=False),
            STORES_OF_BOOLS: moved(include_reads=False, include_writes=True),
        }
    )


def _dtype_of(buffer: str) -> torch.dtype | None:
    try:
        return V.graph.get_dtype(buffer)
    except (KeyError, NotImplementedError, AttributeError):  # no tensor, or several
        return None


def _computed(part: SchedulerNode) -> Counter[str]:
    """Of one loop body; what templates are made of has none."""
    body = getattr(part, "_body", None)
    if body is None:
        return Counter()
    elements = math.prod(
        size_hint_of_expr(V.graph, extent) for sizes in part.get_ranges() for extent in sizes
    )
    return Counter({name: count * elements for name, count in body.op_counts.items()})
