"""What library calls of a GPU's code allocate inside, by the sources of the libraries.

Enters: the wrapper's source and the layout of its buffers. Leaves: bytes of each call whose source
says them, and what stays allocated between calls. Rules are those of torch 2.13: `flash_api.cpp`
(`mha_bwd`: the gradients of queries are summed in float32, those of shared keys and values per
head) and `CublasHandlePool.cpp` (one workspace that stays). What cuDNN takes for its own backward
is not published, and the memory-efficient kernel has sums of its own: both are taken to sum the
gradients of queries as flash does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import torch

from autoremat.cost.cache import Measured
from autoremat.cost.calls import TensorSpec
from autoremat.cost.device_specs import DeviceSpec
from autoremat.memory.residents import Resident, with_others

_MIB = 1 << 20
_ROWS = 128  # to which flash rounds the tokens of a sequence
_HOPPER = 9  # major compute capability from which products have a larger workspace
_BACKWARDS = (
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)


def workspace_nbytes(capability: tuple[int, int]) -> int:
    """What cuBLAS keeps once a product has run: one buffer per stream, which torch allocates.

    `CUBLAS_WORKSPACE_CONFIG` is not set: `:4096:8` from Hopper on, `:4096:2:16:8` before.
    """
    return 32 * _MIB if capability[0] >= _HOPPER else 8 * _MIB + 128 * 1024


def with_libraries(resident: Resident, spec: DeviceSpec | None) -> Resident:
    """What a step holds on a GPU that is not here, that which its libraries keep included."""
    if spec is None:
        return resident
    kept_nbytes = workspace_nbytes(spec.chip.capability)
    tensors = resident.tensors and replace(resident.tensors, libraries=(kept_nbytes,))
    parts = with_others(resident.parts, kept_nbytes)
    return replace(resident, parts=parts, tensors=tensors)


def library_calls_elsewhere(
    function: ast.AST,
    layout_of: Callable[[str], TensorSpec | None],
    _device: torch.device,
) -> dict[str, Measured]:
    """By the call's text, what it allocates inside; its time is not known."""
    found: dict[str, Measured] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and any(
            f".{n}." in ast.unparse(node.func) for n in _BACKWARDS
        ):
            names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
            layouts = [layout for name in names if (layout := layout_of(name)) is not None]
            nbytes = _attention_backward_nbytes([one for one in layouts if len(one.shape) == 4])
            found[ast.unparse(node)] = Measured(0.0, nbytes, 0)
    return found


def _attention_backward_nbytes(tensors: list[TensorSpec]) -> int:
    """Of an attention's backward, given its gradient, queries, keys and values, in this order."""
    if len(tensors) < 4:
        return 0
    _, query, key, value = tensors[:4]
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
