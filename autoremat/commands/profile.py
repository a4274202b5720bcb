"""`autoremat profile`: where the time and the memory of a step without recompute go.

Enters: the command's arguments. Leaves: two tables, by operator and by module, or one JSON object.
Guarantees: the step itself does not run; each distinct operation does, on made-up inputs, where
its device is here.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoremat.commands.arguments import PlanArguments, Refusal
from autoremat.commands.exits import BAD_INPUT
from autoremat.commands.fitting import fill
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.plan import planned
from autoremat.commands.telling import print_json, warnings_told
from autoremat.reporting import Report, SpanKind, Step
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.target import TargetError
from autoremat.units import format_nbytes, format_us

_FIGURES = ("runs", "forward", "backward", "share", "saved")
_SHOWN = 15  # rows of a table; all are in the JSON
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Part:
    """What one operator, or one module, does in a step.

    Attributes:
        name: of the operator, or path of the module, equal layers together.
        runs: of operations.
        forward_us: their duration in the forward.
        backward_us: the same in the backward.
        made_nbytes: what they make that lives between operations.
        saved_nbytes: of it, what the forward leaves to the backward.
        workspace_nbytes: the largest of theirs, live only inside an operation.
        estimated_runs: of them, those whose time is estimated, not measured.
    """

    name: str
    runs: int = 0
    forward_us: float = 0.0
    backward_us: float = 0.0
    made_nbytes: int = 0
    saved_nbytes: int = 0
    workspace_nbytes: int = 0
    estimated_runs: int = 0

    @property
    def time_us(self) -> float:
        """Duration of all its runs."""
        return self.forward_us + self.backward_us


def run(target: TargetArguments, asked: PlanArguments, *, as_json: bool) -> int:
    """Do what the command says and return its exit code.

    Args:
        target: where model and batch come from.
        asked: the device; nothing is recomputed, so there is no budget.
        as_json: one JSON object in place of the tables.
    """
    told: list[str] = []
    began = time.monotonic()
    try:
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            report = planned(target, asked, told)
    except (Refusal, TargetError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    by_operator = parts(report, lambda step: step.op)
    by_module = parts(report, lambda step: _LAYER.sub("*", step.module) or "(outside modules)")
    if as_json:
        document = {
            "target": target.text,
            "device": report.device,
            "time_us": report.predicted_time_us,
            "peak_nbytes": report.baseline_peak_nbytes,
            "resident_nbytes": report.resident_nbytes,
            "by_operator": [asdict(part) for part in by_operator],
            "by_module": [asdict(part) for part in by_module],
        }
        print_json(document, told, began)
        return 0
    console = Console()
    peak, resident = format_nbytes(report.baseline_peak_nbytes), report.resident_nbytes
    console.print(Text(target.text, style="bold"), soft_wrap=True)
    console.print(
        f"On {report.device}: {format_us(report.predicted_time_us)} op by op, peak {peak}, of "
        f"which {format_nbytes(resident)} resident.",
        highlight=False,
    )
    console.print(_table("operator", by_operator, console.width))
    console.print(_table("module", by_module, console.width))
    return 0


def parts(report: Report, key: Callable[[Step], str]) -> list[Part]:
    """The step's operations, added up by a key, the longest first."""
    found: dict[str, Part] = defaultdict(lambda: Part(""))
    for graph in report.graphs:
        if graph.timeline is None:
            continue
        steps = graph.timeline.steps
        made, saved = [0] * len(steps), [0] * len(steps)
        for span in graph.timeline.spans:
            made[span.born] += span.nbytes
            if span.kind is SpanKind.SAVED:
                saved[span.born] += span.nbytes
        for step, made_nbytes, saved_nbytes in zip(steps, made, saved, strict=True):
            name = key(step)
            found[name] = _with(found[name], name, step, made_nbytes, saved_nbytes)
    return sorted(found.values(), key=lambda part: -part.time_us)


def _with(part: Part, name: str, step: Step, made_nbytes: int, saved_nbytes: int) -> Part:
    return replace(
        part,
        name=name,
        runs=part.runs + 1,
        forward_us=part.forward_us + (0.0 if step.is_backward else step.time_us),
        backward_us=part.backward_us + (step.time_us if step.is_backward else 0.0),
        made_nbytes=part.made_nbytes + made_nbytes,
        saved_nbytes=part.saved_nbytes + saved_nbytes,
        workspace_nbytes=max(part.workspace_nbytes, step.workspace_nbytes),
        estimated_runs=part.estimated_runs + step.is_estimated,
    )


def _table(kind: str, found: Iterable[Part], width: int) -> Table:
    found = list(found)
    total_us = sum(part.time_us for part in found) or 1.0
    rows = [
        {
            kind: part.name + (" ~" if part.estimated_runs else ""),
            "runs": str(part.runs),
            "forward": format_us(part.forward_us),
            "backward": format_us(part.backward_us),
            "share": f"{part.time_us / total_us:.1%}",
            "saved": format_nbytes(part.saved_nbytes),
        }
        for part in found[:_SHOWN]
    ]
    table = Table(box=box.SIMPLE_HEAD)
    missed = ("runs", "forward", "backward")
    fill(table, (kind, *_FIGURES), rows, label=kind, first_to_go=missed, width=width)
    notes = []
    if len(found) > _SHOWN:
        rest_us = sum(part.time_us for part in found[_SHOWN:])
        notes.append(f"and {len(found) - _SHOWN} more, {rest_us / total_us:.1%}: see --json.")
    if any(part.estimated_runs for part in found):
        notes.append("~ estimated, not measured.")
    table.caption, table.caption_justify = " ".join(notes) or None, "left"
    return table
