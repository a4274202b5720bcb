"""Files that values wait in: made once, used again, and never by two at a time."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest

from autoremat.errors import OffloadError
from autoremat.host import files
from autoremat.host.files import Files

PAGE = mmap.PAGESIZE


def test_a_file_that_nobody_uses_serves_the_next_of_its_size(tmp_path: Path) -> None:
    """And none that somebody uses does."""
    of_folder = Files(str(tmp_path))
    first = of_folder.take(PAGE)
    first[0] = 7
    other = of_folder.take(PAGE)
    assert other[0] == 0
    assert of_folder.idle_nbytes == 0
    del first
    gc.collect()
    assert of_folder.idle_nbytes == PAGE
    again = of_folder.take(PAGE - 5)
    assert again[0] == 7
    assert of_folder.take(2 * PAGE)[0] == 0


def test_no_more_is_kept_than_was_in_use_at_once(tmp_path: Path) -> None:
    """Sizes that come no more give way, those that were idle for longest first."""
    of_folder = Files(str(tmp_path))
    for pages in (3, 1, 2):
        of_folder.take(pages * PAGE)
        gc.collect()
    assert of_folder.idle_nbytes == 3 * PAGE
    held = of_folder.take(3 * PAGE)
    assert (held.nbytes, of_folder.idle_nbytes) == (3 * PAGE, 0)


def test_what_was_refused_does_not_let_more_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was never in use."""
    of_folder, made = Files(str(tmp_path)), files.mapped

    def mapped(folder: str, nbytes: int) -> mmap.mmap:
        if nbytes > 2 * PAGE:
            raise OffloadError("full")
        return made(folder, nbytes)

    monkeypatch.setattr(files, "mapped", mapped)
    with pytest.raises(OffloadError, match="full"):
        of_folder.take(8 * PAGE)
    of_folder.take(PAGE)
    of_folder.take(2 * PAGE)
    assert of_folder.idle_nbytes == 2 * PAGE


def test_files_that_are_kept_give_way_to_one_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk is full only if it is with what is in use alone."""
    of_folder, made = Files(str(tmp_path)), files.mapped
    of_folder.take(PAGE)
    gc.collect()

    def mapped(folder: str, nbytes: int) -> mmap.mmap:
        if of_folder._idle:
            raise OffloadError(errno.ENOSPC)
        return made(folder, nbytes)

    monkeypatch.setattr(files, "mapped", mapped)
    held = of_folder.take(2 * PAGE)
    assert (held.nbytes, of_folder.idle_nbytes) == (2 * PAGE, 0)


def test_a_child_keeps_no_file_of_its_parent_for_other_values(tmp_path: Path) -> None:
    """What both have mapped is the same memory."""
    of_folder = Files(str(tmp_path))
    held = of_folder.take(PAGE)
    child = os.fork()
    if not child:
        del held
        gc.collect()
        os._exit(of_folder.idle_nbytes != 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held[0] = 1
