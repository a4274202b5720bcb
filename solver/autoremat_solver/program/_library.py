"""HiGHS without its greeting, and pulp without what it would hold.

Leaves: the libraries. HiGHS says nothing: from 1.16 on it prints its version and licence on
standard output when a process makes its first model, before any option can keep it from that; what
a command prints for another program to read would begin with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any


@functools.cache
def highs() -> Any:
    """The module `highspy`, after its first model."""
    import highspy

    with _silent_output():
        highspy.Highs()  # type: ignore[no-untyped-call]
    return highspy


@functools.cache
def pulp() -> Any:
    """The module `pulp`, imported where nobody has called.

    It keeps the exceptions of solvers that it does not find, and with them each function that was
    running: what a user's has in its variables, such as a model, would stay as long as the process.
    """
    try:
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(import_module, "pulp").result()
    except RuntimeError:  # as the interpreter ends there are no more threads
        return import_module("pulp")


@contextlib.contextmanager
def _silent_output() -> Iterator[None]:
    """What compiled code prints goes nowhere; where there is no output, there is none to keep."""
    with contextlib.ExitStack() as stack:
        try:
            _flush()
            before = os.dup(1)
            stack.callback(os.close, before)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nowhere)
            os.dup2(nowhere, 1)
            stack.callback(os.dup2, before, 1)
            stack.callback(_flush)
        except OSError:
            pass
        yield


def _flush() -> None:
    """Python's own output, and that of the C library, which keeps it until there is more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)
