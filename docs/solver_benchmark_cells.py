"""How the figures of one solve are written in a cell of `solver_benchmarks.md`.

Enters: a row. Leaves: text; empty where the row has no such figure. Extra time is in percent of the
baseline's; bytes leave out what is resident.
"""

from __future__ import annotations

from collections.abc import Sequence

from page_tables import Row, above_resident, percent


def impossible(row: Row) -> bool:
    """Whether the budget is below the proven smallest peak."""
    return bool(row.get("budget_nbytes", row["floor_nbytes"]) < row["floor_nbytes"])


def unsolved(row: Row) -> bool:
    """Whether there is no plan within the budget."""
    return row["status"] != "ok" or row.get("outcome") == "INFEASIBLE"


def outcome(row: Row) -> str:
    """How the solve ended."""
    if row["status"] != "ok":
        return failure(row)
    proven = ", proven" if row["outcome"] == "INFEASIBLE" and impossible(row) else ""
    return str(row["outcome"]).lower().replace("_", " ") + proven


def failure(row: Row) -> str:
    """Why there is no figure."""
    return f"{row['status']}: {row.get('message', '')}".replace("|", "/")


def extra_points(row: Row, field: str = "time_us") -> float:
    """A time over the baseline's, in percent of the baseline's."""
    return float(100 * (row[field] / row["baseline_us"] - 1))


def extra(row: Row, field: str = "time_us") -> str:
    """The same in words."""
    return "" if row.get(field) is None else percent(extra_points(row, field))


def extra_or_dash(row: Row | None) -> str:
    """The extra time of a plan, or a dash where none fits."""
    if row is None:
        return ""
    if row["status"] in ("crash", "timeout"):
        return str(row["status"])
    return "-" if unsolved(row) else extra(row)


def gap(row: Row) -> str:
    """What the plan's time is at most above the least."""
    return "" if unsolved(row) else percent(100 * row["gap"])


def peak_points(row: Row) -> float:
    """The peak in percent of the baseline's."""
    above = row["baseline_peak_nbytes"] - row["resident_nbytes"]
    return float(100 * (row["peak_nbytes"] - row["resident_nbytes"]) / above)


def ratio(row: Row, field: str, other: str) -> str:
    """One figure over another in percent, resident bytes left out of both."""
    above, other_above = above_resident(row, field), above_resident(row, other)
    return percent(100 * above / other_above, 1) if above is not None and other_above else ""


def share_name(share: float | None) -> str:
    """A budget as the command line writes it."""
    return "floor" if share is None else f"{share:g}"


def share_text(share: float | None) -> str:
    """A budget as the page writes it."""
    return "floor" if share is None else f"{share:g} %"


def count(value: int | None) -> str:
    """A number with its thousands apart."""
    return "" if value is None else f"{value:,}"


def seconds_range(seconds: Sequence[float]) -> str:
    """The least and the most seconds."""
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if seconds else ""
