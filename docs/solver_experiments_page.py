"""What `solver_benchmarks.md` says of the solver itself: its stages, its effort, its repeatability.

Enters: the rows of `solver_benchmarks.json`. Leaves: Markdown; a section says so where it was not
run. The stages are the solver's own list, so none can be missing here.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

from autoremat_solver.search.stages import STAGES
from page_tables import Row, number, percent, table
from solver_benchmark_cells import (
    extra_or_dash,
    extra_points,
    impossible,
    peak_points,
    seconds_range,
    share_name,
    share_text,
    unsolved,
)

Columns = dict[str, Callable[[Row], str]]
Point = tuple[str, float | None]

BEFORE_S = 10.0  # the time limit that the page of the earlier solver was made with
WORSE = 0.2  # points by which a plan may be worse than the earlier solver's

LEFT_OUT_SHARES: list[float | None] = [50.0, 25.0, None]
NOISE = 0.05  # points below which two plans count as equally good

EFFORTS = [0.1, 0.25, 0.5, 1.0, 2.0, 4.0]
EFFORT_GRAPHS = ["gpt2_12", "llama_32", "bert_12", "resnet_50", "t5_6_6"]
EFFORT_SHARES = [50.0, 25.0]

REPEATED: list[Point] = [
    ("gpt2_12", 25.0),
    ("resnet_50", 25.0),
    ("bert_12", None),
    ("unet", 50.0),
    ("t5_6_6", 35.0),
]
CONDITIONS = {
    "idle": "alone on the machine",
    "under load": "two other processes per processor",
    "one processor": "bound to one processor",
    "four threads": "four threads for numerical libraries",
    "two at once": "two solves at the same time",
}

BEFORE_TEXT = f"""\
## Before

The solver of an earlier commit (`--before`), which divided {BEFORE_S:g} seconds of wall-clock
time among its stages: its extra time and gap, then this solver's; at the floor each has its own
peak, in percent of the baseline's.
"""

LEFT_OUT_TEXT = f"""\
## Leave one out

What each stage of `autoremat_solver.search.stages` is worth: everything else runs, with the same
effort, so nothing else takes over the time of the stage that is left out. Extra time, and in
brackets the difference in points to the whole solver: above 0 the stage is missed, below 0 it
hurts. At the floor the peak is in percent of the baseline's, and the smaller peak is the better
plan, whatever it takes. **Saved** is the processor's time at the three budgets together.
Differences up to {NOISE:g} points count for neither side. An empty cell: the stage does not run
there, or no plan can exist.
"""

EFFORT_TEXT = """\
## Effort and quality

Extra time, and the processor's seconds in brackets, where every stage may count up to so many times
its effort (`Solver(problem, effort=...)`).
"""

REPEATS_TEXT = f"""\
## One problem, one plan

Solves of the same problem in processes of their own, each with its own seed of Python's hashes. A
plan is told by a digest of its steps, byte for byte.

{chr(10).join(f"- **{name}**: {what}" for name, what in CONDITIONS.items())}
"""


@dataclass(frozen=True)
class Difference:
    """A plan without a stage, beside the whole solver's.

    Attributes:
        points: by how much it is worse; below 0 it is better.
        text: for a cell.
        peak: for a cell; empty but at the floor.
    """

    points: float
    text: str
    peak: str = ""


def before(rows: Sequence[Row], graphs: Sequence[str]) -> str:
    """The section that holds an earlier solver against this one; empty without rows of it."""
    earlier, now = _by_point(rows, "before"), _by_point(rows, "solve")
    points = [point for point in earlier if point in now]
    if not points:
        return ""
    shares = sorted({share for _, share in points if share is not None}, reverse=True)
    columns: Columns = {"graph": lambda r: str(r["graph"])}
    for share in (*shares, None):
        columns[share_text(share)] = _beside(earlier, now, share)
    present = [{"graph": g} for g in graphs if any(point[0] == g for point in points)]
    return "\n".join([BEFORE_TEXT, table(columns, present), _gains(earlier, now, (*shares, None))])


def no_worse(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Where both solvers have a plan, whether this one's is as good, but for next to nothing.

    At the floor a lower peak is better, whatever it takes.
    """
    now = {**_by_point(rows, "solve"), **_by_point(rows, "published")}
    return [
        (str(row["key"]), _no_worse(now[point], row))
        for point, row in _by_point(rows, "before").items()
        if point in now and not unsolved(row)
    ]


def _no_worse(row: Row, earlier: Row) -> bool:
    if unsolved(row):
        return False
    if row["share"] is None and peak_points(row) < peak_points(earlier) - NOISE:
        return True
    slower = extra_points(row) - extra_points(earlier)
    wider = 100 * (row["gap"] - earlier["gap"])
    return slower <= WORSE and wider <= WORSE


def in_short(row: Row | None) -> str:
    """Extra time and gap, and at the floor the peak, too."""
    if row is None or unsolved(row):
        return extra_or_dash(row)
    peak = f" at {percent(peak_points(row), 1)}" if row["share"] is None else ""
    return f"{extra_or_dash(row)} ({percent(100 * row['gap'])}){peak}"


def left_out(rows: Sequence[Row], graphs: Sequence[str]) -> str:
    """The section on leaving out one stage at a time."""
    whole = _by_point(rows, "solve")
    parts = {stage.name: _by_stage(rows, stage.name, whole) for stage in STAGES}
    if not any(parts.values()):
        return "\n".join([LEFT_OUT_TEXT, "Not run: ask for it with `--leave-one-out`.\n"])
    lines = [LEFT_OUT_TEXT, _summary(parts, rows, whole)]
    for stage in STAGES:
        if parts[stage.name]:
            lines.append(f"### Without {stage.name}: {stage.does}\n")
            lines.append(_of_stage(parts[stage.name], rows, whole, stage.name, graphs))
            lines.append(verdict(list(parts[stage.name].values())) + "\n")
    return "\n".join(lines)


def verdict(differences: Sequence[Difference]) -> str:
    """In how many of the points a stage is missed, and in how many it hurts."""
    missed, hurts = _missed(differences), _hurts(differences)
    return f"Missed in {missed} of {len(differences)}, hurts in {hurts}."


def difference(row: Row, whole: Row) -> Difference:
    """How much worse a plan is than the whole solver's."""
    if unsolved(row) or unsolved(whole):
        worse, better = unsolved(row), unsolved(whole)
        points = 0.0 if worse and better else math.inf if worse else -math.inf
        return Difference(points, extra_or_dash(row))
    slower = extra_points(row) - extra_points(whole)
    text = f"{extra_or_dash(row)} ({slower:+.2f})"
    if row["share"] is not None:
        return Difference(slower, text)
    higher = peak_points(row) - peak_points(whole)
    peak = f"{percent(peak_points(row))} ({higher:+.2f})"
    return Difference(higher if abs(higher) > NOISE else slower, text, peak)


def effort(rows: Sequence[Row]) -> str:
    """The section on effort: a table, and a curve over all points that every effort solved."""
    by_point = {
        (r["graph"], r["share"], r["effort"]): r
        for r in rows
        if r["section"] == "effort" or (r["section"] == "solve" and "effort" in r)
    }
    points = [
        {"graph": graph, "share": share}
        for graph in EFFORT_GRAPHS
        for share in EFFORT_SHARES
        if (graph, share, EFFORTS[0]) in by_point
    ]
    if not points:
        return "\n".join([EFFORT_TEXT, "Not run: ask for it with `--efforts`.\n"])
    columns: Columns = {
        "graph": lambda r: str(r["graph"]),
        "budget": lambda r: share_text(r["share"]),
    }
    for factor in EFFORTS:
        columns[f"effort {factor:g}"] = _at_effort(factor, by_point)
    return "\n".join([EFFORT_TEXT, table(columns, points), _curve(points, by_point)])


def repeats(rows: Sequence[Row]) -> str:
    """The section on solving one problem again and again."""
    by_point = _by_condition(rows)
    if not by_point:
        return "\n".join([REPEATS_TEXT, "Not run: ask for it with `--repeats 20`.\n"])
    columns: Columns = {
        "graph": lambda r: str(r["graph"]),
        "budget": lambda r: share_text(r["share"]),
    }
    for condition in CONDITIONS:
        columns[condition] = _solves(condition)
    columns["solves"] = lambda r: str(sum(len(row["plans"]) for row in r["by"].values()))
    columns["different plans"] = lambda r: str(len(plans_of(r["by"].values())))
    columns["CPU"] = lambda r: seconds_range([s for row in r["by"].values() for s in row["cpu"]])
    lines = [{"graph": graph, "share": share, "by": by} for (graph, share), by in by_point.items()]
    return "\n".join([REPEATS_TEXT, table(columns, lines)])


def different_plans(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Of each problem that was solved again and again, whether it gave one plan each time."""
    return [
        (f"repeat/{graph}/{share_name(share)}", len(plans_of(by.values())) == 1)
        for (graph, share), by in _by_condition(rows).items()
    ]


def plans_of(rows: Any) -> set[str]:
    """The digests of all plans in some rows of repeats."""
    return {plan for row in rows for plan in row["plans"]}


def missing(rows: Sequence[Row], graphs: Sequence[str]) -> Iterator[str]:
    """What a reader may expect in these sections and does not find, a line each."""
    there = {row["key"] for row in rows}
    whole = _by_point(rows, "solve")
    for stage in STAGES if any(row["section"] == "without" for row in rows) else ():
        absent = [
            f"{graph} {share_text(share)}"
            for graph in graphs
            for share in LEFT_OUT_SHARES
            if may_differ(stage.name, whole.get((graph, share)))
            and f"without/{graph}/{share_name(share)}/{stage.name}" not in there
        ]
        if absent:
            yield f"- without {stage.name}: {', '.join(absent)}"
    solved = {(graph, share) for graph, share in _by_condition(rows)}
    if absent := [f"{g} {share_text(s)}" for g, s in REPEATED if (g, s) not in solved]:
        yield f"- one problem, one plan: {', '.join(absent)}"


def may_differ(stage: str, whole: Row | None) -> bool:
    """Whether leaving out a stage can change a solve: it ran in it, and there may be a plan."""
    if whole is None or whole["status"] != "ok":
        return True
    return stage in whole.get("tried", [stage]) and not impossible(whole)


def _by_point(rows: Sequence[Row], section: str) -> dict[Point, Row]:
    return {(r["graph"], r["share"]): r for r in rows if r["section"] == section}


def _beside(
    earlier: dict[Point, Row], now: dict[Point, Row], share: float | None
) -> Callable[[Row], str]:
    def cell(line: Row) -> str:
        both = [rows.get((line["graph"], share)) for rows in (earlier, now)]
        return " → ".join(map(in_short, both)) if any(both) else ""

    return cell


def _gains(earlier: dict[Point, Row], now: dict[Point, Row], shares: Sequence[float | None]) -> str:
    """By how much the geometric mean of the extra times has changed, and what is proven possible.

    Of points at which both have a plan. At the floor each has a peak of its own: no bound there.
    """
    lines = []
    for share in shares:
        found = [
            (extra_points(earlier[point]), extra_points(row), extra_points(row, "bound_us"))
            for point, row in now.items()
            if point[1] == share and point in earlier
            if not unsolved(row) and not unsolved(earlier[point])
        ]
        if not found:
            continue
        before, after, least = (
            statistics.geometric_mean(max(1e-3, x) for x in part)
            for part in zip(*found, strict=True)
        )
        line = f"- {share_text(share)}: {percent(100 * (after / before - 1))}"
        if share is not None:
            line += f" (the bounds allow {percent(100 * (least / before - 1))})"
        lines.append(f"{line} over {len(found)} graphs")
    return "\n".join(["Change of the geometric mean of the extra times:\n", *lines, ""])


def _by_stage(rows: Sequence[Row], stage: str, whole: dict[Point, Row]) -> dict[Point, Difference]:
    """The points at which a stage was left out, and those at which it does not run anyway."""
    found = _by_point([r for r in rows if r.get("without") == stage], "without")
    if not found:
        return {}
    result: dict[Point, Difference] = {}
    for point, row in whole.items():
        if point in found:
            result[point] = difference(found[point], row)
        elif point[1] in LEFT_OUT_SHARES and not may_differ(stage, row):
            result[point] = Difference(0.0, "")
    return result


def _summary(
    parts: dict[str, dict[Point, Difference]], rows: Sequence[Row], whole: dict[Point, Row]
) -> str:
    columns: Columns = {
        "stage": lambda r: str(r["stage"].name),
        "what it does": lambda r: str(r["stage"].does),
        "points": lambda r: str(len(r["part"])),
        "missed in": lambda r: str(_missed(r["part"])),
        "hurts in": lambda r: str(_hurts(r["part"])),
        "mean": lambda r: _mean_points(r["part"]),
        "saved s": lambda r: number(_saved(rows, whole, r["stage"].name)),
    }
    lines = [
        {"stage": stage, "part": list(parts[stage.name].values())}
        for stage in STAGES
        if parts[stage.name]
    ]
    return table(columns, lines)


def _of_stage(
    part: dict[Point, Difference],
    rows: Sequence[Row],
    whole: dict[Point, Row],
    stage: str,
    graphs: Sequence[str],
) -> str:
    columns: Columns = {"graph": lambda r: str(r["graph"])}
    for share in LEFT_OUT_SHARES:
        columns[share_text(share)] = _cell(part, share)
    columns["peak at the floor"] = lambda r: (
        part[r["graph"], None].peak if (r["graph"], None) in part else ""
    )
    columns["saved s"] = lambda r: number(_saved(rows, whole, stage, r["graph"]))
    present = [{"graph": g} for g in graphs if any(point[0] == g for point in part)]
    return table(columns, present)


def _cell(part: dict[Point, Difference], share: float | None) -> Callable[[Row], str]:
    return lambda r: part[r["graph"], share].text if (r["graph"], share) in part else ""


def _saved(
    rows: Sequence[Row], whole: dict[Point, Row], stage: str, graph: str | None = None
) -> float:
    """Processor seconds that the solves without a stage take less."""
    return sum(
        whole[row["graph"], row["share"]].get("cpu_seconds", 0.0) - row["cpu_seconds"]
        for row in rows
        if row.get("without") == stage
        and row["status"] == "ok"
        and (row["graph"], row["share"]) in whole
        and graph in (None, row["graph"])
    )


def _missed(differences: Sequence[Difference]) -> int:
    return sum(d.points > NOISE for d in differences)


def _hurts(differences: Sequence[Difference]) -> int:
    return sum(d.points < -NOISE for d in differences)


def _mean_points(differences: Sequence[Difference]) -> str:
    """Where both solves have a plan."""
    finite = [d.points for d in differences if math.isfinite(d.points)]
    return f"{statistics.mean(finite):+.2f}" if finite else ""


def _at_effort(factor: float, by_point: dict[Any, Row]) -> Callable[[Row], str]:
    def cell(point: Row) -> str:
        row = by_point.get((point["graph"], point["share"], factor))
        if row is None or unsolved(row):
            return extra_or_dash(row)
        return f"{extra_or_dash(row)} ({number(row['cpu_seconds'])})"

    return cell


def _curve(points: Sequence[Row], by_point: dict[Any, Row]) -> str:
    """The geometric mean of the extra times, and the processor's seconds of all points together."""
    keys = [(point["graph"], point["share"]) for point in points]
    full = [
        key
        for key in keys
        if all((*key, f) in by_point and not unsolved(by_point[(*key, f)]) for f in EFFORTS)
    ]
    if not full:
        return ""
    seconds, means = [], []
    for factor in EFFORTS:
        rows = [by_point[(*key, factor)] for key in full]
        seconds.append(sum(row["cpu_seconds"] for row in rows))
        means.append(statistics.geometric_mean(max(1e-3, extra_points(row)) for row in rows))
    ticks = ", ".join(f'"{f:g}: {s:.0f} s"' for f, s in zip(EFFORTS, seconds, strict=True))
    figures = ", ".join(f"{mean:.2f}" for mean in means)
    return (
        f"The geometric mean of the {len(full)} extra times in percent, by effort and the "
        "processor's seconds of all of them.\n\n"
        f'```mermaid\nxychart-beta\n  x-axis "effort" [{ticks}]\n'
        f'  y-axis "extra time in %"\n  line [{figures}]\n```\n'
    )


def _by_condition(rows: Sequence[Row]) -> dict[Point, dict[str, Row]]:
    found: dict[Point, dict[str, Row]] = {}
    for row in rows:
        if row["section"] == "repeat" and row["status"] == "ok":
            found.setdefault((row["graph"], row["share"]), {})[row["condition"]] = row
    return found


def _solves(condition: str) -> Callable[[Row], str]:
    return lambda r: str(len(r["by"][condition]["plans"])) if condition in r["by"] else ""
