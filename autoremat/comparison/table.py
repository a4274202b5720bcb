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
from autoremat.units import format_nbytes, format_us

_ALL = ("Peak", "share", "Step", "ratio", "Samples/s", "First step")
_NARROW = {76: ("Peak", "share", "Step", "ratio"), 56: ("Peak", "Step")}


def comparison_table(comparison: Comparison, width: int = 100) -> RenderableType:
    """Peak and time of each variant, and beneath it what is to be said of some.

    Args:
        comparison: what was measured.
        width: of the terminal; a narrow one gets fewer columns.
    """
    headings = next((_NARROW[w] for w in sorted(_NARROW) if width < w), _ALL)
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("Variant", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    yardstick = next((r for r in comparison.rows if r.name == comparison.yardstick), None)
    for row in comparison.rows:
        cells = _cells(row, yardstick)
        table.add_row(escape(row.name), *(cells[heading] for heading in headings))
    notes = [Text(f"{row.name}: {_note(row)}") for row in comparison.rows if _note(row)]
    return Group(Text(_title(comparison)), table, *notes, Text(_caption(comparison, yardstick)))


def _cells(row: Row, yardstick: Row | None) -> dict[str, str]:
    """The row's figures by heading, empty where there is none."""
    whole = yardstick.peak_nbytes if yardstick else None
    peak, step, first = row.peak_nbytes, row.step_seconds, row.first_step_seconds
    ratio, speed = row.time_ratio, row.samples_per_second
    return {
        "Peak": "-" if peak is None else format_nbytes(peak),
        "share": f"{100 * peak / whole:.0f} %" if peak is not None and whole else "",
        "Step": "" if step is None else format_us(1e6 * step),
        "ratio": "" if ratio is None else f"{ratio:.2f}",
        "Samples/s": "" if speed is None else f"{speed:,.1f}",
        "First step": "" if first is None else format_us(1e6 * first),
    }


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
