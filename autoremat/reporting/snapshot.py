"""The timeline as a memory snapshot that https://pytorch.org/memory_viz draws.

Enters: a `Report`. Leaves: a pickle of plain dicts, lists, integers and texts, as
`torch.cuda.memory._dump_snapshot` writes them [MemoryViz]: the plan's allocations and frees, in
the order in which the step makes them, one trace per graph. Guarantees: replayed from what is
resident, the events reach the timeline's peak and never another.

Addresses are made up: each instance goes to the lowest gap that takes it. They say nothing of the
real allocator's fragmentation.
"""

from __future__ import annotations

import pickle
from bisect import insort
from typing import Any

from autoremat.reporting.model import Report
from autoremat.reporting.timeline import MemoryTimeline, Span

MARK = b"autoremat"
_BASE = 0x7F00_0000_0000
_PROTOCOL = 4  # the viewer reads no later one

_Event = dict[str, Any]


class _Addresses:
    """Gaps of an address space, the lowest first."""

    def __init__(self, begin: int) -> None:
        self.end = begin
        self._gaps: list[tuple[int, int]] = []  # address, size

    def take(self, nbytes: int) -> int:
        """The lowest gap of this size; what is beyond the end is one, too."""
        for index, (address, size) in enumerate(self._gaps):
            if size >= nbytes:
                rest = [(address + nbytes, size - nbytes)] if size > nbytes else []
                self._gaps[index : index + 1] = rest
                return address
        address = self.end
        if self._gaps and sum(self._gaps[-1]) == self.end:
            address, _ = self._gaps.pop()
        self.end = address + nbytes
        return address

    def give(self, address: int, nbytes: int) -> None:
        """Hand a range back; it joins the gaps that it touches."""
        insort(self._gaps, (address, nbytes))
        index = self._gaps.index((address, nbytes))
        for left in (index, index - 1):
            if 0 <= left < len(self._gaps) - 1 and sum(self._gaps[left]) == self._gaps[left + 1][0]:
                size = self._gaps[left][1] + self._gaps[left + 1][1]
                self._gaps[left : left + 2] = [(self._gaps[left][0], size)]


def snapshot(report: Report) -> bytes:
    """The snapshot; each graph of the report is a device of its own in it."""
    timelines = [graph.timeline for graph in report.graphs if graph.timeline is not None]
    traces, segments = [], []
    for device, timeline in enumerate(timelines):
        events, segment = _played(timeline, device)
        traces.append(events)
        segments.append(segment)
    document = {"writer": "autoremat", "segments": segments, "device_traces": traces}
    return pickle.dumps(document, protocol=_PROTOCOL)


def _played(timeline: MemoryTimeline, device: int) -> tuple[list[_Event], dict[str, Any]]:
    """The events of the step, and what is allocated after it."""
    born: list[list[Span]] = [[] for _ in timeline.steps]
    ends: list[list[Span]] = [[] for _ in timeline.steps]
    for span in timeline.spans:
        born[span.born].append(span)
        if span.last < len(timeline.steps) - 1:
            ends[span.last].append(span)
    addresses = _Addresses(_BASE + timeline.resident_nbytes)
    # Equal spans are interchangeable: which of their addresses is freed first does not matter.
    held: dict[Span, list[int]] = {}
    events: list[_Event] = []
    now_us = 0.0
    for index, step in enumerate(timeline.steps):
        now_us += step.stall_us
        at = {"stream": 0, "time_us": round(now_us)}
        place = [_frame(step.source, f"{step.name} ({step.op}) {step.module}")]
        for span in born[index]:
            address = addresses.take(span.nbytes)
            held.setdefault(span, []).append(address)
            note = [_frame(step.source, f"{span.value} [{span.kind.value}] {step.module}")]
            events.append(_event("alloc", address, span.nbytes, note, at))
        if step.workspace_nbytes:
            address = addresses.take(step.workspace_nbytes)
            events.append(_event("alloc", address, step.workspace_nbytes, place, at))
            events += _freed(address, step.workspace_nbytes, place, at)
            addresses.give(address, step.workspace_nbytes)
        for span in ends[index]:
            address = held[span].pop()
            events += _freed(address, span.nbytes, place, at)
            addresses.give(address, span.nbytes)
        now_us += step.time_us
    left = {a: span for span, found in held.items() for a in found}
    return events, _segment(timeline, device, left, addresses.end)


def _frame(source: str, name: str) -> dict[str, Any]:
    path, _, line = source.rpartition(":")
    return {"filename": path or source, "line": int(line) if line.isdecimal() else 0, "name": name}


def _event(
    action: str, address: int, nbytes: int, frames: list[dict[str, Any]], at: dict[str, int]
) -> _Event:
    return {"action": action, "addr": address, "size": nbytes, "frames": frames, **at}


def _freed(
    address: int, nbytes: int, frames: list[dict[str, Any]], at: dict[str, int]
) -> list[_Event]:
    steps = ("free_requested", "free_completed")
    return [_event(action, address, nbytes, frames, at) for action in steps]


def _segment(
    timeline: MemoryTimeline, device: int, left: dict[int, Span], end: int
) -> dict[str, Any]:
    """One segment with the blocks that are there after the step, gaps included."""
    blocks: list[dict[str, Any]] = []
    at = _BASE
    taken = {_BASE: (timeline.resident_nbytes, "resident")} if timeline.resident_nbytes else {}
    taken |= {address: (span.nbytes, span.value) for address, span in left.items()}
    for address, (nbytes, name) in sorted(taken.items()):
        if address > at:
            blocks.append(_block(at, address - at, "inactive", []))
        blocks.append(_block(address, nbytes, "active_allocated", [_frame("", name)]))
        at = address + nbytes
    if end > at:
        blocks.append(_block(at, end - at, "inactive", []))
    active = sum(nbytes for nbytes, _ in taken.values())
    return {
        "device": device,
        "address": _BASE,
        "total_size": end - _BASE,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": [0, 0],
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, nbytes: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }
