"""What the pages of published figures share: layers that are alike, and the table in a page.

Enters: a figure by numbers of layers; a page with a table. Leaves: the figure of all layers; the
page with another table in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

_FEW, _MORE = 2, 4


def of_all_layers(figure: Callable[[int], float], layers: int) -> float:
    """Of a model of equal layers, from that of two and of four: the rest is taken to be linear."""
    few, more = figure(_FEW), figure(_MORE)
    return few + (layers - _FEW) * (more - few) / (_MORE - _FEW)


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """Lines in Markdown."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *map(line, rows)]


def line(cells: list[str]) -> str:
    """A row of it."""
    return f"| {' | '.join(cells)} |"


def rewrite(page: Path, text: str, last: str) -> None:
    """Put this in the place of all from the page's table to the last line that ends so."""
    written = page.read_text()
    start, end = written.partition("| model |")[0], written.rpartition(last)[2]
    page.write_text(start + text + end)


def arguments(about: str | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="part of a model's name: printed, not written")
    parser.add_argument("--whole", action="store_true", help="all layers beside two and four")
    return parser.parse_args()
