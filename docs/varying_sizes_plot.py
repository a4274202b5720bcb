"""Peaks over sizes, measured and by formula: `varying_sizes.svg` from the rows of a page.

Enters: rows of `varying_sizes.json`. Leaves: a picture with a dot for each step that was measured,
and a line for the formula of each batch size. Guarantees: the same rows give the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page_tables import MIB, Row

mpl.rcParams.update({"svg.hashsalt": "autoremat", "font.size": 9})
COLOURS = ("#7a8793", "#c2410c")
UNITS = {"sequence": "tokens of the longest", "side": "pixels of a side"}
COLUMNS = 3


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; nothing without rows."""
    if not rows:
        return
    height = -(-len(rows) // COLUMNS)
    figure = Figure(figsize=(10, 3.1 * height), layout="constrained")
    grid = figure.subplots(height, COLUMNS, squeeze=False).flat
    for axes, row in zip(grid, rows, strict=False):
        _model(axes, row)
    for axes in list(grid)[len(rows) :]:
        axes.set_axis_off()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def _model(axes: Axes, row: Row) -> None:
    over = row["over"]
    for colour, (count, line) in zip(COLOURS, row["curves"].items(), strict=False):
        known = [(size, nbytes / MIB) for size, nbytes in line if nbytes is not None]
        if known:
            axes.plot(*zip(*known, strict=True), lw=1, c=colour, label=f"batch of {count}")
        steps = [s for s in row["steps"] if s["batch"] == int(count)]
        measured = [s["measured_nbytes"] / MIB for s in steps]
        axes.scatter([s[over] for s in steps], measured, s=12, c=colour)
    axes.axhline(row["budget_nbytes"] / MIB, lw=0.8, ls="--", c="#94a3b8", label="budget")
    axes.set(title=row["model"], xlabel=UNITS[over], ylabel="MiB", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
