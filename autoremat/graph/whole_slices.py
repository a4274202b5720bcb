"""Slices of all that there is, and their backwards, left out of a graph that may run op by op.

Enters: a joint graph. Leaves: the same graph, where what read such a slice reads what it is of.
Where sizes are numbers torch leaves them out itself; a graph for sizes that vary has each `:` of an
index as an operation, and in the backward a buffer of zeros that all of a gradient is copied into.
A graph with Inductor's decompositions has no such backward.
Guarantees: every value is the same, with the strides that it was traced with; no output shares
memory that it did not; a gradient is read in place of its copy only where it keeps as many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat import _torch

aten = torch.ops.aten


def leave_out_whole_slices(graph: fx.Graph) -> None:
    """Read what a slice is of in place of one that is as large, whatever the sizes are."""
    for node in list(graph.nodes):
        if node.target is aten.slice.Tensor:
            may = all(user.op != "output" for user in node.users) and _is_same(node)
        elif node.target is aten.slice_backward.default:
            # A view would be one of what was copied, and perhaps an output.
            is_only_read = not any(user.op == "output" or _is_view(user) for user in node.users)
            may = is_only_read and _is_same(node) and _keeps_as_much(node)
        else:
            continue
        if may:
            node.replace_all_uses_with(_source(node))
            graph.erase_node(node)


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "is_view", False) or node.target is aten._unsafe_view.default


def _is_same(node: fx.Node) -> bool:
    """Whether a slice, or its backward, is what it is made of: it leaves no position out."""
    result, given = _values(node)
    return (
        {result.layout, given.layout} == {torch.strided}
        and _torch.same_sizes(result.shape, given.shape)
        and _torch.same_sizes(result.stride(), given.stride())
        and (result.is_conj(), result.is_neg()) == (given.is_conj(), given.is_neg())
    )


def _keeps_as_much(node: fx.Node) -> bool:
    """Whether the storages of a copy and of what is copied are as large."""
    result, given = (_torch.size_expression(v.untyped_storage().nbytes()) for v in _values(node))
    return bool(result == given)


def _values(node: fx.Node) -> tuple[Any, Any]:
    return _torch.fake_value(node), _torch.fake_value(_source(node))
