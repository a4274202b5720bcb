"""The tables of `autoremat solve`.

Enters: the documents of `autoremat_solver.plan_document`. Leaves: rich tables; nothing is printed.
"""

from __future__ import annotations

from typing import Any

from autoremat_solver import Problem, Status
from rich import box
from rich.markup import escape
from rich.table import Table

from autoremat.commands.fitting import fill
from autoremat.units import format_nbytes, format_us


def plan_table(document: dict[str, Any], problem: Problem, status: Status) -> Table:
    """One plan: what was asked for, what was found, and what is proven."""
    table = _table(document, problem)
    table.show_header = False
    table.add_column(style="bold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    unit, gap = document["time_unit"], document["gap"]
    base_peak, base_time = document["baseline_peak"], document["baseline_time"]
    of_peak = "of the peak without recompute"

    def size(name: str, nbytes: int, note: str) -> None:
        table.add_row(name, format_nbytes(nbytes), note)

    size("Budget", document["budget"], f"{share(document['budget'], base_peak)} {of_peak}")
    size("Peak", document["peak"], share(document["peak"], base_peak))
    size("  without recompute", base_peak, "")
    size("  proven floor", document["floor"], f"{share(document['floor'], base_peak)}, all budgets")
    table.add_section()
    table.add_row("Time", duration(document["time"], unit), extra(document["time"], base_time))
    table.add_row("  without recompute", duration(base_time, unit), "")
    table.add_row("  proven bound", duration(document["bound"], unit), f"gap {percent(gap)}")
    table.add_section()
    table.add_row("Status", "", f"{status.value}")
    if document["left_out"]:
        table.add_row("Left out", "", ", ".join(document["left_out"]))
    table.add_row("Method", "", escape(document["method"]))
    table.add_row("Solved in", f"{document['seconds']:.1f} s", "")
    return table


def curve_table(document: dict[str, Any], problem: Problem, width: int) -> Table:
    """The plans of a curve, the smallest peak first, in a terminal of some width."""
    table = _table(document, problem)
    base_peak, base_time = document["baseline_peak"], document["baseline_time"]
    rows = [
        {
            "Peak": format_nbytes(point["peak"]),
            "share": share(point["peak"], base_peak),
            "Time": duration(point["time"], document["time_unit"]),
            "extra": extra(point["time"], base_time),
            "gap": percent(point["gap"]),
            "Method": point["method"],
        }
        for point in document["points"]
    ]
    headings = ("Peak", "share", "Time", "extra", "gap", "Method")
    missed = ("share", "Method", "gap")
    fill(table, headings, rows, label="Method", first_to_go=missed, width=width)
    solved, asked = document["budgets_solved"], document["budgets_asked"]
    cut = f" The time limit reached {solved} of {asked} budgets." if solved < asked else ""
    table.caption = (
        f"Shares and extra time are of the baseline without recompute: {format_nbytes(base_peak)}, "
        f"{duration(base_time, document['time_unit'])}. No plan is below "
        f"{format_nbytes(document['floor'])}. Solved in {document['seconds']:.1f} s.{cut}"
    )
    return table


def share(part: float, whole: float) -> str:
    """A percentage with one decimal."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""


def extra(time: float, baseline: float) -> str:
    """The signed change against the baseline."""
    # Adding zero turns -0.0 into 0.0.
    return f"{round(100 * (time / baseline - 1), 2) + 0.0:+.2f} %" if baseline > 0 else ""


def percent(gap: float | None) -> str:
    """A gap; None is an infinite one."""
    return "not bounded" if gap is None else f"{100 * gap:.2f} %"


def duration(time: float, unit: str | None) -> str:
    """A time in words, or the bare number where the file does not state its unit."""
    return format_us(time) if unit == "us" else f"{time:,.8g}"


def _table(document: dict[str, Any], problem: Problem) -> Table:
    title = f"{document['problem']}: {len(problem.ops)} operations, {len(problem.values)} values"
    return Table(title=escape(title), title_justify="left", caption_justify="left", box=box.SIMPLE)
