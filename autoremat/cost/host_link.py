"""How fast copies to where values wait are, and back: measured once on a machine.

Enters: a folder on a disk, or a GPU that is here. Leaves: a `Link`. Guarantees: those of the file
of costs; what was measured of a folder counts for it as long as its file system is mounted there;
ranks of a job plan with what the first of them has measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from autoremat_solver import Link

from autoremat.cost.cache import CostCache
from autoremat.cost.machine import quiet_execution, settings_key
from autoremat.host.disk import Disk
from autoremat.host.measured import disk_link, gpu_link
from autoremat.ranks.figures import settled


def link_of(disk: Disk) -> Link:
    """The way to a folder and back.

    Raises:
        OffloadError: if no file can be made there to measure it.
    """
    return _agreed(
        f"link of copies|{disk.folder}", _measured(replace(disk, share=1.0, taken_nbytes=0))
    )


def link_to_host(device: torch.device) -> Link:
    """The way from a GPU to the memory of its host and back.

    Where no memory is page-locked it is measured again in the next process: there may be by then.
    """
    return _agreed(f"link to the host's memory|{device.type}", _measured_of_gpu(device))


def _agreed(key: str, link: Link) -> Link:
    return settled({key: link}, Link)[key]


@functools.cache
def _measured(disk: Disk) -> Link:
    mounted = os.stat(disk.folder).st_dev
    processor = torch.device("cpu")

    def measure() -> Link:
        with quiet_execution({processor}):
            return disk_link(disk)

    return _once(f"link of copies|{disk.folder}|{mounted}|{settings_key(processor)}", measure)


@functools.cache
def _measured_of_gpu(device: torch.device) -> Link:
    def measure() -> Link:
        with quiet_execution({device}):
            return gpu_link(device)

    keys = (settings_key(device), settings_key(torch.device("cpu")))
    return _once(
        f"link to the host's memory|{'|'.join(keys)}", measure, lambda link: link.is_pinned
    )


def _once(
    key: str, measure: Callable[[], Link], is_worth_keeping: Callable[[Link], bool] = lambda _: True
) -> Link:
    with CostCache.open() as cache:
        found = cache.read([key], Link)
        if key not in found:
            found = {key: measure()}
            if is_worth_keeping(found[key]):
                cache.write(found)
    return found[key]
