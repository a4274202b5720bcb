"""What holds of the caching allocator whatever it is asked."""

from __future__ import annotations

import pytest

from autoremat.reserved.allocator import CachingAllocator
from autoremat.reserved.blocks import Block
from tests.reserved.traces import SETTINGS, Case, told


def live_nbytes(lines: tuple[str, ...], live: dict[int, Block | None]) -> int:
    """What was asked for and is not freed."""
    asked = (line.split() for line in lines if line.startswith("a"))
    return sum(int(nbytes) for _, block, nbytes, _ in asked if live.get(int(block)))


def check(allocator: CachingAllocator) -> None:
    """Its blocks lie side by side and add up to what it says that it has."""
    blocks, end = allocator.blocks, 0
    for block in blocks:
        assert block.address >= end
        end = block.address + block.nbytes
        before = block.before
        assert before is None or before.address + before.nbytes == block.address
        assert before is None or before.is_allocated or block.is_allocated or not before.is_mapped
    assert sum(block.nbytes for block in blocks) == allocator.reserved_nbytes
    given = (block.nbytes for block in blocks if block.is_allocated)
    assert sum(given) == allocator.allocated_nbytes <= allocator.reserved_nbytes
    assert allocator.reserved_nbytes <= allocator.peak_reserved_nbytes


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(2, 5))
def test_blocks_never_overlap_and_free_neighbours_are_one(setting: str, seed: int):
    """Live <= allocated <= reserved <= the device's; once all is free and given back, nothing."""
    case = Case.random(setting, seed, 150)
    allocator, live = case.allocator(), {}
    for number, line in enumerate(case.lines):
        told(allocator, live, line)
        check(allocator)
        assert live_nbytes(case.lines[: number + 1], live) <= allocator.allocated_nbytes
        assert allocator.reserved_nbytes <= case.device_nbytes
    for block in live.values():
        allocator.free(block)
    check(allocator)
    assert allocator.allocated_nbytes == 0
    allocator.empty_cache()
    assert allocator.reserved_nbytes == allocator.segments == 0
