"""The report as CSV, as a memory snapshot and as a trace: other tools' formats, read back."""

from __future__ import annotations

import csv
import io
import json
import pickle
import pickletools
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autoremat.reporting import Report
from autoremat.reporting.snapshot import snapshot
from autoremat.reporting.trace import trace
from autoremat.reporting.values_csv import HEADER, values_csv
from tests.reporting.report_samples import UNIT_NBYTES, layered_report, waiting_report

REPORT = layered_report()
TIMELINE = REPORT.graphs[0].timeline
EMPTY = replace(REPORT, graphs=())


def test_csv_has_a_line_for_each_value() -> None:
    """Numbers are bare, a shape is one cell."""
    rows = list(csv.DictReader(io.StringIO(values_csv(REPORT))))
    assert len(rows) == len(REPORT.values) == 20
    assert rows[1]["name"] == "x0.1"
    assert rows[1]["action"] == "recompute"
    assert int(rows[1]["nbytes"]) == UNIT_NBYTES
    assert rows[1]["shape"] == "250x1000"
    assert float(rows[1]["time_us"]) == 101.0
    assert values_csv(REPORT).startswith(HEADER + "\r\n")


def test_csv_quotes_what_would_break_a_line() -> None:
    """Commas, quotes and line breaks in a name come back as they were."""
    value = replace(REPORT.values[0], module='a,"b"\nc')
    report = replace(REPORT, graphs=(replace(REPORT.graphs[0], values=(value,)),))
    (row,) = csv.DictReader(io.StringIO(values_csv(report), newline=""))
    assert row["module"] == 'a,"b"\nc'


def test_csv_of_nothing_is_its_header() -> None:
    """A report without a planned graph has no values."""
    assert values_csv(EMPTY) == HEADER + "\r\n"


def replayed(report: Report) -> list[int]:
    """Allocated bytes after each event of the first trace; addresses never overlap meanwhile."""
    data = pickle.loads(snapshot(report))
    begin = data["segments"][0]["address"]
    held = {begin: report.graphs[0].timeline.resident_nbytes}  # type: ignore[union-attr]
    totals = []
    for event in data["device_traces"][0]:
        if event["action"] == "alloc":
            end = event["addr"] + event["size"]
            assert all(a >= end or a + n <= event["addr"] for a, n in held.items())
            held[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert held.pop(event["addr"]) == event["size"]
        totals.append(sum(held.values()))
    return totals


def test_a_snapshot_replays_to_the_peak() -> None:
    """Resident bytes plus all that is allocated reach the predicted peak, and no other."""
    assert TIMELINE is not None
    assert max(replayed(REPORT)) == TIMELINE.peak_nbytes == REPORT.predicted_peak_nbytes


def test_a_snapshot_ends_with_what_the_step_leaves() -> None:
    """Its segment's blocks tile it, and the active ones are the resident bytes and gradients."""
    data = pickle.loads(snapshot(REPORT))
    (segment,) = data["segments"]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    active = [b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"]
    assert sum(active) == replayed(REPORT)[-1] == segment["active_size"]


def test_a_snapshot_uses_only_what_the_viewer_can_unpickle() -> None:
    """Its reader knows protocol 4 and these opcodes [MemoryViz]; other pickles do not load."""
    known = {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
        *("NEWTRUE", "NEWFALSE", "NONE"),
    }
    data = snapshot(REPORT)
    used = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert used <= known
    assert data[1] == 4


def test_torch_reads_a_snapshot() -> None:
    """Its own text view tells each allocation and each free."""
    memory_viz = pytest.importorskip("torch.cuda._memory_viz")
    data = pickle.loads(snapshot(REPORT))
    actions = [event["action"] for event in data["device_traces"][0]]
    text = memory_viz.trace(data)
    assert len(re.findall(r"^\w+ = \w+\[", text, re.M)) == actions.count("alloc") > 0
    assert text.count("# free completed") == actions.count("free_completed") > 0


def test_a_snapshot_of_nothing_is_empty() -> None:
    """No planned graph, no trace."""
    assert pickle.loads(snapshot(EMPTY))["device_traces"] == []


def events(kind: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(trace(REPORT))["traceEvents"] if e["ph"] == kind]


def test_a_trace_has_an_event_for_each_step_on_its_track() -> None:
    """Complete events, one after the other, on tracks for forward, backward and recompute."""
    assert TIMELINE is not None
    found = events("X")
    assert len(found) == len(TIMELINE.steps)
    tracks = {e["args"]["name"]: e["tid"] for e in events("M") if e["name"] == "thread_name"}
    recomputes = [e for e in found if e["tid"] == tracks["recompute"]]
    assert len(recomputes) == sum(step.is_recompute for step in TIMELINE.steps) == 16
    for one, following in pairwise(found):
        assert following["ts"] == pytest.approx(one["ts"] + one["dur"])
    assert found[1]["args"]["module"] == "model.layers.0.block1"


def test_a_trace_counts_the_live_bytes() -> None:
    """The counter's parts add up to the timeline at every step."""
    assert TIMELINE is not None
    totals = [sum(event["args"].values()) for event in events("C")]
    assert totals == list(TIMELINE.live_nbytes)


def test_a_trace_has_a_track_for_the_copies_of_each_way() -> None:
    """As long as the plan has them; while one is under way, its bytes are counted."""
    report = waiting_report()
    found = json.loads(trace(report))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    copies = [e for e in found if e.get("cat") == "copy"]
    assert [(tracks[e["tid"]], e["name"]) for e in copies] == [
        ("to the host", "x0.0"),
        ("back", "x0.0"),
    ]
    assert [e["dur"] for e in copies] == [100.0, 100.0]
    counted = [e["args"] for e in found if e["name"] == "bytes on their way"]
    assert [tuple(args.values()) for args in counted] == [
        (UNIT_NBYTES, 0),
        (0, 0),
        (0, UNIT_NBYTES),
        (0, 0),
    ]
    (last,) = [e for e in found if e["ph"] == "X" and e["args"].get("node") == "b0.0"]
    assert last["ts"] == copies[-1]["ts"] + copies[-1]["dur"]  # it waits for the copy
    assert last["ts"] + last["dur"] == pytest.approx(report.predicted_time_us)


def test_a_trace_without_copies_has_no_track_for_them() -> None:
    """Nor a counter."""
    names = {e["args"]["name"] for e in events("M")}
    assert names == {"graph 0", "forward", "backward", "recompute"}
    assert {e["name"] for e in events("C")} == {"live bytes"}


def test_a_trace_puts_graphs_one_after_the_other() -> None:
    """Each graph is a process; the second begins where the first ends."""
    graph = REPORT.graphs[0]
    both = replace(REPORT, graphs=(graph, replace(graph, name="graph 1")))
    found = [e for e in json.loads(trace(both))["traceEvents"] if e["ph"] == "X"]
    second = next(e for e in found if e["pid"] == 1)
    assert second["ts"] == pytest.approx(sum(e["dur"] for e in found if e["pid"] == 0))
