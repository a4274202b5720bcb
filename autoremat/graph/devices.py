"""The device at hand, and that of a graph."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import fx

from autoremat import _torch
from autoremat.fallbacks import Unplannable


def device_nbytes(device: torch.device) -> int:
    """Total memory of the device: of the GPU, or of the machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_of(module: fx.GraphModule) -> torch.device:
    """The one device that the graph's tensors live on (numbers may live on the CPU as well).

    Raises:
        Unplannable: if there are several.
    """
    return _the_one(devices_of(module))


def the_device(values: Iterable[object]) -> torch.device:
    """The same of a graph's inputs.

    Raises:
        Unplannable: if there are several.
    """
    return _the_one({value.device for value in values if isinstance(value, torch.Tensor)})


def _the_one(devices: Iterable[torch.device]) -> torch.device:
    accelerators = {device for device in devices if device.type != "cpu"}
    if len(accelerators) > 1:
        names = ", ".join(sorted(map(str, accelerators)))
        raise Unplannable("AR102", devices=names)
    return next(iter(accelerators), torch.device("cpu"))


def devices_of(module: fx.GraphModule) -> set[torch.device]:
    """Where the graph's inputs live."""
    values = (_torch.fake_value(node) for node in module.graph.find_nodes(op="placeholder"))
    return {value.device for value in values if isinstance(value, torch.Tensor)}
