"""What CUDA's allocator gives away that no tensor shows: workspaces of libraries, and remainders.

Enters: a device, and what a step will hold there. Leaves: bytes. On a CPU there is nothing of it.

Libraries for matrix products keep workspaces for each thread that calls them, which torch takes
from its allocator and never gives back: one for forwards, one for backwards. And a block of which
less than 1 MiB would be left is given away whole: the allocator says how much that is now, and what
a step will create (gradients, an optimizer's state) is taken to be like what is there.
"""

from __future__ import annotations

import functools

import torch

from autoremat import _torch

CALLING_THREADS = 2  # that of forwards, and autograd's of the device
GRANULARITY_NBYTES = 1 << 21  # it is rounded up to: what is alike shall be planned alike
_SIDE = 64  # of a matrix


def unseen_nbytes(device: torch.device, held_nbytes: int, *, is_alone: bool = True) -> int:
    """What the allocator will have given away in a step, beyond its tensors.

    Args:
        device: where the step runs.
        held_nbytes: what it holds whatever the plan.
        is_alone: whether no other process plans the same: remainders are each process's own.
    """
    if device.type != "cuda":
        return 0
    stats = torch.cuda.memory_stats(device)
    # Without the second one, as other backends of the allocator are, nothing is known of it.
    allocated_nbytes = stats.get("allocated_bytes.all.current", 0)
    remainders_nbytes = allocated_nbytes - stats.get("requested_bytes.all.current", 0)
    if not (is_alone and 0 <= remainders_nbytes < allocated_nbytes):
        remainders_nbytes = 0
    grown = max(1.0, held_nbytes / max(1, allocated_nbytes))
    found_nbytes = CALLING_THREADS * workspace_nbytes(device) + int(grown * remainders_nbytes)
    return -(-found_nbytes // GRANULARITY_NBYTES) * GRANULARITY_NBYTES


@functools.cache
def workspace_nbytes(device: torch.device) -> int:
    """What torch keeps of the allocator's for a thread that has multiplied matrices."""
    with _torch.real_execution(), torch.no_grad():
        matrix, bias = (torch.ones(*sizes, device=device) for sizes in ((_SIDE, _SIDE), (_SIDE,)))
        _torch.drop_workspaces()  # they come again with the next product of their thread
        before_nbytes = torch.cuda.memory_allocated(device)
        torch.mm(matrix, matrix)  # of one library
        torch.addmm(bias, matrix, matrix)  # and of another, which adds while it multiplies
        return torch.cuda.memory_allocated(device) - before_nbytes
