"""`offload=` as a value: where values may wait that leave the device.

Enters: what a user writes, "disk:PATH", "24GB" or "auto", and the data sheet of the device that is
planned for. Leaves: a `Host`, or a `ValueError` that says what is accepted and where.
"""

from __future__ import annotations

import math

import torch
from autoremat_solver import Link

from autoremat.ask.budget import AUTO, Budget
from autoremat.cost.device_specs import LINK_LATENCY_US, LINK_SHARE, DeviceSpec, find_link
from autoremat.cost.machine import free_nbytes
from autoremat.graph.devices import device_nbytes
from autoremat.host.disk import PREFIX, Disk, in_leading_digits
from autoremat.host.memory import Host, HostMemory
from autoremat.units import format_nbytes

RESERVE = 0.1  # of what this machine has free, which "auto" leaves
_FORMS = (
    f'"{PREFIX}PATH", a folder on a disk with room, for a model on the CPU; for a GPU the size of '
    'its host\'s memory, "24GB", or "auto"'
)


def host_of(given: object, link: object, spec: DeviceSpec | None) -> Host:
    """Where values may wait.

    Args:
        given: as the user wrote it.
        link: a link's name, or its bytes per second each way; None for the device's own.
        spec: the data sheet of the device that is planned for; None where it is here.

    Raises:
        ValueError: if that is none, or none for this device.
    """
    if isinstance(given, str) and given.startswith(PREFIX):
        if spec is not None:
            raise ValueError(
                f"offload={given!r} is a folder, for models on the CPU: for {spec.name} give the "
                'size of its host\'s memory, offload="24GB".'
            )
        if link is not None:
            raise ValueError(
                f"link={link!r} is of a GPU: how fast copies to a folder are is measured."
            )
        return Disk.parse(given)
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise ValueError(f"offload is {_FORMS}, not {given!r}.")
    size_nbytes = _size_nbytes(given)
    if spec is not None:
        return HostMemory(str(given), size_nbytes, *_way(link, spec))
    if not torch.cuda.is_available():
        raise ValueError(
            f"offload={given!r} is memory of the host of a GPU. On the CPU there is no other "
            f'memory than the host\'s: give "{PREFIX}PATH", a folder on a disk.'
        )
    if link is not None:
        raise ValueError(
            f"link={link!r} is of a GPU that is not here: how fast copies are is measured."
        )
    memory_nbytes = device_nbytes(torch.device("cpu"))
    if size_nbytes > memory_nbytes:
        raise ValueError(
            f"offload={given!r} is more than this machine has, {format_nbytes(memory_nbytes)}: "
            f'give a size that it has free, or "{AUTO}".'
        )
    return HostMemory(str(given), size_nbytes)


def _size_nbytes(given: str | int) -> int:
    if given == AUTO:
        return in_leading_digits(int((1 - RESERVE) * free_nbytes(torch.device("cpu"))))
    try:
        return Budget.parse(given, whole="the host's memory").nbytes()
    except ValueError as error:
        why = str(error).removeprefix("Budget ")
        raise ValueError(f"offload is {_FORMS}. Here {why}") from error


def _way(link: object, spec: DeviceSpec) -> tuple[Link, str]:
    """How fast copies are, and over what."""
    given = spec.link if link is None else link
    per_second = _number(given)
    if per_second is None:
        found = find_link(str(given))
        per_us, way = 1e3 * LINK_SHARE * found.gbps, f"{found.name} by its data sheet"
    else:
        if not 0 < per_second < math.inf:
            raise ValueError(f"link={given!r}: a link moves more than 0 bytes per second.")
        per_us, way = per_second / 1e6, "a link of the speed given"
    return Link(per_us, per_us, LINK_LATENCY_US, is_pinned=True), way


def _number(given: object) -> float | None:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ValueError(f'link is a name, such as "pcie4", or bytes per second, not {given!r}.')
    try:
        return float(given)
    except ValueError:
        return None


def told_of(host: Host) -> str:
    """What a plan takes for granted of a host that is not here; "" where it is."""
    if not isinstance(host, HostMemory) or host.speed is None:
        return ""
    auto = (
        f", at most {1 - RESERVE:.0%} of what this machine has free" if host.asked == AUTO else ""
    )
    size = format_nbytes(host.free_nbytes)
    return (
        f"the host has {size} of page-locked memory for values that wait{auto}; copies go "
        f"{host.about(host.speed)}"
    )
