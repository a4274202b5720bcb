"""Python's stack: the user's line in it, and room for deep calls.

Enters: a warning to be given, or a function that calls deep. Leaves: the `stacklevel` at which the
warning names the user's line; the same function, called with room below it.

CPython keeps the frames of Python functions in chunks of 16 KiB. A function that is called again
and again where a chunk ends maps and unmaps a chunk each time: planning a Llama of 7 billion
parameters did so 1.9 million times, half of its processor time. A frame that is larger than a chunk
gets a larger one, and what that leaves over holds the frames inside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Of 8 bytes each: just over half a chunk of 1 MiB, whose other half serves about a thousand calls.
_SLOTS = (1 << 16) + 1024

# Whose frames are not the user's: ours, and those through which we are called.
_BETWEEN = frozenset({"autoremat", "contextlib", "torch"})


def users_level() -> int:
    """The `stacklevel` by which a warning that the caller gives names the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level


def with_stack_room(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; what it calls does not cross the ends of small chunks."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        return _roomy(function, *args, **keywords)

    return call


def _roomy(function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    return function(*args, **keywords)


_roomy.__code__ = _roomy.__code__.replace(co_stacksize=_SLOTS)
