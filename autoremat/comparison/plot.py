"""Peak against step time as a picture: one SVG file, which any browser shows.

Enters: a `Comparison`. Leaves: the SVG's text, light or dark as the reader's system is.
Guarantees: every dot is labelled, told apart by its shape as well as by its colour; nothing that
comes from a target's name is markup.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.axes import Axis, axis_of
from autoremat.comparison.model import Comparison, Row
from autoremat.markup import template
from autoremat.units import format_nbytes, format_us

MARK = "<!-- autoremat comparison -->"

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 64, 56
_LETTER, _LINE = 6.6, 14  # of the labels, in pixels


@dataclass(frozen=True)
class _Dot:
    """One variant in the picture."""

    x: float
    y: float
    kind: str
    name: str
    hint: str
    label_x: float = 0.0
    label_y: float = 0.0


def plot(comparison: Comparison) -> str:
    """The picture; without a measured row an empty one that says so."""
    rows = [r for r in comparison.rows if r.peak_nbytes is not None and r.time_ratio is not None]
    x = axis_of([float(row.peak_nbytes or 0) for row in rows], _LEFT, _WIDTH - _RIGHT)
    # The ratio, not the seconds: rounds of a busy machine differ, ratios within them hardly do.
    y = axis_of([row.time_ratio or 0.0 for row in rows], _HEIGHT - _BOTTOM, _TOP)
    dots = _labelled([_dot(row, x, y) for row in rows])
    ours = sorted((dot for dot in dots if dot.kind == "autoremat"), key=lambda dot: dot.x)
    return template("autoremat.comparison", "plot.svg").render(
        mark=MARK,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        title=f"{comparison.model or 'Step'}: peak and time of a training step",
        subtitle=f"{comparison.target}, batch {comparison.batch}, {comparison.device}, "
        f"torch {comparison.torch_version}",
        x_ticks=x.ticks(lambda value: format_nbytes(round(value))),
        y_ticks=y.ticks(lambda value: f"{value:.2f}"),
        y_title=f"step time over {comparison.yardstick or 'eager'}'s",
        dots=dots,
        curve=" ".join(f"{dot.x:.1f},{dot.y:.1f}" for dot in ours),
    )


def _dot(row: Row, x: Axis, y: Axis) -> _Dot:
    peak, ratio = row.peak_nbytes or 0, row.time_ratio or 0.0
    step = format_us(1e6 * (row.step_seconds or 0.0))
    hint = f"{row.name}: peak {format_nbytes(peak)}, step {step}, ratio {ratio:.2f}"
    return _Dot(x.pixel(peak), y.pixel(ratio), row.kind, row.name, hint)


def _labelled(dots: list[_Dot]) -> list[_Dot]:
    """Each label beside its dot where it covers neither a dot nor another label, if it can."""
    boxes = [(dot.x - 6, dot.y - 6, dot.x + 6, dot.y + 6) for dot in dots]
    placed = []
    for dot in dots:
        width = _LETTER * len(dot.name)
        around = [
            (dot.x + dx, dot.y + dy)
            for distance in (0, 1, 2, 3)
            for dx, dy in (
                (10, 4 - distance * _LINE),
                (-10 - width, 4 - distance * _LINE),
                (10, 4 + distance * _LINE),
                (-10 - width, 4 + distance * _LINE),
                (-width / 2, -10 - distance * _LINE),
                (-width / 2, 20 + distance * _LINE),
            )
        ]
        corner = next((c for c in around if _is_free(c, width, boxes)), around[0])
        boxes.append(_box(corner, width))
        placed.append(_Dot(dot.x, dot.y, dot.kind, dot.name, dot.hint, *corner))
    return placed


def _box(corner: tuple[float, float], width: float) -> tuple[float, float, float, float]:
    x, y = corner
    return x, y - _LINE + 3, x + width, y + 3


def _is_free(
    corner: tuple[float, float], width: float, boxes: list[tuple[float, float, float, float]]
) -> bool:
    left, top, right, bottom = _box(corner, width)
    sideways = left >= _LEFT and right <= _WIDTH - 2
    upright = top >= _TOP - 8 and bottom <= _HEIGHT - _BOTTOM + _LINE
    return (sideways and upright) and not any(
        left < x1 and right > x0 and top < y1 and bottom > y0 for x0, y0, x1, y1 in boxes
    )
