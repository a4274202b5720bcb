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


class StandIns:
    """Stand-ins of one sort. Classes are shared by threads, and so is this."""

    def __init__(self, make: Callable[[Forward], Forward]) -> None:
        """None is in place.

        Args:
            make: makes what stands in for a `forward`.
        """
        self._of = functools.cache(make)
        self._own: dict[type[nn.Module], tuple[Forward, Forward]] = {}  # and what stands in for it
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
                own, stand_in = self._own.get(kind, (None, None))
                if stand_in is None or kind.forward is not stand_in:
                    own = kind.forward
                    self._own[kind] = own, self._of(own)
                    kind.forward = self._of(own)

    def _end(self) -> None:
        with self._lock:
            self._in_progress -= 1
            if self._in_progress:
                return
            for kind, (own, stand_in) in self._own.items():
                if kind.forward is stand_in:  # else somebody has given it another one meanwhile
                    kind.forward = own
            self._own.clear()
