"""Work that is done in a process of its own, a fork of this one.

Enters: a function without arguments. Leaves: what it returns. Guarantees: whatever it changes in
the process (torch's idea of the devices that are here, caches, registries) stays there, and if it
ends the process, this one goes on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class ApartError(RuntimeError):
    """What was done apart has failed: the message has the reason."""


def can_fork() -> bool:
    """Whether this system has forks of a process."""
    return hasattr(os, "fork") and sys.platform != "darwin"  # whose frameworks do not survive one


def done_apart(function: Callable[[], T]) -> T:
    """What a function returns in a fork of this process, whose only thread is this one.

    Raises:
        ApartError: if it raises, returns what cannot be pickled, or ends its process.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Threads hold no lock that the child needs: it traces and writes text, in one thread.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        child = os.fork()
    if child == 0:
        os.close(reader)
        _serve(function, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            sent = pipe.read()
    except BaseException:  # Ctrl-C: nobody waits for the child any more
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
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
