"""Private names of the profiler: what a step allocates and frees, and when.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch._C import _autograd
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity

__all__ = [
    "MemoryEvent",
    "memory_events",
    "profiler_is_active",
    "recording_memory",
]


def profiler_is_active() -> bool:
    """Whether some torch profiler session is recording; a second one would end it."""
    return _autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


@contextmanager
def recording_memory() -> Iterator[torch.profiler.profile]:
    """A session of the profiler that records what is allocated and freed on the CPU.

    Torch 2.13 tells the terminal of the start and end of every session, 2.11 that there is no GPU.
    The profiler reads how much it shall say when the process first uses it: nothing, unless the
    user has set `KINETO_LOG_LEVEL`.
    """
    silenced = "KINETO_LOG_LEVEL" not in os.environ
    if silenced:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # 2.11 warns of the events of earlier cycles; there are none
        ) as session:
            yield session
    finally:
        if silenced:
            os.environ.pop("KINETO_LOG_LEVEL", None)


@dataclass(frozen=True)
class MemoryEvent:
    """What a session of the profiler has recorded: memory on the CPU, or the span of a function.

    Attributes:
        name: of the function; "" of memory.
        start_ns: when it happened or began.
        end_ns: when it ended.
        nbytes: allocated, or less than 0 where freed; 0 where memory from before the session is
            freed, for which the profiler may tell the size of what once was at its address.
        address: of the memory.
    """

    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    address: int = 0


def memory_events(session: torch.profiler.profile, prefix: str) -> list[MemoryEvent]:
    """What a finished session has recorded, in order of time.

    Args:
        session: it recorded memory.
        prefix: of the names of the functions that are asked for.
    """
    inner = session.profiler
    if inner is None or inner.kineto_results is None:
        return []
    found, rest = [], inner.kineto_results.experimental_event_tree()[::-1]
    while rest:
        node = rest.pop()
        rest.extend(reversed(node.children))
        what = node.extra_fields
        if not isinstance(what, _ExtraFields_Allocation):
            if node.name.startswith(prefix):
                found.append(MemoryEvent(node.name, node.start_time_ns, node.end_time_ns))
        elif what.device.type == "cpu":
            when = node.start_time_ns
            found.append(MemoryEvent("", when, when, what.alloc_size, what.ptr))
    found.sort(key=lambda event: event.start_ns)
    return list(_completed(found))


def _completed(events: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
    """The events, with what they leave unsaid.

    Memory that another thread than the step's has freed, as those of process groups do, is freed
    when its address is used again.
    """
    live: dict[int, int] = {}
    for event in events:
        before_nbytes = 0 if event.name else live.pop(event.address, 0)
        if event.name:
            yield event
        elif event.nbytes < 0:
            yield replace(event, nbytes=-before_nbytes)
        else:
            live[event.address] = event.nbytes
            if before_nbytes:
                yield replace(event, nbytes=-before_nbytes)
            yield event
