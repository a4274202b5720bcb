"""What the loops of generated code take, by what they move and compute.

Enters: loops as Inductor has scheduled them. Leaves: microseconds. Nothing is compiled or run but,
once on a machine, what its ceilings are measured by.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch

from autoremat._torch import Loop
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.ceilings import ElementTimes, ceilings_of, element_times_of
from autoremat.cost.large_memory import ceilings_for
from autoremat.cost.machine import quiet_execution


def loops_us(loops: Collection[Loop], device: torch.device) -> float:
    """What the loops take, one after the other."""
    if not loops:
        return 0.0
    with CostCache.open() as cache, quiet_execution({device}):
        ceilings = {loop.dtype: ceilings_of(device, loop.dtype, cache) for loop in loops}
        of_floats = ceilings_of(device, torch.float32, cache)
        elements = element_times_of(device, of_floats, cache)
        reached = [
            ceilings_for(loop.moved_nbytes, ceilings[loop.dtype], device, cache) for loop in loops
        ]
    return math.fsum(map(loop_us, loops, reached, itertools.repeat(elements)))


def loop_us(loop: Loop, ceilings: DeviceCeilings, elements: ElementTimes) -> float:
    """What one loop takes: to move its bytes, and to compute, which on a processor comes on top."""
    moving_us = loop.moved_nbytes / (ceilings.copy_gbps * 1e3)
    product_us = loop.flops / (ceilings.matmul_gflops * 1e3)
    computing_ns = math.fsum(elements.of(name) * count for name, count in loop.computed.items())
    return ceilings.launch_us + moving_us + product_us + computing_ns / 1e3
