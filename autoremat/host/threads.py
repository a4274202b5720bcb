"""Copies between memory and files, by a thread each way beside the one that computes.

Enters: a tensor to copy, and one of its sizes to copy it to, both on the CPU. Leaves: a `Copy`.
Guarantees: copies of one way are made in the order in which they are asked for; one that nobody
waits for holds no memory once it is made.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """One that is under way."""

    made: Future[None]

    def wait(self) -> None:
        """Until it is made."""
        self.made.result()

    finish = wait


def begin(way: str, to: Tensor, source: Tensor) -> Copy:
    """Begin a copy "out" or "in"."""
    return Copy(_engine(way).submit(_copy, [to, source]))


def forget() -> None:
    """In a child of this process there are none of its threads."""
    _engine.cache_clear()


@functools.cache
def _engine(way: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=f"autoremat-{way}")


def _copy(pair: list[Tensor]) -> None:
    """Returns nothing, and holds nothing once it is done: what nobody waits for is not held."""
    source, to = pair.pop(), pair.pop()
    with torch.no_grad():
        to.copy_(source)
