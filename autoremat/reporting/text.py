"""The report as plain text for a terminal.

Enters: a `Report`. Leaves: text without escape codes, ASCII but for the names inside; nothing is
printed. Guarantees: the verdict comes first; sizes are decimal (GB = 10^9 bytes) and say so.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoremat.reporting.model import WOULD_WAIT, Report, ValueAction, ValueReport
from autoremat.reporting.reserved import ReservedMemory
from autoremat.reporting.resident import ResidentParts
from autoremat.reporting.waiting import TOGETHER
from autoremat.units import (
    format_nbytes,
    format_nbytes_apart,
    format_parts,
    format_us,
    format_us_apart,
)

SAVED_TITLE = "Largest saved values"
RECOMPUTED_TITLE = "Most expensive recomputed values"

_ROWS = 5
_WIDE = 110  # columns of a terminal that has room for sources and reasons


def one_line(report: Report) -> str:
    """The line printed at the end of planning."""
    return f"autoremat: {_verdict(report)}"


def summary(report: Report, width: int | None = None) -> str:
    """The report as lines: verdict, facts, and the values that matter most.

    Args:
        report: what to tell.
        width: of the terminal; without it there are at most 26 lines, however long.
    """
    saved = _fold(value for value in report.values if value.action == ValueAction.SAVE)
    recomputed = _fold(value for value in report.values if value.recomputes)
    lines = [
        *_wrapped(capitalised(_verdict(report)), width),
        "",
        *(line for fact in _facts(report) for line in _wrapped(fact, width, hanging=13)),
        *_table(SAVED_TITLE, saved, lambda group: group.nbytes, width),
        *_table(RECOMPUTED_TITLE, recomputed, lambda group: group.time_us, width),
    ]
    return "\n".join(lines)


def _wrapped(line: str, width: int | None, hanging: int = 0) -> list[str]:
    if width is None:
        return [line]
    indent = " " * min(hanging, width // 3)
    return textwrap.wrap(line, max(width, 20), subsequent_indent=indent, drop_whitespace=True)


def _verdict(report: Report) -> str:
    if not report.graphs:
        return f"nothing is planned: {_plural(len(report.fallbacks), 'part')} without a plan"
    saved = sum(value.action == ValueAction.SAVE for value in report.values)
    parts = [
        _peaks(report),
        f"{_extra_time(report)} predicted",
        f"{saved} of {_plural(len(report.values), 'value')} saved",
        _gap(report),
    ]
    if report.fallbacks:
        parts.append(f"{_plural(len(report.fallbacks), 'part')} without a plan")
    return ", ".join(parts)


def _peaks(report: Report) -> str:
    before = f"{format_nbytes(report.baseline_peak_nbytes)} -> "
    highest, reserved = report.highest_peak_nbytes, report.reserved
    text = f"peak {before if report.knows_baseline_peak else ''}"
    text += format_nbytes(report.predicted_peak_nbytes)
    if report.measured_peak_nbytes is not None:
        text += f", measured {format_nbytes(report.measured_peak_nbytes)}"
    if reserved is not None and reserved.budget_nbytes is not None:
        text += f", reserved {format_nbytes(reserved.peak_nbytes)}"
    if highest <= report.budget_nbytes:
        return f"{text} (budget {format_nbytes(report.budget_nbytes)})"
    _, budget = format_nbytes_apart(highest, report.budget_nbytes)
    excess = format_nbytes(highest - report.budget_nbytes)
    return f"{text} (OVER the budget {budget} by {excess})"


def _extra_time(report: Report) -> str:
    if report.baseline_time_us <= 0:
        return "unknown time"
    extra = report.predicted_time_us / report.baseline_time_us - 1.0
    # Adding zero turns -0.0 into 0.0.
    return f"{round(100 * extra, 1) + 0.0:+.1f} % time"


def _gap(report: Report) -> str:
    if report.gap == float("inf"):
        return "no proven gap"
    return f"gap at most {100 * report.gap:.1f} %"


def _facts(report: Report) -> Iterable[str]:
    facts = {
        "Budget": f"{report.budget_nbytes} bytes, {_resident(report.resident)}",
        "Optimizer": without_optimizer(report),
        "Reserved": reserved_text(report),
        "Measured": _measured(report),
        "Peak at": _peak_place(report),
        "Formula": formula_text(report),
        "Sizes": "; ".join(report.sizes),
        "Otherwise": "; ".join(report.otherwise),
        "Step time": _times(report),
        "Throughput": throughput_text(report),
        "Offloaded": offloaded_text(report),
        "Kernels": code_text(report),
        "Solver": _solver(report),
        "Runs on": ", ".join(filter(None, (report.device, report.compiler, _torch(report)))),
        "Estimated": _some(report.estimated_ops, "operation without a sound measurement"),
        "Curve": "; ".join(report.curve_left_out),
        "Assumed": "; ".join(report.assumed),
        "Constraints": _some((*report.user_constraints, *report.constraints), "constraint"),
        "Collectives": " ".join(report.communication),
        "Advice": " ".join((*report.own_checkpoints, *map(str, report.advice))),
        "Fallbacks": _some(report.fallbacks, "part without a plan"),
    }
    if not report.graphs:
        facts |= {"Step time": "", "Solver": ""}
    return [f"{name:<12} {_one_line(text)}" for name, text in facts.items() if text]


def offloaded_text(report: Report) -> str:
    """What leaves the device and comes back; where nothing may, what that would save, or ""."""
    told = {fact.name: fact.text for fact in report.facts}
    graphs = [graph for graph in report.graphs if graph.waiting is not None]
    if not graphs:
        return told.get(WOULD_WAIT, "")
    name = "" if len(graphs) < 2 else "{}: "
    each = (name.format(g.name) + g.waiting.text(g.baseline_time_us) for g in graphs if g.waiting)
    return " ".join(filter(None, (*each, told.get(TOGETHER, ""))))


def _resident(parts: ResidentParts) -> str:
    named = format_parts(parts.by_name)
    return f"{format_nbytes(parts.nbytes)} resident{':' * bool(named)} {named}"


def without_optimizer(report: Report) -> str:
    """That a plan was made without an optimizer, and what to do about it; "" if it was not."""
    if report.optimizer or not report.graphs:
        return ""
    return (
        "none: the plan was made without an optimizer, and its state is not counted; pass "
        "optimizer= (--optimizer on the command line)"
    )


def reserved_text(report: Report) -> str:
    """What the allocator takes from the device, and what would lower that; "" if nobody knows."""
    found = report.reserved
    if found is None:
        return ""
    sentences = [_reserved(found), helping_text(found)]
    if not found.default.fits:
        sentences.insert(1, f"the device has {format_nbytes(found.device_nbytes)}")
    if found.budget_nbytes is not None:
        is_kept = "within" if found.is_within_budget else "above"
        sentences.append(f"{is_kept} the {format_nbytes(found.budget_nbytes)} asked for")
    return "; ".join(sentences)


def _reserved(found: ReservedMemory) -> str:
    blocks = ", ".join(map(format_nbytes, found.free_nbytes))
    idle = f"{format_nbytes(found.idle_nbytes)} of it not allocated at that peak"
    if blocks:
        idle += f" (largest free blocks {blocks})"
    whole = format_nbytes(found.peak_nbytes)
    return f"{whole} by CUDA's allocator in {found.steps} steps, emulated; {idle}"


def helping_text(found: ReservedMemory) -> str:
    """The setting that lowers what is reserved the most, and by how much."""
    best = found.helping
    if best is None:
        return "no setting that was tried lowers it by 1 %"
    less = format_nbytes(found.peak_nbytes - best.peak_nbytes)
    return f"{best.setting} lowers it by {less} to {format_nbytes(best.peak_nbytes)}"


def _measured(report: Report) -> str:
    if report.measured_peak_nbytes is None:
        return "no step has been measured yet"
    difference = report.measured_peak_nbytes - report.predicted_peak_nbytes
    if difference == 0:
        return f"{format_nbytes(report.measured_peak_nbytes)}, exactly as predicted"
    side = "above" if difference > 0 else "below"
    return (
        f"{format_nbytes(report.measured_peak_nbytes)}, {format_nbytes(abs(difference))} {side} "
        "the prediction"
    )


def _peak_place(report: Report) -> str:
    graph = report.peak_graph
    if report.eager_peak_nbytes:
        return "code in eager mode, as it goes backward outside of the planned graphs"
    if graph is None or not graph.peak_step:
        return ""
    source = f" ({graph.peak_source})" if graph.peak_source else ""
    inside = f" in {graph.name}" if len(report.graphs) > 1 else ""
    return f"`{graph.peak_step}`{source}{inside}"


def formula_text(report: Report) -> str:
    """The simulated peak over the sizes that vary; "" where none does."""
    formula = report.peak_formula
    if formula is None:
        return ""
    words = [f"peak = {formula.text()}, as simulated; {formula.legend()}"]
    for one in report.smaller_formulas:
        sizes = ", ".join(f"{symbol.name} {symbol.highest}" for symbol in one.symbols)
        words.append(f"by the plan for up to {sizes}: peak = {one.text()}")
    return "; ".join(words)


def _times(report: Report) -> str:
    before, after = format_us_apart(report.baseline_time_us, report.predicted_time_us)
    return f"{before} -> {after} predicted, {bound_text(report)}"


def throughput_text(report: Report) -> str:
    """What the step does per second, and beside its budget; "" where nobody asked."""
    found = report.throughput
    return report.no_throughput if found is None else found.text()


def code_text(report: Report) -> str:
    """What the step takes by the kernels that are generated for it, where their code was read."""
    if report.code_times_us is None:
        return ""
    before, after = format_us_apart(*report.code_times_us)
    return f"{before} -> {after} as generated: library calls measured, loops estimated"


def bound_text(report: Report) -> str:
    """What is proven of the step's time: of the model, whose operations are timed one by one."""
    if report.bound_us <= 0:
        return "no proven bound"
    return f"proven bound of the model {format_us(report.bound_us)}"


def _solver(report: Report) -> str:
    graphs = f", {len(report.graphs)} graphs" if len(report.graphs) > 1 else ""
    late = f"; left out: {', '.join(report.left_out)}" if report.left_out else ""
    return f"{report.status} ({report.method}, {report.solve_seconds:.1f} s{graphs}{late})"


def _torch(report: Report) -> str:
    return f"torch {report.torch_version}" if report.torch_version else ""


def _some(items: tuple[object, ...], noun: str) -> str:
    if not items:
        return ""
    first, _, rest = noun.partition(" ")
    counted = f"{_plural(len(items), first)} {rest}".rstrip()
    return f"{counted}: {'; '.join(map(str, items[:3]))}{'; ...' if len(items) > 3 else ''}"


@dataclass(frozen=True, slots=True)
class _Group:
    """Values that differ only in the number of their layer."""

    values: tuple[ValueReport, ...]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)

    @property
    def time_us(self) -> float:
        return sum(value.recompute_us for value in self.values)

    def row(self) -> tuple[str, str, str, str, str]:
        """Count and size, recompute time, source, place, reason of the first."""
        first, count = self.values[0], len(self.values)
        folded = count > 1
        times = f"{count} x " if folded else ""
        module = _layer_pattern(first.module) if folded else first.module
        place = f"{module} ({first.op})" if module and first.op else module or first.op
        name = place if folded else place or first.name
        return (
            f"{times}{format_nbytes(first.nbytes)}",
            f"{format_us(self.time_us)}" if self.time_us else "",
            _shortened(first.source, 28),
            _shortened(name, 36),
            _one_line(first.reason),
        )


def _fold(values: Iterable[ValueReport]) -> list[_Group]:
    groups: dict[tuple[object, ...], list[ValueReport]] = {}
    for value in values:
        # Without a place nothing tells that two values are the same one of two layers.
        place = (value.source, _layer_pattern(value.module)) if value.module else (value.name,)
        key = (*place, value.op, value.shape, value.dtype, value.nbytes, value.recomputes)
        groups.setdefault(key, []).append(value)
    return [_Group(tuple(group)) for group in groups.values()]


def _table(
    title: str, groups: list[_Group], rank: Callable[[_Group], float], width: int | None
) -> list[str]:
    if not groups:
        return []
    shown = sorted(groups, key=rank, reverse=True)[:_ROWS]
    rows = [group.row() for group in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    if width is not None and width < _WIDE:
        rows = [(size, time, "", place, "") for size, time, _, place, _ in rows]
        widths[2] = 0
        widths[3] = max(8, width - sum(widths[:2]) - 2 * sum(map(bool, widths)))
    lines = []
    for size, time, source, place, reason in rows:
        columns = (
            size.rjust(widths[0]),
            time.rjust(widths[1]),
            source.ljust(widths[2]),
            _shortened(place, widths[3]).ljust(widths[3]),
        )
        kept = [cell for cell, room in zip(columns, widths, strict=True) if room]
        line = "  ".join(["", *kept, reason]).rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: width - 3]}...")
    return ["", *_wrapped(title, width), *lines]


def _layer_pattern(module: str) -> str:
    """The module's path with the number of its layer left open."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module)


def _shortened(text: str, width: int) -> str:
    text = _one_line(text)
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def capitalised(text: str) -> str:
    """As a sentence begins."""
    return text[:1].upper() + text[1:]
