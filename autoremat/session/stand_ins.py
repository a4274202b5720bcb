"""Other `forward`s of classes, for as long as calls are in progress.

Enters: classes of modules, and what stands in for a `forward`. Leaves: a context in which these
classes have it. Guarantees: outside of such contexts, on whichever thread, the classes are as the
user or torch has them; each `forward` has one stand-in for good, as Dynamo guards their identity.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

Forward = Callable[..., Any]

_own_of: dict[Forward, Forward] = {}  # by what stands in for it, for good


def own_forward(kind: type[nn.Module]) -> Forward:
    """The `forward` of a class, whatever stands in for it."""
    return _own_of.get(kind.forward, kind.forward)


class StandIns:
    """Stand-ins of one sort. Classes are shared by threads, and so is this."""

    def __init__(self, make: Callable[[Forward], Forward]) -> None:
        """None is in place.

        Args:
            make: makes what stands in for a `forward`.
        """
        self._make = functools.cache(make)
        self._in_place: set[type[nn.Module]] = set()
        self._in_progress = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, kinds: Iterable[type[nn.Module]]) -> Iterator[None]:
        """Let them stand in for the `forward` that each of these classes defines itself."""
        self._begin(kinds)
        try:
            yield
        finally:
            self._end()

    def _begin(self, kinds: Iterable[type[nn.Module]]) -> None:
        with self._lock:
            self._in_progress += 1
            for kind in kinds:
                if kind.forward not in _own_of:
                    stand_in = self._make(kind.forward)
                    _own_of[stand_in] = kind.forward
                    kind.forward = stand_in
                self._in_place.add(kind)

    def _end(self) -> None:
        with self._lock:
            self._in_progress -= 1
            if not self._in_progress:
                for kind in self._in_place:
                    kind.forward = own_forward(kind)  # also one that others have put there
                self._in_place.clear()
