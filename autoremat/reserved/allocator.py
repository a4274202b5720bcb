"""CUDA's caching allocator, emulated: which blocks it gives, and what it takes from the device.

Enters: requests and frees, in their order. Leaves: blocks, and how much is allocated and reserved.
Guarantees: live <= allocated <= reserved; no two blocks overlap; the rules are those of torch's
`DeviceCachingAllocator` (`c10/cuda/CUDACachingAllocator.cpp`), each named where it stands here.
What decides a tie between segments are their addresses, which the driver chooses: here each
segment lies above all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.reserved.blocks import Block, Pool, Segment
from autoremat.reserved.settings import (
    SMALL_NBYTES,
    SMALL_SEGMENT_NBYTES,
    AllocatorSettings,
)

NO_LIMIT_NBYTES = 1 << 50  # more than any device has


class OutOfMemory(MemoryError):
    """The device has no room for a request, even once all that was cached is given back."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the allocator has at one moment.

    Attributes:
        allocated_nbytes: in blocks that are given away (`torch.cuda.memory_allocated`).
        reserved_nbytes: taken from the device (`torch.cuda.memory_reserved`).
        free_nbytes: of the largest blocks that wait, the largest first.
        segments: ranges of addresses with memory behind them.
    """

    allocated_nbytes: int
    reserved_nbytes: int
    free_nbytes: tuple[int, ...]
    segments: int


class CachingAllocator:
    """One device's.

    Attributes:
        settings: its options.
        allocated_nbytes: given away now.
        reserved_nbytes: taken from the device now.
        peak_allocated_nbytes: the most that was given away.
        peak_reserved_nbytes: the most that was taken.
        retries: how often all that waited was given back to find room (`num_alloc_retries`).
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, *, device_nbytes: int = NO_LIMIT_NBYTES
    ) -> None:
        """Nothing is taken yet.

        Args:
            settings: its options; torch's own defaults if not given.
            device_nbytes: what the device has for it.
        """
        self.settings = settings or AllocatorSettings()
        self.allocated_nbytes = self.reserved_nbytes = 0
        self.peak_allocated_nbytes = self.peak_reserved_nbytes = 0
        self.retries = 0
        self._device_nbytes = device_nbytes
        fraction = self.settings.memory_fraction  # `setMemoryFraction`: all of it is no limit
        is_limited = fraction is not None and fraction < 1
        self._allowed_nbytes = int((fraction or 0) * device_nbytes) if is_limited else None
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._allocated: dict[int, Block] = {}
        self._next_address = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """The block that a request gets (`malloc`); None for nothing, which needs no memory.

        Raises:
            OutOfMemory: if the device has no room for it.
        """
        if nbytes <= 0:
            return None
        size = self.settings.rounded(nbytes)
        pool = self._small if size <= SMALL_NBYTES else self._large  # `get_pool`
        block = self._free_block(pool, stream, size) or self._new_block(pool, stream, size)
        if self.settings.splits(size, block.nbytes, is_small=pool.is_small):
            rest = block  # `alloc_found_block`: the beginning is given, the rest waits
            block = rest.insert_before(size)
            pool.add(rest)
        block.is_allocated = True
        self._allocated[block.address] = block
        self.allocated_nbytes += block.nbytes
        self.peak_allocated_nbytes = max(self.peak_allocated_nbytes, self.allocated_nbytes)
        return block

    def free(self, block: Block | None) -> None:
        """A block comes back and joins its free neighbours (`free_block`)."""
        if block is None:
            return
        del self._allocated[block.address]
        block.is_allocated = False
        self.allocated_nbytes -= block.nbytes
        self._join(block)

    def empty_cache(self) -> None:
        """Give back to the device what no block needs (`release_cached_blocks`)."""
        for pool in (self._large, self._small):
            free = pool.free
            for block in free:
                if not block.is_expandable and not block.is_split:
                    self._release(block)
            for block in free:
                if block.is_expandable:
                    self._unmap(block)

    def held(self, largest: int = 5) -> Held:
        """What it has now; of the blocks that wait, the sizes of so many."""
        waiting = (block.nbytes for block in [*self._small.free, *self._large.free])
        sizes = tuple(sorted(waiting, reverse=True)[:largest])
        return Held(self.allocated_nbytes, self.reserved_nbytes, sizes, self.segments)

    @property
    def blocks(self) -> list[Block]:
        """All with memory behind them, by address."""
        found = [*self._allocated.values(), *self._small.free, *self._large.free]
        return sorted(found, key=lambda block: block.address)

    @property
    def segments(self) -> int:
        """As a memory snapshot counts them: of expandable ones, each range that has memory."""
        return sum(
            block.before is None or not block.before.is_mapped
            for block in [*self._allocated.values(), *self._small.free, *self._large.free]
        )

    # --- a block that waits -----------------------------------------------------------------

    def _free_block(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The smallest that waits and is large enough (`get_free_block`)."""
        if self._collects:
            pool.asked += 1
        waiting = pool.from_size(stream, size)
        found = next(waiting, None)
        if found is None:
            return None
        if found.is_expandable:
            # What counts is to what it may grow, not what it is.
            for other in waiting:
                if not found.is_expandable or other.reach_nbytes >= found.reach_nbytes:
                    break
                found = other
        if not self.settings.may_give(size, found.nbytes):
            return None
        pool.remove(found)
        return found

    def _join(self, block: Block) -> None:
        block.merge(block.before)
        block.merge(block.after)
        block.pool.add(block)

    # --- a block from the device ------------------------------------------------------------

    def _new_block(self, pool: Pool, stream: int, size: int) -> Block:
        """One that does not wait: from the device, if need be after giving back others."""
        if self._collects:
            self._collect()
        segment_nbytes = self.settings.segment_nbytes(size)
        block = self._take(pool, stream, size, segment_nbytes)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._take(pool, stream, size, segment_nbytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._take(pool, stream, size, segment_nbytes)
        if block is None:
            raise OutOfMemory(
                f"{segment_nbytes} bytes are asked of the device for a block of {size}: "
                f"{self.reserved_nbytes} are reserved, {self.allocated_nbytes} of them allocated."
            )
        return block

    def _take(self, pool: Pool, stream: int, size: int, segment_nbytes: int) -> Block | None:
        """A block of the device's memory (`alloc_block`); None if there is no room."""
        allowed_nbytes = self._allowed_nbytes
        if allowed_nbytes is not None and self.reserved_nbytes + segment_nbytes > allowed_nbytes:
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, stream, size)
        if not self._reserve(segment_nbytes):
            return None
        return self._of_new_segment(pool, stream, segment_nbytes)

    def _reserve(self, nbytes: int) -> bool:
        """Whether the device has so much more; if so, it is taken."""
        if self.reserved_nbytes + nbytes > self._device_nbytes:
            return False
        self.reserved_nbytes += nbytes
        self.peak_reserved_nbytes = max(self.peak_reserved_nbytes, self.reserved_nbytes)
        return True

    def _of_new_segment(self, pool: Pool, stream: int, nbytes: int, page_nbytes: int = 0) -> Block:
        segment = Segment(self._next_address, nbytes, page_nbytes)
        self._next_address += nbytes
        return Block(segment, segment.address, nbytes, pool, stream)

    def _release(self, block: Block) -> None:
        """A whole segment goes back (`release_block`)."""
        block.pool.remove(block)
        self.reserved_nbytes -= block.nbytes

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Only as much as a request needs, of blocks too large to split.

        `release_available_cached_blocks`: nothing, where there is no limit of splitting.
        """
        limit_nbytes = self.settings.max_split_nbytes
        if limit_nbytes is None:
            return False
        wanted_nbytes = max(size, limit_nbytes)
        found = next(pool.from_size(stream, wanted_nbytes), None)
        if found is not None and not found.is_expandable:
            self._release(found)
            return True
        given_nbytes = 0
        for block in list(pool.below_size(stream, wanted_nbytes)):
            is_done = given_nbytes >= wanted_nbytes
            if is_done or block.nbytes < limit_nbytes or block.stream != stream:
                break
            if not block.is_expandable:
                given_nbytes += block.nbytes
                self._release(block)
        return given_nbytes >= wanted_nbytes

    @property
    def _collects(self) -> bool:
        """Whether old blocks are given back before the device is full."""
        return self._allowed_nbytes is not None and self.settings.collection_threshold > 0

    def _collect(self) -> None:
        """Give back whole segments that wait for longer than most (`garbage_collect_...`)."""
        threshold_nbytes = int(self.settings.collection_threshold * (self._allowed_nbytes or 0))
        target_nbytes = self.reserved_nbytes - threshold_nbytes
        if target_nbytes <= 0:
            return
        pool = self._large
        waiting = [block for block in pool.free if not block.is_split]
        ages = {block.address: pool.asked - block.freed_at for block in waiting}
        given_nbytes = 0
        while waiting and given_nbytes < target_nbytes:
            average = sum(ages[block.address] for block in waiting) / len(waiting)
            old = [block for block in waiting if ages[block.address] >= average]
            for block in old:
                given_nbytes += block.nbytes
                self._release(block)
            waiting = [block for block in waiting if ages[block.address] < average]

    # --- expandable segments ----------------------------------------------------------------

    def _expanded(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A block at the lowest address that has room (`try_allocate_expandable_block`)."""
        block = self._with_room(pool, stream, size)
        if not block.is_mapped and not self._map(block, min(block.nbytes, size)):
            return None
        while block.nbytes < size:
            after = block.after
            assert after is not None, "there is room"
            if not self._map(after, min(size - block.nbytes, after.nbytes)):
                return None
            block = after
        pool.remove(block)
        return block

    def _with_room(self, pool: Pool, stream: int, size: int) -> Block:
        """Where free blocks and addresses without memory suffice (`find_expandable_block`)."""
        for unmapped in pool.unmapped(stream):
            before = unmapped.before
            first = unmapped if before is None or before.is_allocated else before
            room_nbytes, block = 0, first
            while room_nbytes < size and not block.is_allocated:
                room_nbytes += block.nbytes
                if block.after is None:
                    break
                block = block.after
            if room_nbytes >= size:
                return first
        page_nbytes = SMALL_SEGMENT_NBYTES if pool.is_small else self.settings.large_segment_nbytes
        # Addresses for 1 1/8 of the device.
        pages = -(-(self._device_nbytes + self._device_nbytes // 8) // page_nbytes)
        block = self._of_new_segment(pool, stream, pages * page_nbytes, page_nbytes)
        block.is_mapped = False
        pool.add(block)
        return block

    def _map(self, block: Block, nbytes: int) -> bool:
        """Put memory behind addresses, whole pages from the first (`map_block`)."""
        page_nbytes = block.segment.page_nbytes
        mapped_nbytes = -(-nbytes // page_nbytes) * page_nbytes
        if not self._reserve(mapped_nbytes):
            return False
        pool = block.pool
        pool.remove(block)
        if mapped_nbytes < block.nbytes:
            pool.add(block.insert_after(block.nbytes - mapped_nbytes))
        block.is_mapped = True
        self._join(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that are all free (`unmap_block`)."""
        segment, pool = block.segment, block.pool
        page_nbytes = segment.page_nbytes
        before_nbytes = -(block.address - segment.address) % page_nbytes
        after_nbytes = (block.address + block.nbytes - segment.address) % page_nbytes
        if before_nbytes + after_nbytes >= block.nbytes:
            return
        pool.remove(block)
        if before_nbytes:
            pool.add(block.insert_before(before_nbytes))
        if after_nbytes:
            pool.add(block.insert_after(after_nbytes))
        block.is_mapped = False
        self.reserved_nbytes -= block.nbytes
        self._join(block)
        if not block.is_split:
            pool.remove(block)  # `release_expandable_segment`: its addresses are given back, too
