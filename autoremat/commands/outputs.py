"""A report on its way out: on the terminal, as one JSON object, as files.

Enters: a `Report` and where to put it. Leaves: text on stdout, files. Guarantees: torch is not
imported; every file is checked before the first is written, and each appears whole or not at all;
a file that is neither ours nor given up with `--force` is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autoremat.commands.arguments import Refusal
from autoremat.commands.files import check_writable, write_whole
from autoremat.errors import reason_of
from autoremat.reporting import SCHEMA, Report, Throughput, page, snapshot, trace, values_csv
from autoremat.reporting.text import RECOMPUTED_TITLE, SAVED_TITLE

_FACT_WIDTH = 12
_NAMES = {"html": "Page", "csv": "Table", "report": "Report"}


@dataclass(frozen=True)
class _Format:
    """A kind of output file: what makes it, and what tells that a file is one of ours."""

    render: Callable[[Report], bytes]
    mark: bytes


_FORMATS = {
    "report": _Format(lambda report: report.to_json().encode(), SCHEMA.partition("/")[0].encode()),
    "html": _Format(lambda report: page.html(report).encode(), page.MARK.encode()),
    "csv": _Format(
        lambda report: values_csv.values_csv(report).encode(), values_csv.HEADER.encode()
    ),
    "snapshot": _Format(snapshot.snapshot, snapshot.MARK),
    "trace": _Format(lambda report: trace.trace(report).encode(), trace.MARK.encode()),
}


def check_outputs(outputs: Mapping[str, Path], *, source: Path | None = None, force: bool) -> None:
    """Find before the work starts what would keep a file from being written.

    Args:
        outputs: files to write, by "report", "html", "csv", "snapshot" or "trace".
        source: a file that none of them may be.
        force: whether files that are not ours may be replaced.

    Raises:
        Refusal: naming the file.
    """
    _check_apart(source, outputs)
    for name, out in outputs.items():
        check_writable(out, _FORMATS[name].mark, force=force)


def write_outputs(report: Report, outputs: Mapping[str, Path]) -> None:
    """Render all, then write all; raises `Refusal` where a file cannot be written."""
    rendered = {name: _FORMATS[name].render(report) for name in outputs}
    for name, out in outputs.items():
        write_whole(out, rendered[name])


def print_report(report: Report, outputs: Mapping[str, Path]) -> None:
    """The summary, and which files were written."""
    _print_summary(report)
    for name, out in outputs.items():
        print(f"{_NAMES.get(name, name.capitalize())} written to {out}")


def _check_apart(source: Path | None, outputs: Mapping[str, Path]) -> None:
    """Two outputs in one file would lose one; an output in the report's file, the report."""
    seen = {} if source is None else {source.resolve(): "the report itself"}
    for name, out in outputs.items():
        other = seen.setdefault(_resolved(out), f"--{name}")
        if other != f"--{name}":
            raise Refusal(f"--{name} {out} is also {other}: give another name.")


def _resolved(out: Path) -> Path:
    try:
        return out.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise Refusal(f"{out} cannot be written: {reason_of(error)}.") from error


def report_document(report: Report, outputs: Mapping[str, Path]) -> dict[str, Any]:
    """Totals, values and curve; the timeline is in the report's own file."""
    return {
        "budget_nbytes": report.budget_nbytes,
        "resident_nbytes": report.resident_nbytes,
        "resident": asdict(report.resident),
        "optimizer": report.optimizer,
        "baseline_peak_nbytes": report.baseline_peak_nbytes,
        "predicted_peak_nbytes": report.predicted_peak_nbytes,
        "measured_peak_nbytes": report.measured_peak_nbytes,
        "reserved": None if report.reserved is None else asdict(report.reserved),
        "is_within_budget": report.is_within_budget,
        "baseline_time_us": report.baseline_time_us,
        "predicted_time_us": report.predicted_time_us,
        "code_times_us": report.code_times_us,
        "bound_us": report.bound_us,
        "gap": report.gap if math.isfinite(report.gap) else None,
        "status": report.status.name.lower() if report.status else None,
        "method": report.method,
        "peak_step": report.peak_step,
        "advice": [asdict(remedy) for remedy in report.advice],
        "peak_formula": None if report.peak_formula is None else asdict(report.peak_formula),
        "smaller_formulas": [asdict(formula) for formula in report.smaller_formulas],
        "throughput": None if report.throughput is None else _rates(report.throughput),
        "device": report.device,
        "compiler": report.compiler,
        "torch_version": report.torch_version,
        "fallbacks": [asdict(fallback) for fallback in report.fallbacks],
        "values": [asdict(value) for value in report.values],
        "curve": [asdict(point) for point in report.curve],
        "curve_left_out": list(report.curve_left_out),
        "assumed": list(report.assumed),
        "communication": list(report.communication),
        "own_checkpoints": list(report.own_checkpoints),
        "written": {name: str(out) for name, out in outputs.items()},
    }


def _rates(found: Throughput) -> dict[str, Any]:
    """What the step does per second, by budget."""
    plans = {"here": found.here, "less": found.less, "more": found.more}
    plans["unlimited"] = found.unlimited
    return {
        "samples": found.samples,
        "tokens": found.tokens,
        "unit": found.unit,
        "is_of_kernels": found.is_of_kernels,
        "enough_nbytes": found.enough_nbytes,
        **{
            name: {**asdict(at), "fits": at.fits, "per_second": found.per_second(at)}
            for name, at in plans.items()
        },
    }


def _print_summary(report: Report) -> None:
    """Wrapped and coloured on a terminal, plain and unbroken in a pipe."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else None
    verdict, *rest = report.summary(width).split("\n\n", 1)
    colour = "bold green" if report.is_within_budget else "bold red"
    console.print(Text(verdict, style=colour), soft_wrap=True)
    for line in ["", *"".join(rest).split("\n")] if rest else []:
        text = Text(line)
        if line in (SAVED_TITLE, RECOMPUTED_TITLE):
            text.stylize("bold")
        elif not line.startswith(" "):
            text.stylize("dim", 0, _FACT_WIDTH)
        console.print(text, soft_wrap=True)
