"""What the allocator reserves for a row of events, under one setting or under several.

Enters: a step's memory and the device's size. Leaves: peaks, what waited at the peak of what is
reserved, and by how much each setting lowers that. Guarantees: the same for the same input.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from autoremat.reserved.allocator import NO_LIMIT_NBYTES, CachingAllocator, Held, OutOfMemory
from autoremat.reserved.blocks import Block
from autoremat.reserved.settings import AllocatorSettings
from autoremat.reserved.step import Event, StepMemory

DEFAULT = ""
COLLECTING = "per_process_memory_fraction:0.95,garbage_collection_threshold:0.8"
SETTINGS = (
    DEFAULT,
    "expandable_segments:True",
    *(f"max_split_size_mb:{size}" for size in (20, 64, 128, 256, 512)),
    COLLECTING,
)
"""Texts for `PYTORCH_ALLOC_CONF` that are held against each other."""


@dataclass(frozen=True)
class Replayed:
    """What came of a row of events.

    Attributes:
        peak_allocated_nbytes: most bytes in blocks that were given away.
        peak_reserved_nbytes: most bytes taken from the device.
        at_peak: what the allocator had when the second was reached first.
        retries: how often the device was full, and all that waited was given back to it.
        is_out: whether it was full all the same.
    """

    peak_allocated_nbytes: int
    peak_reserved_nbytes: int
    at_peak: Held
    retries: int
    is_out: bool


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings | None = None,
    *,
    device_nbytes: int = NO_LIMIT_NBYTES,
) -> Replayed:
    """What the allocator does with a row of events; it ends early where the device is full.

    Raises:
        KeyError: if something is freed that is not allocated.
    """
    events = list(events)
    allocator = CachingAllocator(settings, device_nbytes=device_nbytes)
    peak_at, is_out = _run(allocator, events)
    until_peak = CachingAllocator(settings, device_nbytes=device_nbytes)
    _run(until_peak, events[:peak_at])
    return Replayed(
        allocator.peak_allocated_nbytes,
        allocator.peak_reserved_nbytes,
        until_peak.held(),
        allocator.retries,
        is_out,
    )


def _run(allocator: CachingAllocator, events: list[Event]) -> tuple[int, bool]:
    """How many events it took to reach the peak of what is reserved, and whether room ran out."""
    blocks: dict[Hashable, Block | None] = {}
    peak_nbytes = peak_at = 0
    for number, (name, nbytes) in enumerate(events, start=1):
        if not nbytes:
            allocator.free(blocks.pop(name))
            continue
        if name in blocks:
            raise KeyError(f"{name!r} is allocated already.")
        try:
            blocks[name] = allocator.malloc(nbytes)
        except OutOfMemory:
            return peak_at, True
        if allocator.peak_reserved_nbytes > peak_nbytes:
            peak_nbytes, peak_at = allocator.peak_reserved_nbytes, number
    return peak_at, False


def compare(
    step: StepMemory, device_nbytes: int, settings: Iterable[str] = SETTINGS
) -> dict[str, Replayed]:
    """By setting, what several steps reserve on a device with room for all that they ask.

    What collects garbage needs a limit to collect at: that is a share of the device's memory, and
    what does not fit there is out of memory.
    """
    events = list(step.events())
    return {text: _replayed(events, text, device_nbytes) for text in settings}


def _replayed(events: list[Event], text: str, device_nbytes: int) -> Replayed:
    settings = AllocatorSettings.parse(text)
    is_limited = settings.memory_fraction is not None
    limit_nbytes = device_nbytes if is_limited else NO_LIMIT_NBYTES
    return replay(events, settings, device_nbytes=limit_nbytes)
