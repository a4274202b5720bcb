"""Each rule of CUDA's caching allocator, by a trace that is worked out by hand.

The names in brackets are functions of torch's `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

import pytest

from autoremat.reserved.allocator import CachingAllocator, OutOfMemory
from autoremat.reserved.settings import MIB, AllocatorSettings


def allocator(setting: str = "", *, device_mib: int = 1 << 20) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(setting), device_nbytes=device_mib * MIB)


def sizes(found: CachingAllocator) -> list[tuple[float, bool]]:
    """Of each block in MiB, by address, and whether it is given away."""
    return [(block.nbytes / MIB, block.is_allocated) for block in found.blocks]


def test_requests_are_rounded_to_512_bytes_and_nothing_needs_nothing():
    """[round_size] 1 byte takes 512, 513 take 1,024."""
    found = allocator()
    assert found.malloc(0) is None
    assert found.reserved_nbytes == 0
    found.malloc(1)
    assert found.allocated_nbytes == 512
    found.malloc(513)
    assert found.allocated_nbytes == 512 + 1024


def test_small_requests_share_a_segment_of_2_mib():
    """[get_allocation_size, should_split] 1 MiB + 1 MiB fill one; the third takes another."""
    found = allocator()
    for reserved_mib in (2, 2, 4):
        found.malloc(MIB)
        assert found.reserved_nbytes == reserved_mib * MIB
    assert sizes(found) == [(1, True), (1, True), (1, True), (1, False)]
    assert found.segments == 2


def test_requests_above_1_mib_and_below_10_share_a_segment_of_20():
    """[get_allocation_size] 9 + 9 MiB of 20; 2 MiB are left, and 1.5 of them go to the next."""
    found = allocator()
    found.malloc(9 * MIB)
    found.malloc(9 * MIB)
    found.malloc(3 * MIB // 2)  # 0.5 MiB would be left: not split off, so 2 MiB are allocated
    assert sizes(found) == [(9, True), (9, True), (2, True)]
    assert found.allocated_nbytes == found.reserved_nbytes == 20 * MIB


def test_larger_requests_have_a_segment_to_measure_in_steps_of_2_mib():
    """[get_allocation_size] 10 MiB take 10; 11 take 12, of which 1 is too little to split off."""
    found = allocator()
    found.malloc(10 * MIB)
    assert found.reserved_nbytes == 10 * MIB
    found.malloc(11 * MIB)
    assert found.reserved_nbytes == 22 * MIB
    assert found.allocated_nbytes == 22 * MIB  # the block is all of the segment


def test_the_rest_is_split_off_where_it_is_above_1_mib():
    """[should_split] A free 30 MiB: 28 MiB leave 2, which wait; 29 leave 1, which is given, too."""
    for asked_mib, blocks in ((28, [(28, True), (2, False)]), (29, [(30, True)])):
        found = allocator()
        found.free(found.malloc(30 * MIB))
        found.malloc(asked_mib * MIB)
        assert sizes(found) == blocks
        assert found.reserved_nbytes == 30 * MIB


def test_small_blocks_are_split_to_the_last_512_bytes():
    """[should_split] In the small pool 512 bytes are enough."""
    found = allocator()
    found.malloc(MIB - 512)
    found.malloc(MIB)
    assert [block.nbytes for block in found.blocks] == [MIB - 512, MIB, 512]


def test_the_smallest_block_that_fits_is_given():
    """[get_free_block] Of 40, 12 and 24 MiB that wait, 12 goes to a request of 12."""
    found = allocator()
    blocks = [found.malloc(nbytes * MIB) for nbytes in (40, 12, 24)]
    for block in blocks:
        found.free(block)
    block = found.malloc(12 * MIB)
    assert block is not None
    assert block.address == 40 * MIB
    assert found.reserved_nbytes == 76 * MIB


def test_freed_neighbours_become_one_again():
    """[free_block, try_merge_blocks] 4 + 6 + 10 of 20; the middle last: one block of 20."""
    found = allocator()
    blocks = [found.malloc(nbytes * MIB) for nbytes in (4, 6)]
    blocks.append(found.malloc(9 * MIB))  # of the 10 that are left: 1 is not split off
    found.free(blocks[0])
    found.free(blocks[2])
    assert sizes(found) == [(4, False), (6, True), (10, False)]
    found.free(blocks[1])
    assert sizes(found) == [(20, False)]


def test_pools_and_streams_do_not_share():
    """[get_pool, BlockComparatorSize] What waits in one is not given to another."""
    found = allocator()
    found.free(found.malloc(5 * MIB))
    found.malloc(MIB)
    assert found.reserved_nbytes == 22 * MIB  # 20 wait; the small pool takes 2
    found.malloc(5 * MIB, stream=1)
    assert found.reserved_nbytes == 42 * MIB
    found.malloc(5 * MIB)
    assert found.reserved_nbytes == 42 * MIB


def test_a_full_device_gets_back_whole_segments_and_is_asked_again():
    """[malloc, release_cached_blocks] 50 MiB: 20 + 20 wait, 30 are asked for.

    One of the two segments is in use in part: 5 of its MiB. So 20 go back, 20 stay, 30 fit.
    """
    found = allocator(device_mib=50)
    first, second = found.malloc(20 * MIB), found.malloc(20 * MIB)
    found.free(first)
    found.free(second)
    found.malloc(5 * MIB)
    assert found.reserved_nbytes == 40 * MIB
    found.malloc(30 * MIB)
    assert found.reserved_nbytes == 50 * MIB
    assert found.retries == 1
    with pytest.raises(OutOfMemory, match="52428800 are reserved"):
        found.malloc(16 * MIB)  # 15 MiB wait, in one block: "reserved but unallocated"
    assert found.retries == 2


def test_max_split_size_keeps_large_blocks_whole():
    """[should_split, get_free_block] Of 100 MiB that wait, with a limit of 64.

    A request of 30 is smaller than the limit and may not have a block above it: 30 more. One of 90
    may have it, as it leaves less than 20 (max_non_split_rounding): nothing more, and all 100 are
    allocated. One of 80 would leave 20: a segment of its own.
    """
    found = allocator("max_split_size_mb:64")
    found.free(found.malloc(100 * MIB))
    found.malloc(30 * MIB)
    assert found.reserved_nbytes == 130 * MIB
    other = found.malloc(80 * MIB)
    assert found.reserved_nbytes == 210 * MIB
    found.free(other)
    found.malloc(90 * MIB)
    assert found.reserved_nbytes == 210 * MIB
    assert found.allocated_nbytes == 130 * MIB


def test_max_split_size_gives_back_only_what_is_needed():
    """[release_available_cached_blocks] 200 MiB: 100 and 70 wait, 110 are asked for.

    No block above is large enough, so the largest go back until there are 110: both. Of 100 and 20,
    the 20 stay: they are below the limit, and 100 are too little, so all that waits goes back.
    """
    found = allocator("max_split_size_mb:64", device_mib=200)
    blocks = [found.malloc(100 * MIB), found.malloc(70 * MIB)]
    for block in blocks:
        found.free(block)
    found.malloc(122 * MIB)
    assert found.reserved_nbytes == 122 * MIB
    assert found.retries == 0
    found = allocator("max_split_size_mb:64", device_mib=200)
    blocks = [found.malloc(100 * MIB), found.malloc(20 * MIB)]
    for block in blocks:
        found.free(block)
    found.malloc(130 * MIB)
    assert found.reserved_nbytes == 130 * MIB
    assert found.retries == 1


def test_garbage_is_collected_by_age_and_only_below_a_limit():
    """[garbage_collect_cached_blocks] 200 MiB, all of it allowed but 1 %: threshold 0.5, 99 MiB.

    60 and 40 MiB wait, the 60 for longer; 50 more are asked for. 100 are reserved, 1 above the
    threshold. Looked for were blocks 3 times: the 60 came back after 1, the 40 after 2; ages 2 and
    1, on average 1.5. So the 60 go, which is enough. Without a limit nothing is collected.
    """
    for limit, reserved_mib in (("per_process_memory_fraction:0.99,", 90), ("", 150)):
        found = allocator(f"{limit}garbage_collection_threshold:0.5", device_mib=200)
        found.free(found.malloc(60 * MIB))
        other = found.malloc(40 * MIB, stream=1)
        found.free(other)
        found.malloc(50 * MIB, stream=2)
        assert found.reserved_nbytes == reserved_mib * MIB


def test_an_expandable_segment_grows_by_pages():
    """[try_allocate_expandable_block] Pages of 20 MiB: 30 take two, 15 more take one beside them.

    Without expandable segments the same take 30 + 16. After 30 are freed, 40 take the 30 that are
    free: no, 45 are in the way; they take 40 at the end, of which 15 are there.
    """
    found = allocator("expandable_segments:True")
    first = found.malloc(30 * MIB)
    assert found.reserved_nbytes == 40 * MIB
    found.malloc(15 * MIB)
    assert found.reserved_nbytes == 60 * MIB
    assert sizes(found) == [(30, True), (15, True), (15, False)]
    assert found.segments == 1
    found.free(first)
    found.malloc(40 * MIB)
    assert found.reserved_nbytes == 100 * MIB
    assert sizes(found) == [(30, False), (15, True), (40, True), (15, False)]


def test_an_expandable_segment_gives_back_pages_that_are_all_free():
    """[unmap_block] 30 free MiB at the start hold one whole page of 20; the 15 at the end none."""
    found = allocator("expandable_segments:True")
    first = found.malloc(30 * MIB)
    found.malloc(15 * MIB)
    found.free(first)
    found.empty_cache()
    assert found.reserved_nbytes == 40 * MIB
    assert sizes(found) == [(10, False), (15, True), (15, False)]
    found.malloc(12 * MIB)  # at the end: the 15 that wait there are the smallest that fit
    found.malloc(25 * MIB)  # the page is mapped again: 20 + 10 at the start
    assert found.reserved_nbytes == 60 * MIB
    assert sizes(found) == [(25, True), (5, False), (15, True), (12, True), (3, False)]


def test_growing_batches_are_what_expandable_segments_are_for():
    """Sizes that grow by 2 MiB never fit what waits: 20 + 22 + 24 + 26, or pages up to 40."""
    for setting, reserved_mib in (("", 92), ("expandable_segments:True", 40)):
        found = allocator(setting)
        for asked_mib in (20, 22, 24, 26):
            found.free(found.malloc(asked_mib * MIB))
        assert found.reserved_nbytes == reserved_mib * MIB


def test_what_is_in_the_way_of_a_request_is_told_at_any_moment():
    """The largest blocks that wait, and the segments."""
    found = allocator()
    blocks = [found.malloc(nbytes * MIB) for nbytes in (12, 3, 6)]
    found.free(blocks[0])
    held = found.held(largest=2)
    # 12 wait; of 20 MiB, 3 + 6 are taken and 11 wait.
    assert held.free_nbytes == (12 * MIB, 11 * MIB)
    assert held.segments == 2
    assert held.reserved_nbytes - held.allocated_nbytes == 23 * MIB
