"""Facts about the device at hand."""

from __future__ import annotations

import os

import torch


def device_nbytes(device: torch.device) -> int:
    """Total memory of the device: of the GPU, or of the machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
