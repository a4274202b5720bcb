"""Work that is done in a process of its own, a fork of this one.

Enters: a function without arguments. Leaves: what it returns. Guarantees: whatever it changes in
the process (torch's idea of the devices that are here, caches, registries) stays there, and if it
ends the process, this one goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import BinaryIO, NoReturn, TypeVar

T = TypeVar("T")
_AT_ONCE = 1 << 20  # bytes that are read from a pipe


class ApartError(RuntimeError):
    """What was done apart has failed: the message has the reason."""


def can_fork() -> bool:
    """Whether this system has forks of a process."""
    return hasattr(os, "fork") and sys.platform != "darwin"  # whose frameworks do not survive one


def done_apart(function: Callable[[], T], *, limit_s: float = 600.0) -> T:
    """What a function returns in a fork of this process, whose only thread is this one.

    Args:
        function: what is done.
        limit_s: seconds after which it is ended.

    Raises:
        ApartError: if it raises, returns what cannot be pickled, ends its process, or is too slow.
    """
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    with warnings.catch_warnings():
        # Threads hold no lock that the child needs: it traces and writes text, in one thread.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        child = os.fork()
    if child == 0:
        os.close(reader)
        _serve(function, writer)
    os.close(writer)
    status = 0
    try:
        with open(reader, "rb") as pipe:
            sent = _received(pipe, limit_s)
    except BaseException:  # too late, or Ctrl-C: nobody waits for the child any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        with contextlib.suppress(ChildProcessError):  # where nobody is told of children's ends
            _, status = os.waitpid(child, 0)
    if not sent:
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        raise ApartError(f"The process ended {how} before it had a result.")
    failed, found = pickle.loads(sent)
    if failed is not None:
        raise ApartError(failed)
    result: T = found
    return result


def _received(pipe: BinaryIO, limit_s: float) -> bytes:
    """All that is sent, until the other end closes."""
    deadline = time.monotonic() + limit_s
    found: list[bytes] = []
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe.fileno(), _AT_ONCE)
        if not part:
            return b"".join(found)
        found.append(part)
    raise ApartError(f"It had no result after {limit_s:.0f} s.")


def _serve(function: Callable[[], object], writer: int) -> NoReturn:
    """The child: send the result, or what went wrong, and end without this process's exit."""
    sent = b""
    warnings.simplefilter("ignore")  # advice to whoever runs there, who does not
    try:
        sent = pickle.dumps((None, function()))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
        sent = pickle.dumps((f"{type(error).__name__}: {error}{where}", None))
    finally:
        with contextlib.suppress(BaseException), open(writer, "wb") as pipe:
            pipe.write(sent)
        os._exit(0)
