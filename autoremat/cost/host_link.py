"""How fast copies to where values wait are, and back: measured once on a machine.

Enters: a folder on a disk, or a GPU that is here. Leaves: a `Link`. Guarantees: those of the file
of costs; what was measured of a folder counts for it as long as its file system is mounted there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from autoremat_solver import Link

from autoremat.cost.cache import CostCache
from autoremat.cost.machine import quiet_execution, settings_key
from autoremat.host.disk import Disk
from autoremat.host.memory import measured_link


@functools.cache
def link_of(disk: Disk) -> Link:
    """The way to a folder and back.

    Raises:
        OffloadError: if no file can be made there to measure it.
    """
    mounted = os.stat(disk.folder).st_dev
    machine = settings_key(torch.device("cpu"))
    return _once(f"link to kept files|{disk.folder}|{mounted}|{machine}", disk.link)


@functools.cache
def link_to_host(device: torch.device) -> Link:
    """The way from a GPU to the memory of its host and back."""

    def measure() -> Link:
        with quiet_execution({device}):
            return measured_link(device)

    return _once(f"link to the host's memory|{settings_key(device)}", measure)


def _once(key: str, measure: Callable[[], Link]) -> Link:
    with CostCache.open() as cache:
        found = cache.read([key], Link)
        if key not in found:
            found = {key: measure()}
            cache.write(found)
    return found[key]
