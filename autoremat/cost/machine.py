"""The machine at hand: what its devices are called, what they have free, and quiet on them.

Enters: devices. Leaves: texts and bytes. Guarantees: equal texts mean that equal calls cost the
same; within `quiet_execution` the user's random streams are not advanced.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autoremat._torch import real_execution
from autoremat.cost.agreed import ON_MACHINE


@functools.lru_cache(maxsize=64)
def _settings_key(device: torch.device, threads: int, settings: tuple[Any, ...]) -> str:
    machine = f"{ON_MACHINE}{device_title(device)}|threads {threads}"
    return f"torch {torch.__version__}|{device.type}|{settings}{machine}"


def settings_key(device: torch.device) -> str:
    """Text that names the device, the torch version and the settings that choose kernels."""
    settings = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.enabled,
    )
    return _settings_key(device, torch.get_num_threads(), settings)


def device_title(device: torch.device) -> str:
    """The GPU's name as its driver writes it, or the processor's model."""
    return torch.cuda.get_device_name(device) if _is_present(device) else _cpu_name()


@functools.cache
def _cpu_name() -> str:
    """The processor's model, which tells machines apart that share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, "") or platform.processor() or platform.machine()
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"


def _is_present(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def is_here(device: torch.device) -> bool:
    """Whether calls can run on the device."""
    return device.type == "cpu" or _is_present(device)


@contextmanager
def quiet_execution(devices: Collection[torch.device]) -> Iterator[None]:
    """Suspend fake tensors and gradients, and leave the random generators as they are."""
    present = {device for device in devices if _is_present(device)}
    current = torch.cuda.current_device() if present else 0
    indices = sorted({current if d.index is None else d.index for d in present})
    with real_execution(), torch.no_grad(), torch.random.fork_rng(devices=indices):
        yield


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, by what the system says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_system_free_nbytes(), _container_free_nbytes())


def _system_free_nbytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def _container_free_nbytes() -> int:
    """What a container's limit (cgroup v2) leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return max(0, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return sys.maxsize
