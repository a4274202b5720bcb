"""Page-locked memory of the machine, to and from which a GPU copies while it computes.

Enters: what is to wait there. Leaves: memory for it. Guarantees: where the system locks none, it is
ordinary memory, to which copies are slower, and that is told once.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from autoremat.call_stack import users_level
from autoremat.units import format_nbytes


def pinned_like(x: Tensor) -> Tensor:
    """Memory of the same sizes, strides and dtype, from torch's pool of what is page-locked."""
    made = functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if not x.is_cuda:
        return made()
    try:
        return made(pin_memory=True)
    except RuntimeError as error:
        _tell(format_nbytes(x.nbytes), str(error).splitlines()[0])
        return made()


@functools.cache
def _warned() -> list[str]:
    return []


def _tell(size: str, why: str) -> None:
    """Once in a process."""
    if _warned():
        return
    _warned().append(why)
    warnings.warn(
        f"autoremat: {size} of page-locked memory were not to be had ({why}): values wait in "
        "ordinary memory, and copies are slower. Free memory of this machine, give offload= fewer "
        "bytes, or train without it.",
        stacklevel=users_level(),
    )
