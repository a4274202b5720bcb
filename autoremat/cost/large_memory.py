"""What a processor takes for memory that is too large for its caches, or for its allocator to keep.

Enters: bytes that a loop moves, or bytes of buffers that generated code allocates. Leaves: how fast
the ones are moved; what the others take beyond memory that was written before. Guarantees: those of
`agreed` and of the file of costs; nothing is measured before a loop or a buffer is that large, so
no more is allocated for it than the model takes.

glibc maps what is larger than 32 MiB at every allocation and unmaps it at every free: its threshold
moves, up to `DEFAULT_MMAP_THRESHOLD_MAX` (malloc.c). Each page is then found missing when it is
first written, and cleared. A GPU's allocator keeps its memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.ceilings import COPY_NBYTES, once
from autoremat.cost.machine import free_nbytes, quiet_execution, settings_key
from autoremat.cost.runs import time_us

MAPPED_NBYTES = 32 << 20  # on 64 bits; what is smaller, the allocator keeps when it is freed
_MOST_COPIED_NBYTES = 256 << 20  # from there on, nothing is found in a cache
_CHOOSE = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES")  # the allocator, and how it is set
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class CopyRate:
    """How fast memory of some size is copied: bytes read plus written per second, in 10^9."""

    gbps: float


@dataclass(frozen=True, slots=True)
class FreshMemory:
    """How fast the system hands out memory.

    Attributes:
        us_per_mb: to map, clear and unmap 10^6 bytes; 0 where the allocator keeps them.
    """

    us_per_mb: float


def ceilings_for(
    moved_nbytes: int, ceilings: DeviceCeilings, device: torch.device, cache: CostCache
) -> DeviceCeilings:
    """A device's ceilings for a loop that moves so many bytes.

    Of a processor, one copy is measured for each power of two.
    """
    copied_nbytes = min(1 << max(1, moved_nbytes // 2).bit_length() - 1, _MOST_COPIED_NBYTES)
    if device.type != "cpu" or copied_nbytes <= COPY_NBYTES["cpu"]:
        return ceilings
    key = f"ceilings|copy of {copied_nbytes}|{settings_key(device)}"
    measure = functools.partial(_measured_copy, copied_nbytes, device)
    found = once(key, measure, device, CopyRate(ceilings.copy_gbps), cache)
    return replace(ceilings, copy_gbps=found.gbps)


def fresh_us(buffers_nbytes: Iterable[int], device: torch.device) -> float:
    """What it takes that buffers are new, each of them allocated once."""
    mapped_nbytes = sum(nbytes for nbytes in buffers_nbytes if nbytes >= MAPPED_NBYTES)
    if device.type != "cpu" or not mapped_nbytes:
        return 0.0
    allocator = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_CHOOSE))
    key = f"ceilings|fresh memory|{allocator}|{settings_key(device)}"
    measure = functools.partial(_measured_fresh, device)
    with CostCache.open() as cache, quiet_execution({device}):
        found = once(key, measure, device, FreshMemory(0.0), cache)
    return found.us_per_mb * mapped_nbytes / 1e6


def _measured_copy(nbytes: int, device: torch.device) -> CopyRate:
    """Between memory that was written before, where most of what is free is left."""
    if 2 * nbytes > free_nbytes(device) // 3:
        raise MemoryError(f"two times {nbytes} bytes are too many to be copied beside the model")
    source, target = (_bytes(nbytes, device).fill_(1) for _ in range(2))
    copy_us = min(time_us(lambda: target.copy_(source), device) for _ in range(_ROUNDS))
    return CopyRate(2 * nbytes / copy_us / 1e3)


def _measured_fresh(device: torch.device) -> FreshMemory:
    """Filling new memory, beside filling the same again."""

    def fill_new() -> None:
        _bytes(MAPPED_NBYTES, device).fill_(1)  # and freed here

    kept = _bytes(MAPPED_NBYTES, device)
    new_us = min(time_us(fill_new, device) for _ in range(_ROUNDS))
    again_us = min(time_us(lambda: kept.fill_(1), device) for _ in range(_ROUNDS))
    return FreshMemory(max(0.0, (new_us - again_us) / (MAPPED_NBYTES / 1e6)))


def _bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
