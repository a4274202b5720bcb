"""Files that commands read and write: read as text, checked before the work, written whole.

Enters: a path of the user's. Leaves: its text, or the file; else a `Refusal`. Guarantees: a file
that is not ours is replaced only if the user insists; what is there stays until the new text is
complete.
"""

from __future__ import annotations

import os
from pathlib import Path

from autoremat.commands.arguments import Refusal
from autoremat.errors import reason_of

_HEAD_NBYTES = 1024  # of a file: where the mark of ours stands


class OutputError(Refusal):
    """A path that cannot be written, and why."""


def read_text(path: Path) -> str:
    """What a file says.

    Raises:
        Refusal: if it cannot be read, or is not text.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not text in UTF-8 ({error}). Is it the right file?") from error
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read: {reason_of(error)}.") from error


def check_writable(out: Path, mark: bytes, *, force: bool) -> None:
    """Find before the work starts what would keep its result from being written.

    Args:
        out: the file.
        mark: what stands at the head of files of ours, which may be replaced.
        force: whether any file may be.

    Raises:
        OutputError: saying what is wrong with the path.
    """
    try:
        if out.is_dir():
            raise OutputError(f"{out} is a directory: give a file in it.")
        parent = out.resolve().parent
        if not parent.is_dir():
            raise OutputError(f"{out} cannot be written: there is no directory {parent}.")
        if out.exists() and not os.access(out, os.W_OK):
            raise OutputError(f"{out} cannot be written: permission denied.")
        if out.is_file() or not out.exists():
            _try_in(parent)
        if force or not out.is_file():
            return
        with out.open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except OutputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise OutputError(f"{out} cannot be written: {reason_of(error)}.") from error
    if head and mark not in head:
        raise OutputError(
            f"{out} is there already, and autoremat did not write it: give another name, or "
            "--force to replace it."
        )


def write_whole(out: Path, data: bytes) -> None:
    """Write through a file beside it, so that no half of it is ever seen.

    Raises:
        OutputError: with the system's reason.
    """
    try:
        if out.exists() and not out.is_file():
            out.write_bytes(data)  # a pipe or a device; what /dev/stdout resolves to is no path
            return
        whole = out.resolve()
        part = _part_in(whole.parent)
        try:
            part.write_bytes(data)
            part.replace(whole)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {reason_of(error)}.") from error


def _try_in(folder: Path) -> None:
    """Create a file and remove it: permissions alone do not tell whether that works."""
    part = _part_in(folder)
    try:
        part.touch()
    finally:
        part.unlink(missing_ok=True)


def _part_in(folder: Path) -> Path:
    return folder / f".autoremat.{os.getpid()}.part"
