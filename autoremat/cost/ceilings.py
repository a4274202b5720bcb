"""How fast a device can go: what bounds a call that was not measured.

Enters: a device. Leaves: its ceilings, measured once on this machine; nominal ones for a device
that is not here. Guarantees: those of `agreed` and of the file of costs.
"""

from __future__ import annotations

from typing import Any

import torch

from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.calls import NOMINAL_CEILINGS, Call
from autoremat.cost.machine import is_here, settings_key
from autoremat.cost.made_up_inputs import Inputs
from autoremat.cost.runs import call_time_us

_ROUNDS = 3  # of which the quietest counts: a ceiling is the fastest that was seen
# Beside the model and under its budget: no more than it takes. On the CPU, what is larger measures
# how fast the system hands out pages; on a GPU, what is smaller stays in its cache.
_COPY_NBYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}


def ceilings_of(device: torch.device, dtype: torch.dtype, cache: CostCache) -> DeviceCeilings:
    """A device's ceilings, looked up when an estimate needs them."""
    key = f"ceilings|{dtype}|{settings_key(device)}"
    found = agreed([key], DeviceCeilings) or cache.read([key], DeviceCeilings)
    if not found and is_here(device):
        found = {key: measure_ceilings(device, dtype)}
        cache.write(found)
    found = found or {key: NOMINAL_CEILINGS["cpu" if device.type == "cpu" else "cuda"]}
    return agree(found, DeviceCeilings)[key]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> DeviceCeilings:
    """Time a large copy, a matrix product and the smallest operator."""
    size = _MATMUL_SIZE.get(device.type, 1024)
    copied_nbytes = _COPY_NBYTES.get(device.type, 8 << 20)
    aten = torch.ops.aten
    source = torch.ones(copied_nbytes // 4, device=device)
    copy_us = _bare_time_us(aten.clone.default, (source,), device)
    launch_us = _bare_time_us(aten.clone.default, (source[:1],), device)
    del source
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    matmul_us = _bare_time_us(aten.mm.default, (matrix, matrix), device)
    return DeviceCeilings(
        copy_gbps=2 * copied_nbytes / copy_us / 1e3,
        matmul_gflops=2 * size**3 / matmul_us / 1e3,
        launch_us=launch_us,
    )


def _bare_time_us(target: Any, args: tuple[Any, ...], device: torch.device) -> float:
    """Of the quietest round: a ceiling is the fastest that was seen."""
    call = Call(target, args, {}, (), (), placed_on=device)
    return min(call_time_us(call, Inputs(args, {})) for _ in range(_ROUNDS))
