"""Random requests of the caching allocator, and what the emulator says to each.

A line is "a BLOCK BYTES STREAM", "f BLOCK" or "e", as `torchs_allocator/ask.cpp` reads it; an
answer is that program's line.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from autoremat.reserved.allocator import CachingAllocator, OutOfMemory
from autoremat.reserved.blocks import Block
from autoremat.reserved.settings import MIB, AllocatorSettings

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:64",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.5",
    "max_split_size_mb:30,garbage_collection_threshold:0.3",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[4:8,16:2,>:0]",
    "large_segment_size_mb:40",
    "expandable_segments:True,large_segment_size_mb:12",
    "expandable_segments:True,max_split_size_mb:20",
    "expandable_segments:True,garbage_collection_threshold:0.5",
)

RECORDED_SEEDS, STEPS, EACH = (0, 1), 120, 10  # of what is written down: each tenth answer


@dataclass(frozen=True)
class Case:
    """An allocator and what it is asked.

    Attributes:
        setting: as `PYTORCH_ALLOC_CONF` takes it; it may have a limit for the process, too.
        device_nbytes: the device's memory.
        lines: what is asked.
    """

    setting: str
    device_nbytes: int
    lines: tuple[str, ...]

    @classmethod
    def random(cls, setting: str, seed: int, steps: int | None = None) -> Case:
        """One of many; sizes between 2^6 and 2^27 bytes, two streams."""
        draw = random.Random(f"{setting}{seed}")
        limit = draw.choice(
            ["", "per_process_memory_fraction:0.8", "per_process_memory_fraction:0.5"]
        )
        device_nbytes = draw.choice([1 << 40, 1024 * MIB, 300 * MIB, 120 * MIB])
        steps = steps or draw.choice([200, 1500])
        sizes = draw.choice([(6, 26), (18, 24), (20, 27), (8, 21)])
        lines, live = [], []
        for number in range(steps):
            kind = draw.random()
            if kind < 0.01:
                lines.append("e")
            elif live and kind < 0.49:
                lines.append(f"f {live.pop(draw.randrange(len(live)))}")
            else:
                nbytes = int(2 ** draw.uniform(*sizes))
                lines.append(f"a {number} {nbytes} {draw.choice([0, 0, 0, 7])}")
                live.append(number)
        return cls(",".join(filter(None, (limit, setting))), device_nbytes, tuple(lines))

    def allocator(self) -> CachingAllocator:
        """One that was asked nothing yet."""
        settings = AllocatorSettings.parse(self.setting)
        return CachingAllocator(settings, device_nbytes=self.device_nbytes)

    def answers(self) -> list[str]:
        """What the emulator says after each line."""
        allocator, live = self.allocator(), {}
        return [told(allocator, live, line) for line in self.lines]


def told(allocator: CachingAllocator, live: dict[int, Block | None], line: str) -> str:
    """Ask one line; the answer, and the blocks that are live then."""
    what, *numbers = line.split()
    note = ""
    if what == "a":
        block, nbytes, stream = map(int, numbers)
        try:
            live[block] = allocator.malloc(nbytes, stream)
        except OutOfMemory:
            live[block], note = None, "oom "
    elif what == "f":
        allocator.free(live.pop(int(numbers[0])))
    else:
        allocator.empty_cache()
    return (
        f"{note}{allocator.allocated_nbytes} {allocator.reserved_nbytes} "
        f"{allocator.peak_allocated_nbytes} {allocator.peak_reserved_nbytes} {allocator.retries}"
    )
