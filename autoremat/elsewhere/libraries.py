"""What library calls of a GPU's code take and allocate inside, by data sheet and sources.

Enters: the wrapper's source and the layout of its buffers. Leaves: the time of each call, its
bytes where the library's source says them, and what stays allocated between calls. Rules are those
of torch 2.13: `flash_api.cpp` (`mha_bwd`: the gradients of queries are summed in float32, those of
shared keys and values per head) and `CublasHandlePool.cpp` (workspaces that stay). What cuDNN takes
for its own backward is not published, and the memory-efficient kernel has sums of its own: both are
taken to sum the gradients of queries as flash does.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import torch

from autoremat.cost.cache import Measured
from autoremat.cost.device_specs import DeviceSpec
from autoremat.cost.gpu_times import call_us
from autoremat.cost.wrapper_calls import (
    LayoutOf,
    call_in_wrapper,
    layout_of_argument,
    library_nodes,
)
from autoremat.memory.residents import Resident
from autoremat.memory.unseen import workspaces

_ROWS = 128  # to which flash rounds the tokens of a sequence
_BACKWARDS = (
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)


def with_libraries(resident: Resident, spec: DeviceSpec | None) -> Resident:
    """What a step holds on a GPU that is not here, that which its libraries keep included."""
    if spec is None:
        return resident
    kept = workspaces(spec.chip.capability, settings={})
    tensors = resident.tensors and replace(resident.tensors, libraries=kept)
    return replace(resident, tensors=tensors).with_unseen(sum(kept))


def library_calls_elsewhere(
    spec: DeviceSpec, function: ast.AST, layout_of: LayoutOf, _device: torch.device
) -> dict[str, Measured]:
    """By the call's text, what it takes by the data sheet and allocates inside by its source.

    Of a call that is none of torch's operators neither is known.
    """
    found: dict[str, Measured] = {}
    for node in library_nodes(function):
        call = call_in_wrapper(node, layout_of)
        nbytes = _attention_backward_nbytes(node, layout_of)
        if call is not None or nbytes:
            time_us = math.nan if call is None else call_us(call, spec)
            found[ast.unparse(node)] = Measured(time_us, nbytes, 0)
    return found


def _attention_backward_nbytes(node: ast.Call, layout_of: LayoutOf) -> int:
    """Of an attention's backward: it is given its gradient, queries, keys and values first."""
    if not any(name in ast.unparse(node.func) for name in _BACKWARDS):
        return 0
    given = [layout_of_argument(part, layout_of) for part in node.args[1:4]]
    tensors = [layout for layout in given if layout is not None]
    if len(tensors) < 3:
        return 0
    query, key, value = tensors
    batch, heads, tokens, size = query.shape
    rows = -(-tokens // _ROWS) * _ROWS
    step = 32 if size <= 128 else 64
    wide = -(-size // step) * step
    summed_nbytes = 4 * batch * heads * rows * (wide + 1)  # and a sum for each row
    if key.shape[1] == heads:
        return summed_nbytes
    pairs = (key, value)
    return summed_nbytes + sum(
        batch * heads * one.shape[-2] * one.shape[-1] * one.dtype.itemsize for one in pairs
    )
