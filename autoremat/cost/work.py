"""How much work an operator is, by its shapes alone: bytes moved and FLOPs.

Enters: a `Call`. Leaves: bytes, FLOPs, and of products and attention the sizes that decide how
well a device computes them. Guarantees: nothing is allocated or run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autoremat._torch import OpOverload, arguments_of, tree_map
from autoremat.cost.calls import Call, TensorSpec
from autoremat.cost.grouped import grouped_flops, is_grouped

# They read rows of their first argument: as many bytes as they write.
_LOOKUPS = frozenset({"embedding", "index", "_unsafe_index", "gather", "index_select"})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "bias_addmm"})
_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_backward"})
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # of attention; backward makes the scores once more
_BLOCK = 128  # tokens that a kernel takes at once: of what is masked it skips whole blocks


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product: `batch` times (`rows`, `depth`) by (`depth`, `columns`)."""

    batch: int
    rows: int
    depth: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.depth * self.columns


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """A kernel that never writes the scores.

    Attributes:
        kernel: "cudnn", "flash" or "efficient".
        is_backward: which of the two it is.
        batch_heads: how many heads there are in all.
        rows: queries of each.
        flops: what it computes; half of them, about, if causal.
    """

    kernel: str
    is_backward: bool
    batch_heads: int
    rows: int
    flops: int


def bytes_moved(call: Call) -> int:
    """Bytes read and written, each distinct element of each tensor once; of lookups, rows read."""
    inputs = call.inputs
    written = sum(spec.distinct_nbytes for spec in call.outputs)
    if is_lookup(call.target) and call.outputs:
        return 2 * written + sum(spec.distinct_nbytes for spec in inputs[1:])
    return written + sum(spec.distinct_nbytes for spec in inputs)


def flop_count(call: Call) -> int:
    """FLOPs by torch's own formula; one per element of the larger side where there is none.

    Of fused attention they are counted here: torch's formulas leave out that causal attention
    skips what is masked. And so are grouped products, which have no formula.
    """
    attention = fused_attention(call)
    if attention is not None:
        return attention.flops
    if is_grouped(call.target):
        return grouped_flops(call)
    formula = flop_registry.get(call.target.overloadpacket)
    if formula is not None:
        counted = _flops_by_formula(formula, call)
        if counted is not None:
            return counted
    sides = (call.inputs, call.outputs)
    return max(sum(math.prod(spec.shape) for spec in side) for side in sides)


def is_lookup(target: Any) -> bool:
    """Whether an operator reads some rows of a table."""
    return isinstance(target, OpOverload) and target.overloadpacket.__name__ in _LOOKUPS


def is_convolution(call: Call) -> bool:
    """Whether it is a convolution, forward or backward."""
    return call.target.overloadpacket.__name__ in _CONVOLUTIONS


def matmul_dtype(call: Call | None) -> torch.dtype:
    """The floating-point type whose matrix ceiling bounds the call."""
    specs = () if call is None else (*call.inputs, *call.outputs)
    floating = [spec.dtype for spec in specs if spec.dtype.is_floating_point]
    narrow = [dtype for dtype in floating if dtype in (torch.bfloat16, torch.float16)]
    return narrow[0] if narrow else torch.float32


def product(call: Call) -> Product | None:
    """The product that an operator is, if it is one."""
    name = call.target.overloadpacket.__name__
    factors = call.inputs[-2:]
    if name not in _PRODUCTS or len(factors) < 2:
        return None
    left, right = (spec.shape for spec in factors)
    if len(left) != len(right) or len(left) not in (2, 3):
        return None
    return Product(left[0] if len(left) == 3 else 1, left[-2], left[-1], right[-1])


def fused_attention(call: Call) -> FusedAttention | None:
    """The attention that an operator is, if it is one that never writes the scores."""
    name = call.target.overloadpacket.__name__
    if "attention" not in name or "math" in name:
        return None
    query, key, value = (_argument(call, part) for part in ("query", "key", "value"))
    tensors = [part for part in (query, key, value) if isinstance(part, TensorSpec)]
    if len(tensors) < 3 or any(len(spec.shape) != 4 for spec in tensors):
        return None
    kernel = next((k for k in ("cudnn", "efficient") if k in name), "flash")
    is_backward = "backward" in name
    batch, heads, rows, size = tensors[0].shape
    columns, value_size = tensors[1].shape[-2], tensors[2].shape[-1]
    products = _BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS
    flops = products * batch * heads * rows * columns * (size + value_size)
    if _argument(call, "is_causal") is True:
        flops = int(flops * min(1.0, (1 + _BLOCK / max(1, columns)) / 2))
    return FusedAttention(kernel, is_backward, batch * heads, rows, flops)


def _argument(call: Call, name: str) -> Any:
    """What is given for a parameter of the operator; its default, or None."""
    for position, parameter in enumerate(arguments_of(call.target)):
        if parameter.name == name:
            given = call.args[position] if position < len(call.args) else parameter.default_value
            return call.kwargs.get(name, given)
    return None


def _flops_by_formula(formula: Callable[..., Any], call: Call) -> int | None:
    """Apply a registered formula to storage-less tensors; None where it does not fit the call."""
    args, kwargs = tree_map(without_storage, (call.args, call.kwargs))
    results = tuple(without_storage(spec) for spec in call.outputs)
    out_val = results[0] if len(results) == 1 else results
    try:
        return int(formula(*args, **kwargs, out_val=out_val))
    except Exception:
        # A formula written for other arguments must not stop planning: count elements instead.
        return None


def without_storage(value: Any) -> Any:
    """A tensor's layout as a tensor that has no memory; all else as it is."""
    if not isinstance(value, TensorSpec):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
