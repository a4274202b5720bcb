"""A fit as plain text and as CSV. Enters: a `Fit`. Leaves: text; nothing is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from autoremat.sizing.model import WAYS, Fit, FitPoint, Way, rate
from autoremat.units import format_nbytes, format_us

HEADER = "size,way,peak_nbytes,time_us,per_second,recompute_share,fits"
_WIDTH = 100


def text(fit: Fit) -> str:
    """The answer first, then what it rests on, then a row for each size."""
    facts = [
        *_answers(fit),
        *textwrap.wrap(margin(fit), _WIDTH),
        *(line for one in _accumulation(fit) for line in textwrap.wrap(one, _WIDTH)),
        *(line for one in _formula(fit) for line in textwrap.wrap(one, _WIDTH)),
        *(line for note in fit.notes for line in textwrap.wrap(note, _WIDTH)),
    ]
    return "\n".join([*facts, "", *_table(fit), "", planned_for(fit)])


def csv(fit: Fit) -> str:
    """A row for each size and way to run it."""
    rows = [
        f"{point.size},{name},{way.peak_nbytes},{way.time_us:.3f},{rate(point.size, way):.6g},"
        f"{way.recompute_share:.6f},{str(way.fits).lower()}"
        for point in fit.points
        for name, way in point.ways.items()
    ]
    return "\n".join([HEADER, *rows]) + "\n"


def _answers(fit: Fit) -> Iterator[str]:
    largest, fastest = fit.largest, fit.fastest
    what, unit = fit.over, fit.unit
    yield f"{fit.target}: the largest {what} is {largest.size}, {_speed(fit, largest)}"
    if fastest.size == largest.size:
        yield f"It is the fastest of {len(fit.points)} sizes as well."
    else:
        faster = 100 * (fastest.per_second / largest.per_second - 1)
        yield (
            f"The fastest of {len(fit.points)} sizes is {fastest.size}, {_speed(fit, fastest)}, "
            f"{faster:.1f} % more {unit} per second"
        )


def _speed(fit: Fit, point: FitPoint) -> str:
    share = 100 * point.plan.recompute_share
    return (
        f"{_rate(point.per_second)} {fit.unit} per second, peak "
        f"{format_nbytes(point.plan.peak_nbytes)}, {share:.1f} % of the time recompute"
    )


def margin(fit: Fit) -> str:
    """What is left of the budget, and what is known of larger sizes."""
    nbytes, budget = fit.margin_nbytes, fit.budget_nbytes
    left = f"{format_nbytes(nbytes)} ({100 * nbytes / budget:.1f} %)"
    kept = f", {format_nbytes(fit.reserve_nbytes)} of it kept free" if fit.reserve_nbytes else ""
    sentence = f"Margin: the largest leaves {left} of the budget {format_nbytes(budget)}{kept}."
    above = [one for one in fit.refused if one.size > fit.largest.size]
    if above and above[0].smallest_peak_nbytes is not None:
        need = format_nbytes(above[0].smallest_peak_nbytes)
        sentence += f" {fit.over.capitalize()} {above[0].size} would need {need}."
    return sentence


def _formula(fit: Fit) -> Iterator[str]:
    if fit.formula is not None:
        yield (
            f"By the plan of the largest, the peak is {fit.formula.text()}; {fit.formula.legend()}."
        )


def _accumulation(fit: Fit) -> Iterator[str]:
    found = fit.accumulation
    if found is None:
        return
    whole = (found.steps - 1) * found.size + found.last
    if found.steps == 1:
        yield f"A global batch of {whole} fits at once."
        return
    last = "" if found.last == found.size else f", the last one of {found.last}"
    yield (
        f"A global batch of {whole}: {found.steps} x {found.size}{last}, "
        f"{format_us(found.time_us)} in all, peak {format_nbytes(found.plan.peak_nbytes)} beside "
        "the gradients of those before."
    )


def _table(fit: Fit) -> Iterator[str]:
    """Sizes down, ways across; what does not fit has its peak alone."""
    known = {name for point in fit.points for name in _others(point)}
    others = [name for name in WAYS if name in known]
    head = [fit.over, "peak", "step", f"{fit.unit}/s", "recompute", *others]
    rows = [head, *(_row(point, others) for point in fit.points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    marks = ["", *(_mark(fit, point) for point in fit.points)]
    for row, mark in zip(rows, marks, strict=True):
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  ".join(cells) + mark).rstrip()


def _others(point: FitPoint) -> dict[str, Way]:
    """Ways to run the step beside ours."""
    return {name: way for name, way in point.ways.items() if name != WAYS[0]}


def _mark(fit: Fit, point: FitPoint) -> str:
    """Behind the row of an answer."""
    answers = {"largest": fit.largest, "fastest": fit.fastest}
    words = [word for word, answer in answers.items() if answer.size == point.size]
    return f"  <- {', '.join(words)}" if words else ""


def _row(point: FitPoint, names: Sequence[str]) -> list[str]:
    plan = point.plan
    others: list[str] = []
    for name in names:
        if (way := _others(point).get(name)) is None:
            others.append("")
        elif way.fits:
            others.append(f"{_rate(rate(point.size, way))}/s")
        else:
            others.append(f"{format_nbytes(way.peak_nbytes)}: too much")
    return [
        str(point.size),
        format_nbytes(plan.peak_nbytes),
        format_us(plan.time_us),
        _rate(point.per_second),
        f"{100 * plan.recompute_share:.1f} %",
        *others,
    ]


def planned_for(fit: Fit) -> str:
    """What the figures are of."""
    optimizer = fit.optimizer or "no optimizer, whose state would count"
    parts: Iterable[str] = (fit.device, fit.compiler, optimizer, f"{fit.seconds:.0f} s")
    return f"Planned, not run: {', '.join(filter(None, parts))}"


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 1000 else f"{per_second:.0f}"
