"""The table of `autoremat verify`.

Enters: the document of `commands.verify`. Leaves: a rich table; nothing is printed.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from autoremat.commands.solve_tables import share
from autoremat.units import format_nbytes


def verify_table(document: dict[str, Any], title: str) -> Table:
    """Errors against the reference, the three peaks, and the verdict with its reasons."""
    table = Table(
        title=escape(title),
        title_justify="left",
        box=box.SIMPLE,
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    budget, worst = document["budget"], document["worst_gradient"]
    against = f"against {document['reference']}"

    table.add_row("Loss error", _error(document["loss_error"]), f"of {document['loss']:.6g}")
    where = f", worst in {worst}" if worst else ""
    table.add_row(
        "Gradient error",
        _error(document["gradient_error"]),
        escape(f"of the largest gradient{where}"),
    )
    table.add_row("Buffer error", _error(document["buffer_error"]), "of the largest buffer")
    table.add_row("  rounding is up to", _error(document["tolerance"]), escape(against))
    table.add_section()
    if budget is not None:
        for name, key in (("Peak predicted", "predicted_peak"), ("Peak measured", "measured_peak")):
            nbytes = document[key]
            table.add_row(name, format_nbytes(nbytes), f"{share(nbytes, budget)} of the budget")
        table.add_row("Budget", format_nbytes(budget), f"{budget} bytes")
    table.add_section()
    failures = document["failures"] or ["same results, within the budget"]
    table.add_row("Verdict", "ok" if document["status"] == "ok" else "NOT ok", escape(failures[0]))
    for failure in failures[1:]:
        table.add_row("", "", escape(failure))
    return table


def _error(error: float) -> str:
    return "0" if error == 0 else f"{error:.2g}"
