"""The report as one HTML file: no network, no build step, readable without a server.

Enters: a `Report`. Leaves: the page's text. The verdict and all sentences are written here, so
that they are there without JavaScript; charts and tables are drawn in the browser from the
report's own JSON, which the page carries. Guarantees: nothing that comes from a model (names of
modules, of values, of files) is ever markup: jinja2 escapes the text, the JSON holds no "<", and
the scripts only set text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from autoremat.markup import template
from autoremat.reporting.document import write
from autoremat.reporting.model import Report, ValueAction
from autoremat.reporting.reserved import ReservedMemory
from autoremat.reporting.size_curves import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, size_curves
from autoremat.reporting.text import (
    bound_text,
    capitalised,
    code_text,
    formula_text,
    helping_text,
    offloaded_text,
    summary,
    without_optimizer,
)
from autoremat.reporting.throughput import AtBudget, Throughput, digits
from autoremat.units import format_nbytes, format_nbytes_apart, format_us, format_us_apart

MARK = '<meta name="generator" content="autoremat report">'
EN_DASH = "\u2013"
_SCRIPTS = ("base.js", "timeline.js", "values.js", "modules.js", "curve.js", "main.js")


@dataclass(frozen=True)
class _Bar:
    """A peak beside the others, on the scale of the largest."""

    name: str
    text: str
    style: str
    percent: float
    resident_percent: float


@dataclass(frozen=True)
class _Setting:
    """The allocator under one setting, beside its default."""

    name: str
    peak: str
    less: str
    segments: int
    fits: bool


@dataclass(frozen=True)
class _Rate:
    """What the step does per second at a budget, beside this one."""

    name: str
    budget: str
    needed: str
    time: str
    per_second: str
    tokens: str
    change: str


@dataclass(frozen=True)
class _Tile:
    """A number of the verdict."""

    name: str
    text: str
    note: str


def html(report: Report) -> str:
    """The page."""
    return template("autoremat.reporting", "page.html", "html").render(
        mark=MARK,
        style=_file("page.css"),
        script="\n".join(_file(name) for name in _SCRIPTS),
        payload=_harmless(write(report)),
        fits=report.is_within_budget,
        resident=format_nbytes(report.resident_nbytes),
        resident_parts=_resident_parts(report),
        without_optimizer=without_optimizer(report),
        budget=format_nbytes(report.budget_nbytes),
        settings=_settings(report),
        idle=_idle(report),
        helping=helping_text(report.reserved) if report.reserved else "",
        reading=_reading(report),
        timing=_timing(report),
        formula=formula_text(report),
        size_curves=size_curves(report),
        plot={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
        },
        offloaded=offloaded_text(report),
        throughput=report.throughput,
        rates=_rates(report.throughput),
        adaptive=capitalised(report.throughput.adaptive_text()) if report.throughput else "",
        estimated=sorted(set(report.estimated_ops)),
        runs_on=_runs_on(report),
        **_verdict(report),
    )


def summary_html(report: Report) -> str:
    """The verdict as a part of another page, such as a notebook: no script, no style sheet."""
    return template("autoremat.reporting", "summary.html", "html").render(
        text=summary(report), **_verdict(report)
    )


def _verdict(report: Report) -> dict[str, Any]:
    """What the page and the summary begin with."""
    scale = _scale(report)
    return {
        "report": report,
        "state": _state(report),
        "before": format_nbytes(report.baseline_peak_nbytes)
        if report.knows_baseline_peak
        else "unknown",
        "after": format_nbytes(report.predicted_peak_nbytes),
        "cost": _cost(report),
        "bars": _bars(report, scale),
        "budget_percent": 100 * report.budget_nbytes / scale,
        "tiles": _tiles(report),
    }


def _file(name: str) -> str:
    return resources.files("autoremat.reporting").joinpath("html", name).read_text("utf-8")


def _harmless(json_text: str) -> str:
    """JSON that cannot end the script element that it stands in."""
    for character in "<>&\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text


def _state(report: Report) -> str:
    if not report.graphs:
        return "Nothing is planned"
    if report.is_within_budget:
        return "Within the budget"
    above = format_nbytes(report.highest_peak_nbytes - report.budget_nbytes)
    return f"Over the budget by {above}"


def _extra(report: Report) -> float | None:
    """Added time in percent; None where no time is known."""
    if report.baseline_time_us <= 0:
        return None
    return 100 * (report.predicted_time_us / report.baseline_time_us - 1.0)


def _cost(report: Report) -> str:
    extra = _extra(report)
    if extra is None:
        return ""
    if round(extra, 1) == 0:
        return "at no extra time"
    return f"for {abs(extra):.1f} % {'more' if extra > 0 else 'less'} time"


def _scale(report: Report) -> int:
    highest = max(report.baseline_peak_nbytes, report.highest_peak_nbytes, 1)
    # A budget far above what is needed would squeeze the bars: it leaves the picture instead.
    return max(highest, report.budget_nbytes) if report.budget_nbytes < 2 * highest else highest


def _bars(report: Report, scale: int) -> list[_Bar]:
    peaks = [("This plan", report.predicted_peak_nbytes, "plan")]
    if report.knows_baseline_peak:
        peaks.insert(0, ("Without a plan", report.baseline_peak_nbytes, "ghost"))
    if report.measured_peak_nbytes is not None:
        peaks.append(("Measured", report.measured_peak_nbytes, "measured"))
    resident = min(report.resident_nbytes, scale)
    return [
        _Bar(name, format_nbytes(peak), style, 100 * peak / scale, 100 * resident / scale)
        for name, peak, style in peaks
    ]


def _resident_parts(report: Report) -> list[tuple[str, str]]:
    """Name and size of each part of what is resident; with the optimizer's name, if it is known."""
    named = report.resident.by_name.items()
    parts = [(name, format_nbytes(nbytes)) for name, nbytes in named if nbytes]
    of_optimizer = f"optimizer state ({report.optimizer})"
    return [(of_optimizer if name == "optimizer state" else name, text) for name, text in parts]


def _tiles(report: Report) -> list[_Tile]:
    resident = format_nbytes(report.resident_nbytes)
    tiles = [_Tile("Budget", format_nbytes(report.budget_nbytes), f"{resident} are resident")]
    saved = 1 - report.predicted_peak_nbytes / max(1, report.baseline_peak_nbytes)
    peak = format_nbytes(report.predicted_peak_nbytes)
    below = f"{100 * saved:.1f} % below no plan" if report.knows_baseline_peak else ""
    tiles.append(_Tile("Predicted peak", peak, below))
    is_measured = report.measured_peak_nbytes is not None
    tiles.append(
        _measured_tile(report)
        if is_measured or report.reserved is None
        else _reserved_tile(report.reserved)
    )
    extra = _extra(report)
    time_text = "unknown" if extra is None else f"{round(extra, 1) + 0.0:+.1f} %"
    times = " to ".join(format_us_apart(report.baseline_time_us, report.predicted_time_us))
    tiles.append(_Tile("Step time, predicted", time_text, _with_micro(times)))
    gap = "not bounded" if report.gap == float("inf") else f"\u2264 {100 * report.gap:.1f} %"
    tiles.append(_Tile("Gap to the model's optimum", gap, _with_micro(bound_text(report))))
    actions = [value.action for value in report.values]
    recomputed = sum(value.recomputes > 0 for value in report.values)
    saves = f"{actions.count(ValueAction.SAVE)} of {len(actions)}"
    away = actions.count(ValueAction.AWAY)
    note = f"{recomputed} are recomputed" + (f", {away} wait elsewhere" if away else "")
    tiles.append(_Tile("Values saved", saves, note))
    return tiles


def _settings(report: Report) -> list[_Setting]:
    """Each setting of the allocator, and by how much it reserves less."""
    found = report.reserved
    rows = []
    for case in found.cases if found is not None else ():
        less = 0 if found is None else found.peak_nbytes - case.peak_nbytes
        name = case.setting or "torch's defaults"
        sign = "\u2212" if less > 0 else "+"
        text = f"{sign}{format_nbytes(abs(less))}" if less else EN_DASH
        peak = format_nbytes(case.peak_nbytes)
        rows.append(_Setting(name, peak, text, case.segments, case.fits))
    return rows


def _rates(found: Throughput | None) -> list[_Rate]:
    """What the step does per second, the smallest budget first."""
    return [] if found is None else [_rate(found, name, at) for name, at in found.rows()]


def _rate(found: Throughput, name: str, at: AtBudget) -> _Rate:
    budget = EN_DASH if at.budget_nbytes is None else format_nbytes(at.budget_nbytes)
    needed = format_nbytes(at.needed_nbytes)
    if not at.fits:
        return _Rate(name, budget, needed, EN_DASH, EN_DASH, EN_DASH, "too little for any plan")
    change = EN_DASH if at is found.here else found.change_text(at)
    rates = digits(found.per_second(at)), digits(found.tokens_per_second(at))
    return _Rate(name, budget, needed, _with_micro(format_us(at.time_us, digits=2)), *rates, change)


def _idle(report: Report) -> str:
    """What was free as the peak of what is reserved was reached."""
    found = report.reserved
    if found is None:
        return ""
    blocks = ", ".join(map(format_nbytes, found.free_nbytes))
    largest = f"; the largest free blocks were {blocks}" if blocks else ""
    return (
        f"{format_nbytes(found.peak_nbytes)} are taken from the device over {found.steps} steps, "
        f"{format_nbytes(found.idle_nbytes)} of it free at that peak{largest}."
    )


def _with_micro(text: str) -> str:
    """Microseconds as the page's script writes them; a terminal may lack the sign."""
    return re.sub(r"(\d) us\b", "\\1 \u00b5s", text)


def _reserved_tile(found: ReservedMemory) -> _Tile:
    note = f"{format_nbytes(found.idle_nbytes)} of it free at that peak"
    if found.budget_nbytes is not None:
        note = f"of {format_nbytes(found.budget_nbytes)} asked for"
    return _Tile("Reserved, emulated", format_nbytes(found.peak_nbytes), note)


def _measured_tile(report: Report) -> _Tile:
    measured = report.measured_peak_nbytes
    if measured is None:
        return _Tile("Measured peak", EN_DASH, "no step was measured yet")
    difference = measured - report.predicted_peak_nbytes
    side = "above" if difference > 0 else "below"
    note = f"{format_nbytes(abs(difference))} {side} the prediction"
    return _Tile("Measured peak", format_nbytes(measured), note if difference else "as predicted")


def _reading(report: Report) -> str:
    """Where the compiler's code peaks elsewhere than the simulated operations do."""
    graph = report.peak_graph
    if report.eager_peak_nbytes:
        return (
            f"The step peaks at {format_nbytes(report.eager_peak_nbytes)} while code in eager mode "
            "goes backward outside of the planned graphs, which the timeline does not show."
        )
    if graph is None or graph.modelled_peak_nbytes == graph.predicted_peak_nbytes:
        return ""
    modelled, read = format_nbytes_apart(graph.modelled_peak_nbytes, graph.predicted_peak_nbytes)
    return (
        f"The timeline is simulated operation by operation and peaks at {modelled}. "
        f"{report.compiler.capitalize() or 'The compiler'} fuses, reuses and reorders: the peak "
        f"read from the code that it generates is {read}, and that is the predicted peak."
    )


def _timing(report: Report) -> str:
    """How much of the step's time was measured."""
    steps = [step for graph in report.graphs if graph.timeline for step in graph.timeline.steps]
    whole = sum(step.time_us for step in steps)
    if not whole:
        return ""
    share = sum(step.time_us for step in steps if not step.is_estimated) / whole
    one_by_one = f"{100 * share:.1f} % of the step's time is of operations measured one by one."
    kernels = code_text(report)
    return f"{one_by_one} Its kernels: {_with_micro(kernels)}." if kernels else one_by_one


def _runs_on(report: Report) -> list[str]:
    torch_version = f"torch {report.torch_version}" if report.torch_version else ""
    return [text for text in (report.device, report.compiler, torch_version) if text]
