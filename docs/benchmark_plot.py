"""Predicted against measured, peaks and step times: `benchmarks.svg` from the rows of a page.

Enters: rows of `benchmarks.json`. Leaves: a picture with a dot for each of our points that ran, and
the line on which predicted equals measured. Guarantees: the same rows give the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from benchmark_page import COMPILERS, OURS, step_times
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from page_tables import MIB, Row, above_resident

mpl.rcParams.update({"svg.hashsalt": "autoremat", "font.size": 9})
COLOURS = {"eager": "#7a8793", "inductor": "#c2410c"}
Dots = list[tuple[float, float]]  # measured, predicted


def draw(rows: Iterable[Row], path: Path) -> None:
    """Write the picture."""
    rows = list(rows)
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    peaks, times = figure.subplots(1, 2)
    for compiler in COMPILERS:
        own = [r for r in rows if r["compiler"] == compiler and r["status"] == "ok"]
        _scatter(peaks, peaks_of(own), compiler)
        _scatter(times, times_of(own), compiler)
    peaks.set(xscale="log", yscale="log")
    for axis in (peaks.xaxis, peaks.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())
    _finish(peaks, "Peak above resident, MiB")
    _finish(times, "Step time over the step without a plan")
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def peaks_of(rows: Sequence[Row]) -> Dots:
    """In MiB, of our points."""
    found = ((r["peak_nbytes"], above_resident(r, "predicted_peak_nbytes")) for r in _ours(rows))
    return [(peak / MIB, foretold / MIB) for peak, foretold in found if peak and foretold]


def times_of(rows: Sequence[Row]) -> Dots:
    """Over the step without a plan of the same model and compiler, of points timed beside it."""
    found = (step_times(r, [p for p in rows if p["model"] == r["model"]]) for r in _ours(rows))
    return [times for times in found if times is not None]


def _ours(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["variant"] == OURS and r.get("peak_nbytes")]


def _scatter(axes: Axes, dots: Dots, compiler: str) -> None:
    label = f'compiler="{compiler}", {len(dots)} points'
    marker = "o" if compiler == "eager" else "^"
    measured, predicted = [dot[0] for dot in dots], [dot[1] for dot in dots]
    axes.scatter(measured, predicted, s=18, marker=marker, c=COLOURS[compiler], label=label)


def _finish(axes: Axes, quantity: str) -> None:
    lows, highs = zip(axes.get_xlim(), axes.get_ylim(), strict=True)
    low, high = min(lows), max(highs)
    axes.plot([low, high], [low, high], lw=0.8, c="#94a3b8", zorder=0)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", title=quantity)
    axes.set(xlabel="measured", ylabel="predicted")
    axes.legend(frameon=False, loc="upper left")
