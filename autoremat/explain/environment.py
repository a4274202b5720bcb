"""Versions and hardware, for the report.

Enters: a device. Leaves: `Fact`s. Nothing here names a user, a host or a path.
"""

from __future__ import annotations

import platform

import torch

from autoremat.reporting import Fact
from autoremat.units import format_nbytes


def environment_facts(device: torch.device) -> tuple[Fact, ...]:
    """What the plan's numbers were made with."""
    from autoremat import __version__

    facts = [
        Fact("autoremat", __version__),
        Fact("Python", platform.python_version()),
        Fact("System", f"{platform.system()} {platform.machine()}"),
    ]
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        facts.append(Fact("Device memory", format_nbytes(properties.total_memory, binary=True)))
        facts.append(Fact("CUDA", str(torch.version.cuda)))
    else:
        facts.append(Fact("Threads", str(torch.get_num_threads())))
    return tuple(facts)
