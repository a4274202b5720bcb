"""The table of a comparison.

Enters: a `Comparison`. Leaves: a rich table; nothing is printed.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autoremat.comparison.model import OK, Comparison, Row
from autoremat.reporting.text import format_nbytes, format_us


def comparison_table(comparison: Comparison) -> RenderableType:
    """Peak and time of each variant, and beneath it what is to be said of some."""
    table = Table(title=escape(_title(comparison)), title_justify="left", box=box.SIMPLE)
    table.add_column("Variant", no_wrap=True)
    for heading in ("Peak", "share", "Step", "ratio", "Samples/s", "First step"):
        table.add_column(heading, justify="right", no_wrap=True)
    yardstick = next((r for r in comparison.rows if r.name == comparison.yardstick), None)
    for row in comparison.rows:
        table.add_row(*_cells(row, yardstick))
    notes = [Text(f"{row.name}: {_note(row)}") for row in comparison.rows if _note(row)]
    return Group(table, *notes, Text(_caption(comparison, yardstick)))


def _cells(row: Row, yardstick: Row | None) -> list[str]:
    name = escape(row.name)
    if row.peak_nbytes is None:
        return [name, row.status]
    whole = yardstick.peak_nbytes if yardstick else None
    step, ratio, speed = row.step_seconds, row.time_ratio, row.samples_per_second
    return [
        name,
        format_nbytes(row.peak_nbytes),
        f"{100 * row.peak_nbytes / whole:.0f} %" if whole else "",
        format_us(1e6 * step) if step is not None else "",
        f"{ratio:.2f}" if ratio is not None else "",
        f"{speed:,.1f}" if speed is not None else "",
        format_us(1e6 * row.first_step_seconds) if row.first_step_seconds is not None else "",
    ]


def _note(row: Row) -> str:
    if row.status == OK:
        return row.message
    return f"{row.status}: {row.message}" if row.message else row.status


def _title(comparison: Comparison) -> str:
    if not comparison.model:
        return comparison.target
    return f"{comparison.target}: {comparison.model}, {comparison.parameters:,} parameters"


def _caption(comparison: Comparison, yardstick: Row | None) -> str:
    sentences = []
    if yardstick and yardstick.resident_nbytes is not None and yardstick.peak_nbytes is not None:
        above = yardstick.peak_nbytes - yardstick.resident_nbytes
        sentences.append(
            f"Peaks hold {format_nbytes(yardstick.resident_nbytes)} of parameters, buffers and "
            f"batch; {yardstick.name} needs {format_nbytes(above)} above them."
        )
        sentences.append(f"Shares and ratios are of {yardstick.name}.")
    if not comparison.is_complete:
        sentences.append("Interrupted: the rest was not measured.")
    return " ".join(sentences)
