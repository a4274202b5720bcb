"""A row from a process of its own: what the scripts share that run one case after the other.

Enters: a function that makes a row, and its case. Leaves: the row, or one that says how it failed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from row_store import Row

from autoremat.planning.found_before import FoundBefore

GRACE_SECONDS = 2.0  # for an end in good order, once the row is there


def in_own_process(
    row_of: Callable[[Any], Row], case: Any, timeout: float, preloaded: Sequence[str]
) -> Row:
    """A case's row.

    Args:
        row_of: makes it, and is found by its name.
        case: given to it.
        timeout: in seconds.
        preloaded: modules that the server has imported, and run nothing, from which the process is
            forked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(row_of, case, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return dict(receiver.recv())
        return {"status": "timeout", "message": f"no answer within {timeout:.0f} s"}
    except EOFError:
        process.join()
        return {"status": "crash", "message": f"the process ended with {process.exitcode}"}
    finally:
        process.join(GRACE_SECONDS)
        process.kill()
        process.join()


def forget_plans() -> None:
    """Plan in this process as if none had planned before it; measured costs stay known."""
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    path = Path(place.name) / FoundBefore.FILE
    FoundBefore.default_path = classmethod(lambda cls: path)  # type: ignore[method-assign]


def _serve(row_of: Callable[[Any], Row], case: Any, sender: Connection) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        sender.send({"status": "ok", **row_of(case)})
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        sender.send({"status": "crash", "message": message[:300]})
