"""Private names of the profiler: what a step allocates and frees, and when.

Guarantees: importing this imports nothing that compiles; a session of the user's is not disturbed
by what is measured meanwhile, nor sees it, unless it records all threads.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch._C import _autograd
from torch._C._profiler import _ExtraFields_Allocation
from torch.autograd import profiler_legacy
from torch.profiler import ProfilerActivity

__all__ = [
    "MemoryEvent",
    "apart_from_profilers",
    "memory_events",
    "memory_events_of",
    "profiler_is_active",
    "profiler_warms_up",
    "recording_memory",
]

T = TypeVar("T")


def profiler_is_active() -> bool:
    """Whether some torch profiler session is recording; a second one would end it."""
    return _autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def profiler_warms_up() -> bool:
    """Whether one of the user's is about to record, of which torch tells nobody: looked for.

    Another session would end it, and its next step the process.
    """
    warmup = torch.profiler.ProfilerAction.WARMUP
    kind = torch.profiler.profile
    found = (thing for thing in gc.get_objects() if type(thing) is kind)
    return any(getattr(one, "current_action", None) is warmup for one in found)


def apart_from_profilers(run: Callable[[], T]) -> T:
    """What a call returns; while somebody profiles, it is made where that does not record.

    A session records the thread that began it, unless it was told to record all of them.
    """
    if not profiler_is_active():
        return run()
    has_grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_there() -> T:  # what belongs to a thread goes along
        if device is not None:
            torch.cuda.set_device(device)
        with torch.set_grad_enabled(has_grad):
            return run()

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(run_there).result()


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


def memory_events_of(run: Callable[[], object], prefix: str) -> list[MemoryEvent]:
    """What a call allocates and frees, as of `memory_events`, whatever profiler the user has.

    Without addresses, and with what is there before as it is freed: by the profiler that torch had
    before, which records beside the present one. A session of that would end the user's, also one
    that only warms up, and nothing tells of it.
    """
    return apart_from_profilers(lambda: _legacy_events_of(run, prefix))


def _legacy_events_of(run: Callable[[], object], prefix: str) -> list[MemoryEvent]:
    config = profiler_legacy.profile(profile_memory=True).config()
    _autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        threads = _autograd._disable_profiler_legacy()
    return [event for records in threads for event in _legacy_events(records, prefix)]


def _legacy_events(records: Sequence[Any], prefix: str) -> list[MemoryEvent]:
    """Of one thread; its records are in order of time, which their places tell."""
    found: list[MemoryEvent] = []
    began: dict[int, int] = {}  # by the handle of a function, its place among what was found
    for when, record in enumerate(records):
        kind, name = record.kind(), record.name()
        if kind == "memory_alloc" and record.cpu_memory_usage():
            found.append(MemoryEvent("", when, when, record.cpu_memory_usage()))
        elif kind == "push" and name.startswith(prefix):
            began[record.handle()] = len(found)
            found.append(MemoryEvent(name, when, when))
        elif kind == "pop" and record.handle() in began:
            place = began.pop(record.handle())
            found[place] = replace(found[place], end_ns=when)
    return found


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
