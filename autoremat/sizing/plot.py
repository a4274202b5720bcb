"""A fit as a picture and as a page: throughput over size at the budget.

Enters: a `Fit`. Leaves: the text of one SVG, or of one HTML file that holds it, light or dark as
the reader's system is. Guarantees: lines are told apart by their marks as well as by their colours;
a way has a line only where it fits; nothing that comes from a model's name is markup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoremat.axes import Axis, axis_of
from autoremat.markup import template
from autoremat.sizing.model import WAYS, Fit, rate
from autoremat.sizing.text import planned_for
from autoremat.sizing.text import text as in_words
from autoremat.units import format_nbytes, format_us

MARK = "<!-- autoremat fit -->"

_PACKAGE = "autoremat.sizing"

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 64, 56
_KINDS = dict(zip(WAYS, ("autoremat", "compile", "checkpoint", "torch"), strict=True))


@dataclass(frozen=True)
class _Dot:
    """A size in a line."""

    x: float
    y: float
    hint: str


@dataclass(frozen=True)
class _Line:
    """One way to run the step, over the sizes at which it fits."""

    name: str
    kind: str
    dots: tuple[_Dot, ...]

    @property
    def points(self) -> str:
        """As SVG writes them."""
        return " ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in self.dots)


def plot(fit: Fit) -> str:
    """The picture."""
    sizes = [0.0, *(float(point.size) for point in fit.points)]
    rates = [0.0, *(rate(p.size, way) for p in fit.points for way in p.ways.values() if way.fits)]
    x = axis_of(sizes, _LEFT, _WIDTH - _RIGHT)
    y = axis_of(rates, _HEIGHT - _BOTTOM, _TOP)
    marks = {fit.largest.size: "largest", fit.fastest.size: "fastest"}
    if len(marks) == 1:
        marks = {fit.largest.size: "largest and fastest"}
    return template(_PACKAGE, "plot.svg").render(
        mark=MARK,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        title=f"{fit.target}: {fit.unit} per second within {format_nbytes(fit.budget_nbytes)}",
        subtitle=planned_for(fit),
        x_title=fit.over,
        y_title=f"{fit.unit} per second",
        x_ticks=x.ticks(lambda value: f"{value:g}"),
        y_ticks=y.ticks(lambda value: f"{value:g}"),
        lines=list(_lines(fit, x, y)),
        marks=[
            (
                x.pixel(point.size),
                y.pixel(point.per_second),
                f"{marks[point.size]}: {point.size}",
            )
            for point in fit.points
            if point.size in marks
        ],
    )


def page(fit: Fit) -> str:
    """The page."""
    lines = in_words(fit).splitlines()
    end = lines.index("")
    return template(_PACKAGE, "page.html").render(
        mark=MARK,
        title=f"{fit.target}: which {fit.over} fits",
        answer=lines[:end],
        table="\n".join(lines[end + 1 :]),
        picture=plot(fit),
    )


def _lines(fit: Fit, x: Axis, y: Axis) -> Iterator[_Line]:
    for name, kind in _KINDS.items():
        dots = [
            _Dot(
                x.pixel(point.size),
                y.pixel(rate(point.size, way)),
                f"{name} ({way.method}), {fit.over} {point.size}: "
                f"{rate(point.size, way):.1f} per second, "
                f"step {format_us(way.time_us)}, peak {format_nbytes(way.peak_nbytes)}",
            )
            for point in fit.points
            if (way := point.ways.get(name)) is not None and way.fits
        ]
        if dots:
            yield _Line(name, kind, tuple(dots))
