"""Gradients of parts of one tensor, put together in one buffer in place of a sum of full ones.

Enters: a joint graph that may run op by op. Leaves: the same graph, where a sum of the backwards
of `x[0]`, `x[:, 2:4]` and so on, of parts that are disjoint, is one `cat`: autograd makes a tensor
of the size of the whole for each part, zero but for the part, and adds them up, so that three of
them are there at once. A graph with Inductor's decompositions has no such nodes: it fuses the sum.
Guarantees: the values are those of the sum, strides too; only a zero may have another sign (a sum
turns -0.0 into 0.0; the backward of `unbind`, which is eager mode's for `q, k, v = x`, does not).
What waits for the other parts takes no more than what waited before. Parts that overlap, and a sum
that the gradient of the whole is in before its last part, stay as they are: it would be rounded
otherwise, or wait longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat import _torch

aten = torch.ops.aten


@dataclass(frozen=True)
class _Whole:
    """What parts are of.

    Attributes:
        sizes: as the graph has them: numbers and nodes.
        dimension: along which the parts lie.
        extent: of it, in positions.
    """

    sizes: tuple[Any, ...]
    dimension: int
    extent: int


@dataclass(frozen=True)
class _Part:
    """The gradient of a part: of positions along one dimension.

    Attributes:
        whole: what it is a part of.
        number: of its node in the graph.
        node: the backward of a slice or a selection, as large as the whole.
        start: the first position.
        end: behind the last position.
    """

    whole: _Whole
    number: int
    node: fx.Node
    start: int
    end: int

    @property
    def gradient(self) -> fx.Node:
        """What is written to those positions."""
        gradient = self.node.args[0]
        assert isinstance(gradient, fx.Node)
        return gradient

    @property
    def is_selection(self) -> bool:
        """Whether the gradient lacks the dimension."""
        return self.node.target is aten.select_backward.default


def put_parts_together(graph: fx.Graph) -> None:
    """Write sums of two and more gradients of disjoint parts as one `cat`."""
    sums: dict[fx.Node, tuple[_Part, ...]] = {}
    for number, node in enumerate(graph.nodes):
        part = _part(number, node)
        parts = _added_up(node, sums) if part is None else (part,)
        if parts:
            sums[node] = parts
    for node, parts in sums.items():
        is_operand = any(reader in sums and _is_sum(reader) for reader in node.users)
        if len(parts) > 1 and not is_operand and _waits_for_no_more(parts):
            _write(graph, node, parts)


def _part(number: int, node: fx.Node) -> _Part | None:
    """A node as the gradient of a part; None if it is nothing of the kind."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.select_backward.default:
        gradient, sizes, dimension, start = args
        end = step = 1
    elif node.target is aten.slice_backward.default:
        gradient, sizes, dimension, start, end, step = args
    else:
        return None
    value = _torch.fake_value(node)
    dimension %= value.dim()
    extent = value.shape[dimension]
    if step != 1 or not all(isinstance(position, int) for position in (extent, start, end)):
        return None
    start = _within(start, extent)
    is_selection = node.target is aten.select_backward.default
    end = start + 1 if is_selection else _within(end, extent)
    part = _Part(_Whole(tuple(sizes), dimension, extent), number, node, start, end)
    return part if end > start and _is_all_of(gradient, part) else None


def _within(position: int, extent: int) -> int:
    return max(0, min(position + extent if position < 0 else position, extent))


def _is_all_of(gradient: fx.Node, part: _Part) -> bool:
    """Whether a gradient has the sizes of its part: it is not spread over it, nor converted."""
    value, written = _torch.fake_value(part.node), _torch.fake_value(gradient)
    sizes = list(value.shape)
    here = slice(part.whole.dimension, part.whole.dimension + 1)
    sizes[here] = [] if part.is_selection else [part.end - part.start]
    return _kind(written) == _kind(value) and _torch.same_sizes(written.shape, sizes)


def _kind(value: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.layout]:
    return value.dtype, value.device, value.layout


def _is_sum(node: fx.Node) -> bool:
    is_addition = node.target is aten.add.Tensor and not node.kwargs
    return is_addition and len(node.all_input_nodes) == 2


def _added_up(node: fx.Node, sums: dict[fx.Node, tuple[_Part, ...]]) -> tuple[_Part, ...]:
    """The disjoint parts of one whole that an addition adds up; nothing if it is another one."""
    sources = node.all_input_nodes
    if not _is_sum(node) or any(len(source.users) != 1 or source not in sums for source in sources):
        return ()
    parts = sorted((part for s in sources for part in sums[s]), key=lambda part: part.start)
    is_apart = all(a.end <= b.start for a, b in itertools.pairwise(parts))
    return tuple(parts) if is_apart and len({part.whole for part in parts}) == 1 else ()


def _waits_for_no_more(parts: tuple[_Part, ...]) -> bool:
    """Whether the parts' gradients take no more, while they wait, than the sum of full ones did.

    That was one buffer until the last part was there, and two then. A gradient that is a view may
    keep a larger storage.
    """
    ordered = sorted(parts, key=lambda part: part.number)
    whole_nbytes = _nbytes(_torch.fake_value(ordered[0].node))
    held: dict[int | None, int] = {}
    for part in ordered:
        gradient = _torch.fake_value(part.gradient)
        held[_torch.storage_key(gradient)] = _nbytes(gradient)
        most_nbytes = whole_nbytes * (2 if part is ordered[-1] else 1)
        if sum(held.values()) > most_nbytes:
            return False
    return True


def _nbytes(value: torch.Tensor) -> int:
    return _torch.size_hint(value.untyped_storage().nbytes())


def _write(graph: fx.Graph, node: fx.Node, parts: tuple[_Part, ...]) -> None:
    """Put one `cat` in a sum's place."""
    value = _torch.fake_value(node)
    made: list[fx.Node] = []

    def call(target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = _torch.meta_of_copy(node)
        _torch.set_fake_value(new, target(*fx.map_arg(args, _torch.fake_value)))
        made.append(new)
        return new

    with graph.inserting_before(node), _torch.fake_mode_of(value):
        dimension = parts[0].whole.dimension
        together = call(aten.cat.default, list(_pieces(parts, call)), dimension)
    if _torch.same_sizes(_torch.fake_value(together).stride(), value.stride()):
        node.replace_all_uses_with(together)
        return
    for unused in reversed(made):  # such as channels last
        graph.erase_node(unused)


def _pieces(parts: tuple[_Part, ...], call: Any) -> Iterator[fx.Node]:
    """What lies one behind the other along the dimension: gradients, and zeros between them."""
    position = 0
    for part in parts:
        yield from _zeros(part, part.start - position, call)
        if part.is_selection:
            yield call(aten.unsqueeze.default, part.gradient, part.whole.dimension)
        else:
            yield part.gradient
        position = part.end
    yield from _zeros(parts[-1], parts[-1].whole.extent - position, call)


def _zeros(like: _Part, count: int, call: Any) -> Iterator[fx.Node]:
    """So many positions that no part covers: one zero, seen as all of them."""
    if count:
        sizes = list(like.whole.sizes)
        sizes[like.whole.dimension] = count
        zero = call(aten.new_zeros.default, like.gradient, [])
        yield call(aten.expand.default, zero, sizes)
