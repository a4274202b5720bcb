"""The peak over sizes that vary, as pictures of a report's page.

Enters: a report. Leaves: for each size that varies a `SizeCurve`, in pixels, for the page's
template. Guarantees: what is drawn is the formula, at sizes at which it holds; the other sizes are
the largest, or follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoremat.axes import Axis, axis_of
from autoremat.reporting.formula import PeakFormula, SizeSymbol
from autoremat.reporting.model import Report
from autoremat.units import format_nbytes

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 46
_LINES = 4  # plans that are drawn


@dataclass(frozen=True)
class SizeLine:
    """One plan's peak, in pixels.

    Attributes:
        name: of the plan.
        points: as SVG writes them.
        is_smaller: whether the plan is for a part of the range.
    """

    name: str
    points: str
    is_smaller: bool


@dataclass(frozen=True)
class SizeCurve:
    """A picture: peaks over one size.

    Attributes:
        name: of the size.
        others: what the other sizes are meanwhile; "" if there are none.
        lines: plans, that for the largest sizes first.
        x_ticks: pixels and labels.
        y_ticks: likewise.
        budget: the pixel of the budget.
    """

    name: str
    others: str
    lines: tuple[SizeLine, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    budget: float


def size_curves(report: Report) -> list[SizeCurve]:
    """One for each size that varies by itself; none without a formula."""
    formula = report.peak_formula
    if formula is None:
        return []
    rows = [(s, formula.row(s.name)) for s in formula.symbols if not s.follows]
    return [_curve(report, formula, s, row) for s, row in rows if row[0] != row[-1]]


def _curve(
    report: Report, formula: PeakFormula, symbol: SizeSymbol, row: list[tuple[int, int]]
) -> SizeCurve:
    smaller = [
        one.row(symbol.name)
        for one in report.smaller_formulas
        if _holds_beside(one, formula, symbol)
    ]
    rows = [("", row), *((f"plan for up to {one[-1][0]}", one) for one in smaller)]
    rows = rows[:_LINES]
    sizes = [float(size) for _, row in rows for size, _ in row]
    peaks = [float(nbytes) for _, row in rows for _, nbytes in row]
    x = Axis(0.0, max(sizes) * 1.02, LEFT, WIDTH - RIGHT)
    y = axis_of([0.0, *peaks, float(report.budget_nbytes)], HEIGHT - BOTTOM, TOP)
    return SizeCurve(
        symbol.name,
        ", ".join(_others(formula, symbol)),
        tuple(SizeLine(name, _points(row, x, y), bool(name)) for name, row in rows),
        tuple(x.ticks(lambda size: f"{size:g}")),
        tuple(y.ticks(lambda nbytes: format_nbytes(int(nbytes)))),
        y.pixel(report.budget_nbytes),
    )


def _points(row: list[tuple[int, int]], x: Axis, y: Axis) -> str:
    return " ".join(f"{x.pixel(size):.1f},{y.pixel(nbytes):.1f}" for size, nbytes in row)


def _others(formula: PeakFormula, symbol: SizeSymbol) -> Iterator[str]:
    for one in formula.symbols:
        if one is not symbol and not one.follows:
            yield f"{one.name} {one.planned}"


def _holds_beside(smaller: PeakFormula, formula: PeakFormula, symbol: SizeSymbol) -> bool:
    """Whether a plan for a part of the range is one for the largest of all other sizes."""
    reached = {one.name: one.planned for one in smaller.symbols}
    others = [s for s in formula.symbols if symbol.name not in (s.name, s.follows)]
    return symbol.name in reached and all(reached.get(s.name, 0) >= s.planned for s in others)
