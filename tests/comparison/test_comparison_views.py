"""The table and the plot of a comparison."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from autoremat.comparison import Comparison, Row


def rows_of(*names: str) -> Comparison:
    """Rows on a diagonal."""
    rows = tuple(
        Row(
            name,
            "autoremat" if "autoremat" in name else "checkpoint",
            "eager",
            "ok",
            peak_nbytes=10_000_000 * (number + 1),
            resident_nbytes=1_000_000,
            step_seconds=0.5 - 0.01 * number,
            time_ratio=1.0 - 0.1 * number,
        )
        for number, name in enumerate(names)
    )
    return Comparison(
        "<b>model.py</b>:make",
        "GPT",
        12,
        4,
        "cpu",
        "2.13",
        names[0] if names else "",
        True,
        1.0,
        rows,
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    """A narrow one gets fewer columns, not clipped figures."""
    text = rows_of("eager", "selective-attention", "autoremat smallest").table(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "10.0 MB" in text
    assert "480.0 ms" in text
    assert ("Samples/s" in text) == (width >= 80)


def test_the_plot_is_sound_svg_with_a_dot_for_each_row() -> None:
    """Ours are joined; every dot is named; a name is text, whatever is in it."""
    text = rows_of("eager", "sqrt", "autoremat 50%", "autoremat <i>25%</i>").to_svg()
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    labels = [element.text or "" for element in root.iter(f"{space}text")]
    assert {"eager", "sqrt", "autoremat 50%", "autoremat <i>25%</i>"} <= set(labels)
    assert len(list(root.iter(f"{space}g"))) == 4
    (curve,) = root.iter(f"{space}polyline")
    assert len((curve.get("points") or "").split()) == 2
    assert not list(root.iter(f"{space}b"))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_labels_of_a_crowd_do_not_cover_each_other() -> None:
    """Five variants of one peak and time."""
    crowd = rows_of(*(f"variant {i}" for i in range(5)))
    same = replace(
        crowd, rows=tuple(replace(r, peak_nbytes=10**6, time_ratio=1.0) for r in crowd.rows)
    )
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">variant', same.to_svg())
    places = [(float(x), float(y)) for x, y in found]
    assert len(places) == 5
    for i, (x, y) in enumerate(places):
        for x2, y2 in places[:i]:
            assert abs(y - y2) >= 14 or abs(x - x2) >= 6.6 * len("variant 0")


def test_a_plot_without_a_measured_row_says_so() -> None:
    """It is a picture all the same."""
    text = rows_of().to_svg()
    ElementTree.fromstring(text)
    assert "No step was measured" in text
