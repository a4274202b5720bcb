"""How fast copies to a folder and back are: measured once on a machine.

Enters: a folder on a disk. Leaves: a `Link`. Guarantees: those of the file of costs; what was
measured of a folder counts for it as long as its file system is mounted there.
"""

from __future__ import annotations

import functools
import os

import torch
from autoremat_solver import Link

from autoremat.cost.cache import CostCache
from autoremat.cost.machine import settings_key
from autoremat.host.disk import Disk


@functools.cache
def link_of(disk: Disk) -> Link:
    """The way to a folder and back.

    Raises:
        OffloadError: if no file can be made there to measure it.
    """
    mounted = os.stat(disk.folder).st_dev
    key = f"link to kept files|{disk.folder}|{mounted}|{settings_key(torch.device('cpu'))}"
    with CostCache.open() as cache:
        found = cache.read([key], Link)
        if key not in found:
            found = {key: disk.link()}
            cache.write(found)
    return found[key]
