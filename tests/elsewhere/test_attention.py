"""Which attention torch takes on a GPU, case by case, and what it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoremat.elsewhere.attention import Attention

T4, V100, A100, ADA = (7, 5), (7, 0), (8, 0), (8, 9)
HOPPER, BLACKWELL, RTX_50 = (9, 0), (10, 0), (12, 0)
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def heads(dtype: torch.dtype = BF16, *, count: int = 4, tokens: int = 64, size: int = 64) -> Tensor:
    return torch.empty(2, count, tokens, size, dtype=dtype, device="meta", requires_grad=True)


def kernel(capability: tuple[int, int], dtype: torch.dtype = BF16, **given: Any) -> str:
    """For queries, keys and values alike, unless one is given."""
    size = given.pop("size", 64)
    q, k, v = (given.pop(name, heads(dtype, size=size)) for name in ("q", "k", "v"))
    mask, dropout = given.pop("mask", None), given.pop("dropout", 0.0)
    found = Attention(q, k, v, mask, dropout, given.pop("causal", True), **given)
    return found.kernel_on(capability)


GROUPED = heads(FLOAT, count=2)
MASK = torch.zeros(2, 4, 64, 64, dtype=BF16, device="meta")


@pytest.mark.parametrize(
    ("capability", "dtype", "given", "expected"),
    [
        (A100, BF16, {}, "flash"),
        (A100, HALF, {"dropout": 0.1}, "flash"),
        (HOPPER, BF16, {}, "cudnn"),
        (BLACKWELL, BF16, {}, "cudnn"),
        (RTX_50, BF16, {}, "flash"),
        # cuDNN knows probabilities in steps of a sixteenth, heads of up to 128 in steps of 8
        (HOPPER, BF16, {"dropout": 0.125}, "cudnn"),
        (HOPPER, BF16, {"dropout": 0.1}, "flash"),
        (HOPPER, BF16, {"size": 256}, "flash"),
        (HOPPER, BF16, {"size": 60}, "flash"),
        (HOPPER, BF16, {"k": heads(tokens=1), "v": heads(tokens=1), "causal": False}, "flash"),
        (HOPPER, BF16, {"q": heads(size=192), "k": heads(size=192), "v": heads(size=128)}, "cudnn"),
        (HOPPER, BF16, {"mask": MASK.clone().requires_grad_(), "causal": False}, "efficient"),
        # flash knows no mask, and no causal one that is not square
        (HOPPER, BF16, {"mask": MASK, "causal": False}, "cudnn"),
        (A100, BF16, {"mask": MASK, "causal": False}, "efficient"),
        (A100, BF16, {"k": heads(tokens=32), "v": heads(tokens=32)}, "efficient"),
        (A100, BF16, {"k": heads(tokens=32), "v": heads(tokens=32), "causal": False}, "flash"),
        (A100, BF16, {"size": 512}, "efficient"),
        (A100, BF16, {"v": heads(size=32)}, "efficient"),
        # float32 has the memory-efficient kernel alone, of aligned heads
        (A100, FLOAT, {}, "efficient"),
        (HOPPER, FLOAT, {}, "efficient"),
        (A100, FLOAT, {"size": 62}, "math"),
        (A100, torch.float64, {}, "math"),
        # small shared memory: no backward of large heads
        (ADA, BF16, {"size": 192}, "flash"),
        (ADA, BF16, {"size": 224}, "efficient"),
        (ADA, BF16, {"size": 256}, "flash"),
        (ADA, BF16, {"size": 256, "dropout": 0.1}, "efficient"),
        (A100, BF16, {"size": 224}, "flash"),
        # older than Ampere: no flash, no bfloat16
        (T4, HALF, {}, "efficient"),
        (V100, BF16, {}, "math"),
        # groups of queries share a key where they are said to
        (A100, BF16, {"k": heads(count=2), "v": heads(count=2), "enable_gqa": True}, "flash"),
        (A100, BF16, {"k": heads(count=2), "v": heads(count=2)}, "math"),
        (A100, FLOAT, {"k": GROUPED, "v": GROUPED, "enable_gqa": True}, "math"),
        (A100, BF16, {"k": heads(count=3), "v": heads(count=3), "enable_gqa": True}, "math"),
        # the last dimension has to lie in a row
        (A100, BF16, {"q": heads().transpose(-1, -2)}, "math"),
    ],
)
def test_the_kernel_that_torch_takes(
    capability: tuple[int, int], dtype: torch.dtype, given: dict[str, Any], expected: str
):
    """As `select_sdp_backend` decides."""
    assert kernel(capability, dtype, **given) == expected


def test_what_the_user_has_switched_off_is_not_taken():
    """`sdpa_kernel` leaves what it names; without products and a softmax, cuDNN comes last."""
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel(HOPPER) == "math"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert kernel(HOPPER) == "efficient"
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert kernel(A100) == "cudnn"
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel(HOPPER) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)
