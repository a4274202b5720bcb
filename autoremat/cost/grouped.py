"""Products of groups of rows, each group with a matrix of its own: how experts compute.

Enters: an operator, and the layouts of what it is given. Leaves: its FLOPs, and offsets at which
groups could end. Guarantees: those offsets are valid, all groups being of one size, about; others
would have the operator do nothing, read beyond what it is given, or end a CUDA context: kernels
assert that groups begin at multiples of 16 bytes (GroupMMCommon.cuh).

Which row belongs to which group is data: FLOPs are those of all rows, however they are grouped. In
torch's own operator either factor may be grouped, or what both are summed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoremat._torch import OpOverload
from autoremat.cost.calls import Call, TensorSpec

# How many products each is. Those of transformers stand in for torch's own where that cannot be
# compiled: loops over products, which give the same whenever they run.
_PRODUCTS = {
    "aten._grouped_mm": 1,
    "transformers.grouped_mm_fallback": 1,
    "transformers.grouped_mm_fallback_backward": 2,
}
_ALIGNED = 16  # elements: of any type, they are a multiple of 16 bytes
OFFSETS = 2  # where among the arguments the ends of the groups are


def is_grouped(target: Any) -> bool:
    """Whether an operator is such a product, or the gradient of one."""
    return isinstance(target, OpOverload) and _name(target) in _PRODUCTS


def is_called_grouped(function: str) -> bool:
    """The same of a function by its name in a generated wrapper, "torch.ops.aten.mm.default"."""
    parts = function.split(".")
    name = ["aten", *parts[1:]] if parts[0] == "extern_kernels" else parts[2:4]
    return ".".join(name) in _PRODUCTS


def grouped_flops(call: Call) -> int:
    """Multiplications and additions of all groups together."""
    left, right = (spec.shape for spec in call.inputs[:2])
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1] * _PRODUCTS[_name(call.target)]


def even_offsets(offsets: TensorSpec, left: Sequence[int], right: Sequence[int]) -> torch.Tensor:
    """Where groups of one size end.

    Args:
        offsets: their layout.
        left: shape of the first factor.
        right: shape of the second.
    """
    groups = offsets.shape[0]
    grouped = right[-1] if len(left) == 3 else left[-1] if len(right) == 2 else left[0]
    each = grouped // max(1, groups) // _ALIGNED * _ALIGNED
    ends = [*(each * number for number in range(1, groups)), grouped][:groups]
    return torch.tensor(ends, dtype=offsets.dtype, device=offsets.device)


def _name(target: OpOverload) -> str:
    return f"{target.namespace}.{target.overloadpacket.__name__}"
