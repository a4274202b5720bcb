"""How the caching allocator is set, and the constants that it is built with.

Enters: what a user writes into `PYTORCH_ALLOC_CONF`. Leaves: an `AllocatorSettings`, or a
`ValueError` that names the option. Each is as torch has it: constants from
`c10/core/AllocatorConfig.h` of torch 2.13 (those of 2.11 are the same), options and their limits
from `c10/core/AllocatorConfig.cpp` (`parse*`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1 << 20
MIN_BLOCK_NBYTES = 512  # kMinBlockSize: to which sizes are rounded
SMALL_NBYTES = 1 * MIB  # kSmallSize: the largest request that goes to the small pool
SMALL_SEGMENT_NBYTES = 2 * MIB  # kSmallBuffer: what the small pool takes from the device at once
MIN_LARGE_NBYTES = 10 * MIB  # kMinLargeAlloc: from here on a segment is made to measure
ROUND_LARGE_NBYTES = 2 * MIB  # kRoundLarge: to which such a segment is rounded
LARGE_SEGMENT_NBYTES = 20 * MIB  # kLargeBuffer, later large_segment_size: for those below
DIVISIONS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB to 64 GiB, each twice the one before

_FIRST_INTERVAL = (1 * MIB).bit_length() - 1
_IGNORED = ("release_lock_on_cudamalloc", "throw_on_cudamalloc_oom")
_PART = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*(?:,|$)")


@dataclass(frozen=True)
class AllocatorSettings:
    """Options of the allocator.

    Attributes:
        expandable_segments: one segment per pool and stream, which grows page by page.
        max_split_nbytes: blocks of this size or more are never split, nor given to smaller
            requests; None for no limit.
        rounding_nbytes: by how much less than this such a block may be larger than its request.
        divisions: of `roundup_power2_divisions`, for each interval between powers of two from
            1 MiB on; 0 or 1 rounds as usual.
        collection_threshold: share of the allowed memory above which blocks that were not used for
            long are given back before new ones are taken; 0 for never.
        memory_fraction: of the device's memory, what the process may take
            (`torch.cuda.set_per_process_memory_fraction`); None where nobody set it. Where that is
            not below 1, nothing is collected, whatever the threshold (`setMemoryFraction`).
        large_segment_nbytes: taken from the device for requests above 1 and below 10 MiB, and one
            page of the large pool where segments are expandable.
    """

    expandable_segments: bool = False
    max_split_nbytes: int | None = None
    rounding_nbytes: int = LARGE_SEGMENT_NBYTES
    divisions: tuple[int, ...] = (0,) * DIVISIONS
    collection_threshold: float = 0.0
    memory_fraction: float | None = None
    large_segment_nbytes: int = LARGE_SEGMENT_NBYTES

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """The settings of a text such as `max_split_size_mb:128,expandable_segments:True`.

        Args:
            text: as `PYTORCH_ALLOC_CONF` has it; what concerns the host's memory is ignored.

        Raises:
            ValueError: naming the option that torch would refuse.
        """
        found: dict[str, object] = {}
        for name, value in _parts(text):
            if name == "expandable_segments":
                found[name] = _truth(name, value)
            elif name == "max_split_size_mb":
                found["max_split_nbytes"] = _mib(name, value, least=20)
            elif name == "max_non_split_rounding_mb":
                found["rounding_nbytes"] = _mib(name, value, least=20)
            elif name == "large_segment_size_mb":
                found["large_segment_nbytes"] = _mib(name, value, least=11)
            elif name == "garbage_collection_threshold":
                found["collection_threshold"] = _share(name, value)
            elif name == "per_process_memory_fraction":
                found["memory_fraction"] = 1.0 if value in ("1", "1.0") else _share(name, value)
            elif name == "roundup_power2_divisions":
                found["divisions"] = _divisions(value)
            elif name not in _IGNORED and not name.startswith("pinned_"):
                raise ValueError(f"The caching allocator has no option {name!r}.")
        return cls(**found)  # type: ignore[arg-type]

    def rounded(self, nbytes: int) -> int:
        """Bytes of the block that a request gets (`DeviceCachingAllocator::round_size`)."""
        if nbytes < MIN_BLOCK_NBYTES:
            return MIN_BLOCK_NBYTES
        divisions = self._divisions_of(nbytes)
        if divisions > 1 and nbytes > MIN_BLOCK_NBYTES * divisions:
            return _next_division(nbytes, divisions)
        return _up_to(nbytes, MIN_BLOCK_NBYTES)

    def segment_nbytes(self, rounded_nbytes: int) -> int:
        """What is taken from the device for a block (`get_allocation_size`)."""
        if rounded_nbytes <= SMALL_NBYTES:
            return SMALL_SEGMENT_NBYTES
        if rounded_nbytes < MIN_LARGE_NBYTES:
            return self.large_segment_nbytes
        return _up_to(rounded_nbytes, ROUND_LARGE_NBYTES)

    def may_give(self, nbytes: int, block_nbytes: int) -> bool:
        """Whether a free block is not too large for a request (`get_free_block`, at its end)."""
        if self.max_split_nbytes is None:
            return True
        if nbytes < self.max_split_nbytes:
            return block_nbytes < self.max_split_nbytes
        return block_nbytes < nbytes + self.rounding_nbytes

    def splits(self, nbytes: int, block_nbytes: int, *, is_small: bool) -> bool:
        """Whether what a request leaves of a block becomes one of its own (`should_split`)."""
        remaining_nbytes = block_nbytes - nbytes
        if is_small or self.expandable_segments:
            return remaining_nbytes >= MIN_BLOCK_NBYTES
        is_split = self.max_split_nbytes is None or nbytes < self.max_split_nbytes
        return is_split and remaining_nbytes > SMALL_NBYTES

    def _divisions_of(self, nbytes: int) -> int:
        """`AcceleratorAllocatorConfig::roundup_power2_divisions`."""
        interval = nbytes.bit_length() - 1 - _FIRST_INTERVAL
        return self.divisions[min(max(0, interval), DIVISIONS - 1)]


def _up_to(nbytes: int, multiple_nbytes: int) -> int:
    return -(-nbytes // multiple_nbytes) * multiple_nbytes


def _next_division(nbytes: int, divisions: int) -> int:
    """`roundup_power2_next_division`: between two powers of two there are so many steps."""
    floor = 1 << (nbytes.bit_length() - 1)
    if floor == nbytes:
        return nbytes
    division = floor >> (divisions.bit_length() - 1)
    return floor << 1 if division == 0 else _up_to(nbytes, division)


def _parts(text: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(text.rstrip()):
        match = _PART.match(text, place)
        if match is None:
            raise ValueError(
                f"{text[place:]!r} is no setting of the caching allocator: write name:value, "
                'several of them with commas, such as "max_split_size_mb:128".'
            )
        found.append((match[1], match[2].strip()))
        place = match.end()
    return found


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} is True or False, not {value!r}.")
    return value == "True"


def _mib(name: str, value: str, *, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} is a whole number of MiB from {least} on, not {value!r}.")
    return int(value) * MIB


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"{name} is between 0 and 1, not {value!r}.")
    return share


def _divisions(value: str) -> tuple[int, ...]:
    """`parseRoundUpPower2Divisions`: one number for all, or one from a size in MiB on."""
    if not value.startswith("["):
        return (_power(value),) * DIVISIONS
    found, is_first, index = [0] * DIVISIONS, True, -1
    for entry in filter(None, value[1:-1].split(",")):
        size, _, number = (part.strip() for part in entry.partition(":"))
        divisions = _power(number) if number != "0" else 0
        if size == ">":
            found[index + 1 :] = [divisions] * (DIVISIONS - index - 1)
            continue
        index = min(_power(size).bit_length() - 1, DIVISIONS - 1)
        if is_first:
            found[:index] = [divisions] * index
            is_first = False
        found[index] = divisions
    return tuple(found)


def _power(text: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise ValueError(f"roundup_power2_divisions takes powers of two, not {text!r}.")
    return int(text)
