"""The values of a report as CSV, for spreadsheets and data frames.

Enters: a `Report`. Leaves: RFC 4180 text: a header line, then one line per value of the forward,
in the order in which they are made. Sizes are bytes, times microseconds.
"""

from __future__ import annotations

import csv
import io

from autoremat.reporting.model import Report

_COLUMNS = (
    "name",
    "action",
    "recomputes",
    "nbytes",
    "shape",
    "dtype",
    "op",
    "module",
    "source",
    "time_us",
    "avoided_runs",
    "avoided_us",
    "reason",
)
HEADER = ",".join(("graph", *_COLUMNS))


def values_csv(report: Report) -> str:
    """The table; a shape is written "4x256"."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(("graph", *_COLUMNS))
    for graph in report.graphs:
        for value in graph.values:
            cells = {name: getattr(value, name) for name in _COLUMNS}
            cells["shape"] = "x".join(map(str, value.shape))
            writer.writerow((graph.name, *(cells[name] for name in _COLUMNS)))
    return text.getvalue()
