"""Ctrl-C while there is nothing to save.

Enters: nothing. Leaves: within `leaving_at_once`, Ctrl-C ends the process with code 130 and one
sentence. A KeyboardInterrupt would not do: raised while an extension module is imported, it is
lost there and shows up later as another error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
SENTENCE = "Interrupted: nothing was written."
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at Ctrl-C; only for code that leaves no half-written file."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_signal: int, _frame: object) -> None:
    cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{cursor}\n{SENTENCE}\n".encode())
    os._exit(INTERRUPTED)
