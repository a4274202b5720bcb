"""What `solver_benchmarks.md` says of random layered graphs.

Enters: the rows of `solver_benchmarks.json`. Leaves: Markdown; empty where there are no rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from page_tables import Row, number, percent, table
from solver_benchmark_cells import count, extra_points, seconds_range, share_text, unsolved

Columns = dict[str, Callable[[Row], str]]

NODES, SEEDS, SHARES = [500, 1000, 2000], 3, [90.0, 80.0, 70.0]
GROWTH_SHARES = [90.0, 80.0]
PUBLISHED = {
    # By the key in `references.md`: extra time in percent by nodes and share.
    "Bartan2023": {(500, 90.0): 0.7, (500, 80.0): 3.4, (1000, 90.0): 0.7, (1000, 80.0): 3.4},
    "Imanishi2023": {(500, 90.0): 0.03, (500, 80.0): 2.3, (1000, 90.0): 0.4, (1000, 80.0): 2.5},
}

TEXT = """\
## Random layered graphs

Graphs without phases by the recipe of Gagrani et al. (`docs/layered_graphs.py`), several for each
number of nodes: the mean of their extra times and the largest, beside what the papers report for
a graph of that size, of the same family but another one, on other machines.

A move that makes a value again looks at ever longer chains of reruns, and takes the best. Before,
the length was drawn at random: 2,000 nodes at 80 % and one graph of 500 at 70 % had no plan.
Chains up to 48 from the start, tried once, found a plan for that graph of 500 sooner, but led to
7.4 in place of 4.3 % for 1,000 nodes at 80 %.

One graph of 2,000 nodes has no plan at 70 %, nor with twice the effort. Whether there is one is not
known: the proven floor, 5 % of the baseline's peak, is far below.
"""

GROWTH_TEXT = """\
### How the effort grows

The same graphs, annealed alone with an effort in proportion to their nodes: million operations
counted up to the first plan within the budget, how many ever better ones came after it, and for
each of these the thousand operations that were counted from then on. The last column divides them
by n log2 n: where it does not grow from one size to the next, the effort per improvement grows no
faster than n log n. How much the first plan takes depends on the graph. One without reruns is the
last.
"""


def layered(rows: Sequence[Row]) -> str:
    """The section on random layered graphs; empty where there are no rows of them."""
    lines = _by_size(rows, "layered")
    if not lines:
        return ""
    columns: Columns = {
        **_first_columns(),
        "solved": lambda r: str(sum(not unsolved(row) for row in r["rows"])),
        "mean": lambda r: _of(r, statistics.mean, extra_points),
        "largest": lambda r: _of(r, max, extra_points),
        "largest gap": lambda r: _of(r, max, lambda row: 100 * row["gap"]),
        "CPU": lambda r: seconds_range(
            [row["cpu_seconds"] for row in r["rows"] if "cpu_seconds" in row]
        ),
    }
    for key, figures in PUBLISHED.items():
        columns[f"[{key}]"] = _reported(figures)
    return "\n".join([TEXT, table(columns, lines), _growth(rows)])


def _growth(rows: Sequence[Row]) -> str:
    lines = [
        {**line, "rows": [row for row in line["rows"] if row["status"] == "ok"]}
        for line in _by_size(rows, "growth")
    ]
    if not lines:
        return "\n".join([GROWTH_TEXT, "Not run: ask for it with `--growth`.\n"])
    columns: Columns = {
        **_first_columns(),
        "first plan": lambda r: _spread(
            [row["first"] / 1e6 for row in r["rows"] if row["first"] is not None]
        ),
        "improvements": lambda r: _spread([row["improvements"] for row in r["rows"]], count),
        "thousand operations each": lambda r: _spread([each / 1e3 for each in _each(r)]),
        "over n log2 n": lambda r: _spread(
            [each / (r["nodes"] * math.log2(r["nodes"])) for each in _each(r)]
        ),
    }
    return "\n".join([GROWTH_TEXT, table(columns, lines)])


def _each(line: Row) -> Iterator[float]:
    """Operations that were counted per improvement, of each graph that had any."""
    for row in line["rows"]:
        if row["improvements"]:
            yield row["operations"] / row["improvements"]


def _by_size(rows: Sequence[Row], section: str) -> list[Row]:
    """A line per number of nodes and budget: the rows of its graphs."""
    groups: dict[tuple[int, float], list[Row]] = {}
    for row in rows:
        if row["section"] == section:
            nodes = int(row["graph"].split("_")[1])
            groups.setdefault((nodes, row["share"]), []).append(row)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], -group[0][1]))
    return [{"nodes": nodes, "share": share, "rows": part} for (nodes, share), part in ordered]


def _first_columns() -> Columns:
    return {
        "nodes": lambda r: f"{r['nodes']:,}",
        "budget": lambda r: share_text(r["share"]),
        "graphs": lambda r: str(len(r["rows"])),
    }


def _of(group: Row, over: Callable[[list[float]], float], figure: Callable[[Row], float]) -> str:
    figures = [figure(row) for row in group["rows"] if not unsolved(row)]
    return percent(over(figures)) if figures else "-"


def _reported(figures: dict[tuple[int, float], float]) -> Callable[[Row], str]:
    return lambda r: percent(figures.get((r["nodes"], r["share"])))


def _spread(figures: Sequence[Any], text: Callable[[Any], str] = number) -> str:
    """The least and the most."""
    if not figures:
        return "-"
    least, most = text(min(figures)), text(max(figures))
    return least if least == most else f"{least} to {most}"
