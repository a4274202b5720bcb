"""What CUDA's allocator gives away that no tensor shows: workspaces of libraries, and remainders.

Enters: a device, and what a step will hold there. Leaves: bytes. On a CPU there is nothing of it.

Libraries for matrix products keep workspaces for each thread that calls them, which torch takes
from its allocator and never gives back: one for forwards, one for backwards. And a block of which
less than 1 MiB would be left is given away whole: the allocator says how much that is now, and what
a step will create (gradients, an optimizer's state) is taken to be like what is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

CALLING_THREADS = 2  # that of forwards, and autograd's of the device
GRANULARITY_NBYTES = 1 << 21  # it is rounded up to: what is alike shall be planned alike
_KIB, _MIB = 1 << 10, 1 << 20
_HOPPER = 9  # major compute capability from which products have a larger workspace


def unseen_nbytes(device: torch.device, held_nbytes: int, *, is_alone: bool = True) -> int:
    """What the allocator will have given away in a step, beyond its tensors.

    Args:
        device: where the step runs.
        held_nbytes: what it holds whatever the plan.
        is_alone: whether no other process plans the same: remainders are each process's own.
    """
    if device.type != "cuda":
        return 0
    found_nbytes = sum(workspaces(torch.cuda.get_device_capability(device)))
    if is_alone:
        found_nbytes += _remainders_nbytes(device, held_nbytes)
    return -(-found_nbytes // GRANULARITY_NBYTES) * GRANULARITY_NBYTES


def workspaces(
    capability: tuple[int, int], settings: Mapping[str, str] = os.environ
) -> tuple[int, ...]:
    """Bytes of each buffer that libraries for products keep of the allocator's in a step.

    Sizes are those of torch's `CublasHandlePool.cpp`: `:4096:8` from Hopper on, `:4096:2:16:8`
    before, if `CUBLAS_WORKSPACE_CONFIG` does not say otherwise. Until torch lets cuBLASLt work
    where cuBLAS does, that has `CUBLASLT_WORKSPACE_SIZE` beside it, 1 MiB if not set.

    Args:
        capability: of the device.
        settings: the process's environment.
    """
    said = re.findall(r":([0-9]+):([0-9]+)", settings.get("CUBLAS_WORKSPACE_CONFIG", ""))
    usual_nbytes = 32 * _MIB if capability[0] >= _HOPPER else 8 * _MIB + 128 * _KIB
    own_nbytes = sum(int(n) * int(count) for n, count in said) * _KIB if said else usual_nbytes
    if hasattr(torch.backends.cuda, "cublaslt_workspace_size"):
        return CALLING_THREADS * (own_nbytes,)
    other = settings.get("CUBLASLT_WORKSPACE_SIZE", "")
    return CALLING_THREADS * (own_nbytes, int(other) * _KIB if other.isdecimal() else _MIB)


def _remainders_nbytes(device: torch.device, held_nbytes: int) -> int:
    """Of blocks, once so much is held; 0 where the allocator does not say what was asked for."""
    try:
        stats = torch.cuda.memory_stats(device)
    except RuntimeError:  # a pluggable allocator keeps none
        return 0
    allocated_nbytes = stats.get("allocated_bytes.all.current", 0)
    now_nbytes = allocated_nbytes - stats.get("requested_bytes.all.current", 0)
    if not 0 <= now_nbytes < allocated_nbytes:
        return 0
    return int(max(1.0, held_nbytes / allocated_nbytes) * now_nbytes)
