"""A folder on a disk as the host of a CPU.

Enters: a folder, and what a tensor is like. Leaves: tensors whose memory is a file of their own,
outside torch's allocator. Guarantees: those of `host.files`. The system writes what it has no room
for.
"""

from __future__ import annotations

import functools
import mmap
import os
from dataclasses import dataclass, replace

import torch
from autoremat_solver import Link
from torch import Tensor

from autoremat.errors import OffloadError
from autoremat.host.files import Files, free_nbytes, mapped
from autoremat.units import format_nbytes, format_us

PREFIX = "disk:"
_IN_MEMORY = ("tmpfs", "ramfs")
RESERVE = 0.1  # of what a disk has free, which nobody takes


@dataclass(frozen=True)
class Disk:
    """A folder in which values wait.

    Attributes:
        folder: where it is.
        share: of what is free there, which these values may take.
        taken_nbytes: what others of their step take there, in files or not yet.
    """

    folder: str
    share: float = 1.0
    taken_nbytes: int = 0

    @classmethod
    def parse(cls, given: object) -> Disk:
        """A host as users write it.

        Raises:
            ValueError: if it is none, or no file can be made there.
        """
        if not isinstance(given, str) or not given.startswith(PREFIX) or given == PREFIX:
            raise ValueError(
                f'offload is "disk:PATH", a folder on a disk with room, not {given!r}.'
            )
        found = cls(os.path.abspath(os.path.expanduser(given.removeprefix(PREFIX))))
        try:
            mapped(found.folder, mmap.PAGESIZE)
        except OffloadError as error:
            raise ValueError(f"offload={given!r}: {error}") from error
        return found

    @property
    def asked(self) -> str:
        """As users write it."""
        return PREFIX + self.folder

    def about(self, link: Link) -> str:
        """Where values wait, in words."""
        out, back = (
            format_nbytes(round(1e6 * per_us))
            for per_us in (link.out_nbytes_per_us, link.in_nbytes_per_us)
        )
        latency = format_us(link.latency_us)
        memory = " (which is memory, and no disk)" if self.is_memory else ""
        speed = f"{out}/s there and {back}/s back, {latency} a copy, as measured"
        return f"in {self.folder}{memory}, {speed}"

    @property
    def is_memory(self) -> bool:
        """Whether files of the folder are memory themselves, as those of a tmpfs are."""
        return _file_system(self.folder) in _IN_MEMORY

    @property
    def free_nbytes(self) -> int:
        """What values may take there at once, with what files that are kept take already.

        In a few leading digits: plans are kept for a machine, and what is free is never the same.

        Raises:
            OffloadError: if there is no such folder any more.
        """
        files = files_of(self.folder)
        all_nbytes = free_nbytes(self.folder) + files.idle_nbytes
        found_nbytes = in_leading_digits(int(self.share * (1 - RESERVE) * all_nbytes))
        return max(0, found_nbytes - max(0, self.taken_nbytes - files.used_nbytes))

    def shared(self, share: float) -> Disk:
        """The same for values that may take so much of it."""
        return replace(self, share=share * self.share)

    def less(self, taken_nbytes: int) -> Disk:
        """The same beside others of the step, whose values may take so much."""
        return replace(self, taken_nbytes=taken_nbytes)


def in_leading_digits(nbytes: int) -> int:
    """No more than so much, and at most an eighth less."""
    spare_bits = max(0, nbytes.bit_length() - 4)
    return nbytes >> spare_bits << spare_bits


@functools.cache
def files_of(folder: str) -> Files:
    """Those of a folder."""
    return Files(folder)


def forget_files() -> None:
    """In a child of this process no file of its parent's is kept for another value."""
    files_of.cache_clear()


def like(tensor: Tensor, folder: str) -> Tensor:
    """A tensor of the same sizes, strides and dtype, in a file of its own.

    Raises:
        OffloadError: if there is no room, or no such folder.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else -1
    if last < 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    nbytes = (last + 1) * tensor.element_size()
    flat = torch.frombuffer(files_of(folder).take(nbytes), dtype=torch.uint8, count=nbytes)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _file_system(folder: str) -> str:
    """The kind of the file system that a folder is on; "" where the system does not say."""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return ""
    real = os.path.realpath(folder)
    found = [(len(row[1]), row[2]) for row in rows if os.path.commonpath((row[1], real)) == row[1]]
    return max(found, key=lambda one: one[0], default=(0, ""))[1]
