"""What `budget="auto"` is: what a device has for this process, less a reserve.

Enters: a device. Leaves: bytes, as they are now. Guarantees: what the process holds already counts
as its own, since a budget is of all that a step holds.
"""

from __future__ import annotations

from pathlib import Path

import torch

from autoremat.cost.machine import free_nbytes
from autoremat.errors import SteeringError
from autoremat.graph.devices import device_nbytes
from autoremat.units import format_nbytes

RESERVE_SHARE = 0.05  # of the device's memory, left to what torch's allocator does not know of
RESERVE_NBYTES = 512_000_000  # or so much, where that is more
_PROCESS = Path("/proc/self/status")


def auto_nbytes(device: torch.device) -> int:
    """What this process may take on a device: what it holds and what is free, less the reserve.

    Raises:
        SteeringError: if nothing is left, or the machine does not say what is free.
    """
    if device.type == "cuda":
        held_nbytes = int(torch.cuda.memory_allocated(device))
    else:
        held_nbytes = _process_nbytes()
    return less_reserve(held_nbytes + free_nbytes(device), device_nbytes(device), str(device))


def less_reserve(found_nbytes: int, total_nbytes: int, name: str) -> int:
    """A budget of what was found on a device.

    Raises:
        SteeringError: if the reserve is all of it.
    """
    reserve_nbytes = max(int(RESERVE_SHARE * total_nbytes), RESERVE_NBYTES)
    if found_nbytes > reserve_nbytes:
        return found_nbytes - reserve_nbytes
    raise SteeringError(
        f'budget="auto": {name} has {format_nbytes(found_nbytes)} for this process, and '
        f"{format_nbytes(reserve_nbytes)} are kept in reserve: nothing is left. Free some, or give "
        'the budget in bytes, such as "40GB".'
    )


def _process_nbytes() -> int:
    """What this process has of the main memory, but for the files that it reads."""
    try:
        lines = _PROCESS.read_text(encoding="utf-8").splitlines()
        held = next(line for line in lines if line.startswith("RssAnon:"))
        return int(held.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        raise SteeringError(
            f'budget="auto": this machine does not say how much of its memory is free (nothing in '
            f'{_PROCESS}). Give the budget in bytes, such as "40GB", or as a share such as "80%".'
        ) from None
