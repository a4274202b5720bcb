"""Blocks of the device's memory, and the pools in which free ones wait.

Enters: blocks. Leaves: them, the smallest that fits first. Guarantees: a pool is sorted as torch's
is (`BlockComparatorSize`: by stream, size, address), so that of equal blocks the same one is given.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Segment:
    """A range of addresses that was taken from the device.

    Attributes:
        nbytes: of it; where it is expandable, of addresses.
        page_nbytes: by which an expandable one is backed by memory; 0 where all of it is.
        address: where it begins.
    """

    __slots__ = ("address", "nbytes", "page_nbytes")

    def __init__(self, address: int, nbytes: int, page_nbytes: int = 0) -> None:
        """Of these addresses."""
        self.address, self.nbytes, self.page_nbytes = address, nbytes, page_nbytes


class Block:
    """A part of a segment, all of it given away or all of it free.

    Attributes:
        segment: what it is part of.
        address: where it begins.
        nbytes: of it.
        pool: where it waits when it is free.
        stream: on which it may be used.
        before: the part of the segment that ends where it begins, if any.
        after: the part that begins where it ends.
        is_allocated: whether it is given away.
        is_mapped: whether there is memory behind its addresses.
        freed_at: how many blocks the pool had been asked for when it came there.
    """

    __slots__ = (
        *("segment", "address", "nbytes", "pool", "stream", "before", "after"),
        *("is_allocated", "is_mapped", "freed_at"),
    )

    def __init__(
        self, segment: Segment, address: int, nbytes: int, pool: Pool, stream: int
    ) -> None:
        """A free one without neighbours."""
        self.segment, self.address, self.nbytes = segment, address, nbytes
        self.pool, self.stream = pool, stream
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_allocated, self.is_mapped, self.freed_at = False, True, 0

    @property
    def is_split(self) -> bool:
        """Whether it is not all of its segment."""
        return self.before is not None or self.after is not None

    @property
    def is_expandable(self) -> bool:
        """Whether its segment is."""
        return self.segment.page_nbytes > 0

    @property
    def reach_nbytes(self) -> int:
        """To what it may grow where its segment is expandable."""
        after = self.after
        return self.nbytes + (after.nbytes if after is not None and not after.is_mapped else 0)

    def insert_before(self, nbytes: int) -> Block:
        """Cut so much off its beginning: a block of its own, with its properties."""
        new = Block(self.segment, self.address, nbytes, self.pool, self.stream)
        new.before, new.after, new.is_mapped = self.before, self, self.is_mapped
        if self.before is not None:
            self.before.after = new
        self.before = new
        self.address += nbytes
        self.nbytes -= nbytes
        return new

    def insert_after(self, nbytes: int) -> Block:
        """The same of its end."""
        new = Block(
            self.segment, self.address + self.nbytes - nbytes, nbytes, self.pool, self.stream
        )
        new.before, new.after, new.is_mapped = self, self.after, self.is_mapped
        if self.after is not None:
            self.after.before = new
        self.after = new
        self.nbytes -= nbytes
        return new

    def merge(self, other: Block | None) -> None:
        """Take a free neighbour in, if both or neither have memory (`try_merge_blocks`)."""
        if other is None or other.is_allocated or other.is_mapped != self.is_mapped:
            return
        other.pool.remove(other)
        self.nbytes += other.nbytes
        if self.before is other:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self


class Pool:
    """Free blocks, by stream, size and address; and addresses without memory, by address.

    Attributes:
        is_small: whether it is for requests of up to 1 MiB.
        asked: how often a block was looked for, while that is counted.
    """

    def __init__(self, *, is_small: bool) -> None:
        """Empty."""
        self.is_small, self.asked = is_small, 0
        self._free: list[tuple[int, int, int]] = []
        self._unmapped: list[tuple[int, int]] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """A block becomes free."""
        block.freed_at = self.asked
        self._blocks[block.address] = block
        if block.is_mapped:
            insort(self._free, (block.stream, block.nbytes, block.address))
        else:
            insort(self._unmapped, (block.stream, block.address))

    def remove(self, block: Block) -> None:
        """It is not free any more, or about to change."""
        del self._blocks[block.address]
        if block.is_mapped:
            del self._free[bisect_left(self._free, (block.stream, block.nbytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.stream, block.address))]

    def from_size(self, stream: int, nbytes: int) -> Iterator[Block]:
        """Free blocks of a stream of this size or more, the smallest first."""
        for place in range(bisect_left(self._free, (stream, nbytes, -1)), len(self._free)):
            found, _, address = self._free[place]
            if found != stream:
                return
            yield self._blocks[address]

    def below_size(self, stream: int, nbytes: int) -> Iterator[Block]:
        """Free blocks below this size, the largest of the stream first, then other streams'."""
        for place in reversed(range(bisect_left(self._free, (stream, nbytes, -1)))):
            yield self._blocks[self._free[place][2]]

    def unmapped(self, stream: int) -> Iterator[Block]:
        """Addresses of a stream without memory, the lowest first."""
        for place in range(bisect_left(self._unmapped, (stream, -1)), len(self._unmapped)):
            found, address = self._unmapped[place]
            if found != stream:
                return
            yield self._blocks[address]

    @property
    def free(self) -> list[Block]:
        """All free blocks, in the pool's order."""
        return [self._blocks[address] for _, _, address in self._free]
