"""Slices of all that there is, and their backwards, left out of a graph.

Enters: a joint graph. Leaves: the same graph, where what read such a slice reads what it is of.
Where sizes are numbers torch leaves them out itself; a graph for sizes that vary has each `:` of an
index as an operation, and in the backward a buffer of zeros that all of a gradient is copied into.
Guarantees: every value is the same, with the same strides; outputs are what they were; nothing is
larger that waits: a gradient is read in place of its copy only where its storage is no larger.
"""

from __future__ import annotations

import torch
from torch import fx

from autoremat import _torch

aten = torch.ops.aten


def leave_out_whole_slices(graph: fx.Graph) -> None:
    """Read what a slice is of in place of one that is as large, whatever the sizes are."""
    for node in list(graph.nodes):
        is_copy = node.target is aten.slice_backward.default
        if not is_copy and node.target is not aten.slice.Tensor:
            continue
        source = node.args[0]
        is_output = any(user.op == "output" for user in node.users)
        if not is_output and _is_same(node, source, is_copy=is_copy):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_same(node: fx.Node, source: fx.Node, *, is_copy: bool) -> bool:
    """Whether a slice, or its backward, is what it is made of: it leaves no position out."""
    result, given = _torch.fake_value(node), _torch.fake_value(source)
    kept = result.untyped_storage().nbytes(), given.untyped_storage().nbytes()
    return (
        (result.dtype, result.device) == (given.dtype, given.device)
        and _torch.same_sizes(result.shape, given.shape)
        and _torch.same_sizes(result.stride(), given.stride())
        and (not is_copy or _torch.same_sizes(kept[:1], kept[1:]))
    )
