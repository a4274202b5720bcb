"""What the pages of figures share: tables, verdicts, and how a figure is written.

Enters: rows of plain values. Leaves: Markdown. A figure that is not there is an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
Promise = tuple[str, Sequence[tuple[str, bool | None]]]  # with keys of rows, and who keeps it
MIB = 2**20


def table(columns: Columns, rows: Sequence[Row]) -> str:
    """A table of the rows; columns that are empty in all of them are left out."""
    full = {name: cell for name, cell in columns.items() if any(cell(row) for row in rows)}
    if not full:
        return ""
    return table_of_cells(list(full), ([cell(row) for cell in full.values()] for row in rows))


def table_of_cells(names: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of columns with these names."""
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def verdicts(promises: Iterable[Promise]) -> str:
    """Each promise, whether every row keeps it, and the rows that do not.

    Args:
        promises: for each the keys of the rows that it is about, and whether they keep it.
    """
    return "## What holds\n\n" + table_of_cells(
        ["promise", "rows", "kept", "not kept by"], (_verdict(*promise) for promise in promises)
    )


def _verdict(promise: str, judged: Sequence[tuple[str, bool | None]]) -> list[str]:
    if not judged:
        return [promise, "not run", "", ""]
    bad = [key for key, kept in judged if not kept]
    names = "; ".join(bad[:8]) + (f"; and {len(bad) - 8} more" if len(bad) > 8 else "")
    return [promise, str(len(judged)), str(len(judged) - len(bad)), names]


def versions(run: Row) -> str:
    """Of Python and packages, in one line."""
    return ", ".join(f"{name} {version}" for name, version in run["versions"].items())


def how_made(runs: Iterable[Row]) -> str:
    """Commands and machines of the runs, a line each."""
    return "\n".join(
        f"{run['date']}: `{run['command']}`; {run['cpu']}, {run['cores']} cores, "
        f"{run['memory_gib']} GiB; {versions(run)}."
        for run in runs
    )


def is_done(row: Row) -> bool:
    """Whether a row has its figures."""
    return bool(row["status"] == "ok")


def above_resident(row: Row, field: str) -> int | None:
    """A figure that includes what is resident, less what is resident."""
    if row.get(field) is None or row.get("resident_nbytes") is None:
        return None
    return int(row[field] - row["resident_nbytes"])


def mib(nbytes: float | None) -> str:
    """Bytes in MiB."""
    return "" if nbytes is None else f"{nbytes / MIB:.1f}"


def percent(value: float | None, digits: int = 2) -> str:
    """What is in percent already; never a negative zero."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f} %"


def number(value: float | None) -> str:
    """One digit after the point."""
    return "" if value is None else f"{value:.1f}"
