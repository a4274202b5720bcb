"""Files without names, mapped into memory, and those that nobody uses at the moment.

Enters: a folder, and bytes. Leaves: memory that is a file of its own, outside torch's allocator.
Guarantees: no file has a name, so none is left behind, however the process ends, and processes may
share a folder; a file is as long as it says, so a full disk is an error where memory is asked for,
and no crash later. A file that nobody uses any more is kept for the next of its size, since a new
one has to be made and written page by page; what is kept so is never more than what was in use at
once.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from contextlib import suppress

from autoremat.errors import OffloadError
from autoremat.units import format_nbytes


class Files:
    """Files of one folder for this process."""

    def __init__(self, folder: str) -> None:
        """None yet."""
        self._folder = folder
        self._process = os.getpid()  # a child would write into what its parent uses
        self._lock = threading.Lock()
        self._idle: deque[mmap.mmap] = deque()  # the longest idle first
        self._returned: deque[mmap.mmap] = deque()  # since somebody last looked
        self._used_nbytes = self._most_nbytes = 0

    def take(self, nbytes: int) -> memoryview:
        """So much memory, for as long as somebody holds it; what was in it before may still be.

        Raises:
            OffloadError: if the folder cannot give it, with the reason and a remedy.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_back()
            region = self._kept(nbytes) or self._made(nbytes)
            self._used_nbytes += nbytes
            self._most_nbytes = max(self._most_nbytes, self._used_nbytes)
            self._trim()
        view = memoryview(region)
        weakref.finalize(view, self._give_back, region).atexit = False
        return view

    @property
    def used_nbytes(self) -> int:
        """Of files that somebody uses."""
        with self._lock:
            self._take_back()
            return self._used_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Of files that nobody uses."""
        with self._lock:
            self._take_back()
            self._trim()
            return sum(map(len, self._idle))

    def _take_back(self) -> None:
        """What was given back is idle."""
        while self._returned:
            region = self._returned.popleft()
            self._used_nbytes -= len(region)
            self._idle.append(region)

    def _trim(self) -> None:
        """No more is kept, with what is in use, than was in use at once."""
        while self._used_nbytes + sum(map(len, self._idle)) > self._most_nbytes:
            self._idle.popleft()

    def _kept(self, nbytes: int) -> mmap.mmap | None:
        found = next((region for region in self._idle if len(region) == nbytes), None)
        if found is not None:
            self._idle.remove(found)
        return found

    def _made(self, nbytes: int) -> mmap.mmap:
        try:
            return mapped(self._folder, nbytes)
        except OffloadError:
            if not self._idle:
                raise
            self._idle.clear()
        return mapped(self._folder, nbytes)  # with the room that those took

    def _give_back(self, region: mmap.mmap) -> None:
        """Nothing else is done here: garbage is collected in the middle of anything."""
        if os.getpid() == self._process:
            self._returned.append(region)


def free_nbytes(folder: str) -> int:
    """What the disk has free that a folder is on.

    Raises:
        OffloadError: if there is no such folder.
    """
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise OffloadError(_refusal(folder, mmap.PAGESIZE, error)) from error


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
