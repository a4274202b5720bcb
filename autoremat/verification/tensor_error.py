"""How far two tensors are apart, whatever their type and layout."""

from __future__ import annotations

import math

import torch


def absolute_error(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Largest absolute difference; infinite where only one of them is NaN or infinite."""
    if not theirs.numel():
        return 0.0
    a, b = _real(theirs), _real(ours)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(
        (a - b).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max()
    )


def largest(tensor: torch.Tensor) -> float:
    """The largest finite element without its sign; 0 if there is none."""
    finite = _real(tensor)
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def relative_error(error: float, scale: float) -> float:
    """An error as a share of what is largest; infinite where that is nothing."""
    if scale == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / scale


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (tensor.to_dense() if tensor.is_sparse else tensor).double()
