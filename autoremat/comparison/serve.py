"""The worker's side of the conversation that `process` describes.

Enters: a function that measures, and returns a row and what times one step. Leaves: JSON lines.
What the user's code and libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], object]


def serve(measure: Callable[[], tuple[dict[str, Any], Callable[[], float] | None]]) -> None:
    """Send the row, then serve timed steps until standard input closes."""
    sink = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        sink.write(json.dumps(message) + "\n")
        sink.flush()

    row, timed = measure()
    send(row)
    if timed is None:
        return
    for line in sys.stdin:
        if line.strip() == "step":
            send({"seconds": timed()})


def seconds(step: Step) -> float:
    """How long one step takes, all that it has started on an accelerator included."""
    _synchronize()
    started = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
