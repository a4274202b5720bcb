"""The timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing read.

Enters: a `Report`. Leaves: Trace Event Format JSON: one process per graph with a track each for
forward, backward and recompute, and a counter of live bytes by kind; where values wait elsewhere
also a track for the copies each way, and a counter of what is on its way. Graphs are laid side by
side in time, in the order of the report.
"""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from autoremat.reporting.model import GraphReport, Report
from autoremat.reporting.timeline import MemoryTimeline, SpanKind, Step

MARK = '{"otherData":{"writer":"autoremat"'
_TRACKS = ("forward", "backward", "recompute")
_COPIES = ("to the host", "back")


def trace(report: Report) -> str:
    """The trace; a report without a timeline gives one without operations."""
    events: list[dict[str, Any]] = []
    begin_us = 0.0
    for process, graph in enumerate(report.graphs):
        if graph.timeline is not None:
            events += _named(process, graph)
            events += _operations(process, graph.timeline, begin_us)
            events += _memory(process, graph.timeline, begin_us)
            events += _copies(process, graph, begin_us)
            begin_us += sum(step.stall_us + step.time_us for step in graph.timeline.steps)
    about = {"writer": "autoremat", "device": report.device, "torch": report.torch_version}
    document = {"otherData": about, "displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _named(process: int, graph: GraphReport) -> list[dict[str, Any]]:
    names = [(0, "process_name", graph.name)]
    tracks = _TRACKS + (_COPIES if graph.waiting and graph.waiting.trips else ())
    names += [(track, "thread_name", name) for track, name in enumerate(tracks)]
    return [
        {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
        for thread, kind, name in names
    ]


def _operations(process: int, timeline: MemoryTimeline, begin_us: float) -> list[dict[str, Any]]:
    starts = _starts(timeline, begin_us)
    return [
        {
            "ph": "X",
            "pid": process,
            "tid": _TRACKS.index(_track(step)),
            "ts": round(start, 3),
            "dur": step.time_us,
            "name": step.op or step.name,
            "cat": _track(step),
            "args": {
                "node": step.name,
                "module": step.module,
                "source": step.source,
                "live bytes": live,
                "workspace bytes": step.workspace_nbytes,
            }
            | ({"waited for a copy us": step.stall_us} if step.stall_us else {}),
        }
        for step, live, start in zip(timeline.steps, timeline.live_nbytes, starts, strict=True)
    ]


def _starts(timeline: MemoryTimeline, begin_us: float) -> list[float]:
    """When each step begins to compute, having waited."""
    ends = accumulate((s.stall_us + s.time_us for s in timeline.steps), initial=begin_us)
    return [end + step.stall_us for end, step in zip(ends, timeline.steps, strict=False)]


def _copies(process: int, graph: GraphReport, begin_us: float) -> list[dict[str, Any]]:
    """The copies of values that wait elsewhere, and a counter of the bytes on their way."""
    trips = graph.waiting.trips if graph.waiting is not None else ()
    ways = [(0, trip, trip.sent_us, trip.gone_us) for trip in trips]
    ways += [(1, trip, trip.returns_us, trip.back_us) for trip in trips]
    events = [
        {
            "ph": "X",
            "pid": process,
            "tid": len(_TRACKS) + way,
            "ts": round(begin_us + begins_us, 3),
            "dur": round(ends_us - begins_us, 3),
            "name": trip.value,
            "cat": "copy",
            "args": {"bytes": trip.nbytes, "read by": trip.read_by},
        }
        for way, trip, begins_us, ends_us in ways
    ]
    flying = dict.fromkeys(_COPIES, 0)
    changes = [(begins_us, way, trip.nbytes) for way, trip, begins_us, _ in ways]
    changes += [(ends_us, way, -trip.nbytes) for way, trip, _, ends_us in ways]
    for at_us, way, nbytes in sorted(changes):  # at one time: what arrives first
        flying[_COPIES[way]] += nbytes
        about = {"ph": "C", "pid": process, "ts": round(begin_us + at_us, 3)}
        events.append({**about, "name": "bytes on their way", "args": dict(flying)})
    return events


def _track(step: Step) -> str:
    if step.is_recompute:
        return "recompute"
    return "backward" if step.is_backward else "forward"


def _memory(process: int, timeline: MemoryTimeline, begin_us: float) -> list[dict[str, Any]]:
    """A counter event at each step's begin: bytes by kind, which the viewer stacks."""
    change = [dict.fromkeys(SpanKind, 0) for _ in range(len(timeline.steps) + 1)]
    for span in timeline.spans:
        change[span.born][span.kind] += span.nbytes
        change[span.last + 1][span.kind] -= span.nbytes
    live = dict.fromkeys(SpanKind, 0)
    events = []
    starts = _starts(timeline, begin_us)
    for step, changed, now in zip(timeline.steps, change[:-1], starts, strict=True):
        live = {kind: live[kind] + changed[kind] for kind in SpanKind}
        sizes = {kind.value: nbytes for kind, nbytes in live.items()}
        sizes |= {"resident": timeline.resident_nbytes, "workspace": step.workspace_nbytes}
        events.append(
            {
                "ph": "C",
                "pid": process,
                "ts": round(now, 3),
                "name": "live bytes",
                "args": dict(sorted(sizes.items())),
            }
        )
    return events
