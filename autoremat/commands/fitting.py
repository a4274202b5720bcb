"""Tables as wide as the terminal: columns are left out, figures are never cut.

Enters: rows of text, and which columns can be missed. Leaves: a table that is filled; nothing is
printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_LABEL_WIDTH = 14  # of a name that is folded
_AROUND = 3  # of each cell: its padding, and what the box puts beside it


def fill(
    table: Table,
    headings: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    *,
    label: str,
    first_to_go: Sequence[str],
    width: int,
) -> None:
    """Give an empty table as many columns as a width holds.

    Args:
        table: without columns, with a box that draws none of its sides.
        headings: of all columns, left to right.
        rows: cells by heading.
        label: the heading whose cells are names, which may be folded; all others are figures.
        first_to_go: headings that can be missed, the first one most.
        width: of the terminal, in characters.
    """
    widths = {h: max(cell_len(text) for text in (h, *(row[h] for row in rows))) for h in headings}
    widths[label] = min(widths[label], _LABEL_WIDTH)
    kept = _kept(widths, first_to_go, width)
    for heading in kept:
        if heading == label:
            table.add_column(heading, overflow="fold", min_width=widths[label])
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in kept))


def _kept(widths: Mapping[str, int], first_to_go: Sequence[str], width: int) -> list[str]:
    kept = list(widths)
    for heading in first_to_go:
        if sum(widths[h] + _AROUND for h in kept) < width:
            break
        kept.remove(heading)
    return kept
