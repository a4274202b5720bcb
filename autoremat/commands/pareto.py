"""`autoremat pareto`: peak against time over all budgets, before a step is run.

Enters: the command's arguments. Leaves: a table or one JSON object on stdout, and an exit code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoremat.commands.arguments import PlanArguments, Refusal
from autoremat.commands.exits import BAD_INPUT
from autoremat.commands.fitting import fill
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.outputs import check_outputs, write_outputs
from autoremat.commands.plan import planned
from autoremat.commands.telling import print_json, warnings_told
from autoremat.planning.curve import unbeaten
from autoremat.reporting import CurvePoint, Report
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.target import TargetError
from autoremat.units import format_nbytes, format_us

_BAR = 10


def run(
    target: TargetArguments,
    asked: PlanArguments,
    outputs: Mapping[str, Path],
    *,
    as_json: bool,
    force: bool,
) -> int:
    """Do what the command says and return its exit code; see `commands.plan.run`."""
    told: list[str] = []
    began = time.monotonic()
    try:
        check_outputs(outputs, force=force)
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            report = planned(target, asked, told)
        if not report.curve:
            raise Refusal(
                f"{target.text} has {len(report.graphs)} graphs, and the curves of several do not "
                "add up to one: see `autoremat plan` for one budget."
            )
        write_outputs(report, outputs)
    except (Refusal, TargetError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    points = unbeaten(report.curve)
    if as_json:
        document = {
            "target": target.text,
            "device": report.device,
            "compiler": report.compiler,
            "resident_nbytes": report.resident_nbytes,
            "baseline_peak_nbytes": report.graphs[0].modelled_peak_nbytes,
            "points": [asdict(point) for point in points],
            "left_out": list(report.curve_left_out),
        }
        print_json(document, told, began)
    else:
        console = Console()
        console.print(_table(target.text, report, points, console.width))
    return 0


def _table(title: str, report: Report, points: Sequence[CurvePoint], width: int) -> Table:
    """One row for each budget, the smallest first."""
    fastest_us = points[-1].time_us
    largest = points[-1].peak_nbytes
    worst = max(point.time_us for point in points) / fastest_us - 1 or 1.0
    extras = [point.time_us / fastest_us - 1 for point in points]
    rows = [
        {
            "peak": format_nbytes(point.peak_nbytes),
            "of most": f"{point.peak_nbytes / largest:.0%}",
            "step": format_us(point.time_us),
            "extra": f"{extra:+.1%}",
            "": ("█" * round(_BAR * extra / worst)).ljust(_BAR),
            "found by": point.label,
        }
        for point, extra in zip(points, extras, strict=True)
    ]
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    missed = ("", "of most", "found by")
    fill(table, tuple(rows[0]), rows, label="found by", first_to_go=missed, width=width)
    estimated = " Times are estimated from a data sheet." if report.estimated_ops else ""
    left_out = "; ".join(report.curve_left_out)
    cut = f" Not all of it: {left_out}." if left_out else ""
    table.caption = (
        f"On {report.device}, {format_nbytes(report.resident_nbytes)} resident.{estimated}{cut}"
    )
    table.caption_justify = "left"
    return table
