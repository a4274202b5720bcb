"""A folder on a disk as the host of a CPU: files without names, mapped into memory.

Enters: a folder, and what a tensor is like. Leaves: tensors whose memory is a file of their own,
outside torch's allocator. Guarantees: no file has a name, so none is left behind, however the
process ends, and processes may share a folder; a file is as long as it says, so a full disk is
an error where memory is asked for, and no crash later. The system writes what it has no room for.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from autoremat_solver import Link
from torch import Tensor

from autoremat.errors import OffloadError
from autoremat.units import format_nbytes, format_us

PREFIX = "disk:"
SAMPLE_NBYTES = 8 << 20  # copied to find how fast the folder is
_IN_MEMORY = ("tmpfs", "ramfs")
RESERVE = 0.1  # of what a disk has free, which nobody takes


@dataclass(frozen=True)
class Disk:
    """A folder in which values wait.

    Attributes:
        folder: where it is.
    """

    folder: str

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
        """What values may take there at once."""
        return int((1 - RESERVE) * shutil.disk_usage(self.folder).free)

    def link(self) -> Link:
        """How fast copies there and back are, measured now, while nothing else runs.

        A copy there makes its file first, as each copy of a plan does.
        """
        sample = memoryview(bytearray(SAMPLE_NBYTES))
        there = memoryview(mapped(self.folder, SAMPLE_NBYTES))

        def out() -> None:
            memoryview(mapped(self.folder, SAMPLE_NBYTES))[:] = sample

        def back() -> None:
            sample[:] = there

        out_us, in_us = _median_us(out), _median_us(back)
        latency_us = _median_us(lambda: mapped(self.folder, mmap.PAGESIZE).close())
        return Link(SAMPLE_NBYTES / out_us, SAMPLE_NBYTES / in_us, latency_us)


def like(tensor: Tensor, folder: str) -> Tensor:
    """A tensor of the same sizes, strides and dtype, in a file of its own.

    Raises:
        OffloadError: if there is no room, or no such folder.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else -1
    if last < 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    region = mapped(folder, (last + 1) * tensor.element_size())
    flat = torch.frombuffer(region, dtype=torch.uint8)[: (last + 1) * tensor.element_size()]
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def mapped(folder: str, nbytes: int) -> mmap.mmap:
    """So many bytes of a new file without a name; they are there as long as somebody holds them.

    Raises:
        OffloadError: if the folder cannot give them, with the reason and a remedy.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="autoremat-") as file:
            _reserve(file.fileno(), nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise OffloadError(_refusal(folder, nbytes, error)) from error


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


def _reserve(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    if os.fstatvfs(descriptor).f_bavail * os.fstatvfs(descriptor).f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, nbytes)


def _refusal(folder: str, nbytes: int, error: OSError) -> str:
    size = format_nbytes(nbytes)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = "unknown"
        with suppress(OSError):
            free = format_nbytes(shutil.disk_usage(folder).free)
        return (
            f"{size} are to wait in {folder!r}, where {free} are free ({error.strerror}): free "
            "some, give a folder on a larger disk, or train without offload=."
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"There is no folder {folder!r} in which {size} could wait: make it."
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return (
            f"No file of {size} can be made in {folder!r} ({error.strerror}): each value that "
            "waits takes a file and a mapping. Raise the limits (ulimit -n, vm.max_map_count), or "
            "train without offload=."
        )
    return (
        f"No file of {size} can be made in {folder!r} ({error.strerror}): give a folder in which "
        "this process may write."
    )


def _median_us(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return max(0.1, 1e6 * statistics.median(times))
