"""The report as JSON text and back.

Enters: a `Report`, or text from anywhere. Leaves: strict JSON (no NaN, no Infinity) or a checked
`Report`; text that is not one raises `ReportError` with the reason. The totals are written for
readers with other tools (`jq .gap`) and must agree with the graphs when read back.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, fields
from typing import Any, NoReturn

from autoremat_solver.plan import Status

from autoremat.reporting.fields import ReportError
from autoremat.reporting.model import (
    SCHEMA,
    GraphReport,
    Report,
    ValueAction,
    ValueReport,
)

_SCHEMA_NAME, _SCHEMA_VERSION = SCHEMA.split("/")
_STATUS_BY_NAME = {status.name.lower(): status for status in Status}
_TOTALS = (
    "predicted_peak_nbytes",
    "baseline_peak_nbytes",
    "predicted_time_us",
    "baseline_time_us",
    "bound_us",
    "gap",
    "status",
    "method",
    "solve_seconds",
    "peak_step",
)


def write(report: Report) -> str:
    """The report as strict JSON text. A gap without a bound is null."""
    data = asdict(report)
    graphs = data.pop("graphs")
    for graph in graphs:
        graph["status"] = graph["status"].name.lower()
    document = {"schema": SCHEMA, **data, **_totals(report), "graphs": graphs}
    return json.dumps(document, indent=1, allow_nan=False)


def read(text: str) -> Report:
    """The report that `write` wrote.

    Raises:
        ReportError: if the text is no JSON, incomplete, of another schema, or contradictory.
    """
    data = _parse(text)
    _check_schema(data)
    totals = {name: data.pop(name) for name in _TOTALS if name in data}
    fields_of_report = _fields_of(Report, data, "the report")
    graphs = _list(fields_of_report["graphs"], "graphs")
    fields_of_report["graphs"] = tuple(_read_graph(graph) for graph in graphs)
    report = Report(**fields_of_report)
    _check_totals(report, totals)
    return report


def _totals(report: Report) -> dict[str, Any]:
    totals = {name: getattr(report, name) for name in _TOTALS}
    totals["gap"] = report.gap if math.isfinite(report.gap) else None
    totals["status"] = report.status.name.lower() if report.status else None
    return totals


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"This is no report: the text is not JSON ({error}). Is the file complete?"
        ) from error
    if not isinstance(data, dict):
        raise ReportError(
            f"This is no report: expected a JSON object with schema {SCHEMA!r}, found a "
            f"{type(data).__name__}."
        )
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_schema(data: dict[str, Any]) -> None:
    schema = data.pop("schema", None)
    if schema == SCHEMA:
        return
    newer = re.fullmatch(rf"{re.escape(_SCHEMA_NAME)}/([0-9]{{1,9}})", str(schema))
    if newer and int(newer[1]) > int(_SCHEMA_VERSION):
        raise ReportError(
            f"The report has schema {schema!r}, written by a newer autoremat; this one reads "
            f"{SCHEMA!r}. Update autoremat to read it."
        )
    raise ReportError(f"This is no report: expected schema {SCHEMA!r}, found {schema!r:.80}.")


def _check_totals(report: Report, totals: dict[str, Any]) -> None:
    expected = _totals(report)
    for name, value in totals.items():
        if value != expected[name]:
            raise ReportError(
                f"The report contradicts itself: {name} is {value!r:.80}, but its graphs give "
                f"{expected[name]!r}."
            )


def _read_graph(data: object) -> GraphReport:
    graph = _fields_of(GraphReport, data, "a graph")
    if not isinstance(graph["status"], str) or graph["status"] not in _STATUS_BY_NAME:
        raise ReportError(
            f"Graph {graph['name']!r:.80}: status is {graph['status']!r:.80}; expected one of "
            f"{', '.join(_STATUS_BY_NAME)}."
        )
    graph["status"] = _STATUS_BY_NAME[graph["status"]]
    graph["values"] = tuple(_read_value(value) for value in _list(graph["values"], "values"))
    return GraphReport(**graph)


def _read_value(data: object) -> ValueReport:
    value = _fields_of(ValueReport, data, "a value")
    try:
        value["action"] = ValueAction(value["action"])
    except ValueError as error:
        raise ReportError(f"Value {value['name']!r:.80}: {error}.") from error
    return ValueReport(**value)


def _fields_of(part: type, data: object, where: str) -> dict[str, Any]:
    """The part's fields from its JSON object, lists as tuples; exactly the declared ones."""
    if not isinstance(data, dict):
        raise ReportError(f"Expected {where} as a JSON object, found a {type(data).__name__}.")
    names = [field.name for field in fields(part)]
    for missing in (name for name in names if name not in data):
        raise ReportError(f"The JSON of {where} lacks {missing!r}. Is the file complete?")
    for unknown in (name for name in data if name not in names):
        raise ReportError(f"The JSON of {where} has the unknown field {unknown!r:.80}.")
    return {name: _as_tuple(data[name]) for name in names}


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _list(value: object, name: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise ReportError(f"{name} is a {type(value).__name__}; expected a list.")
    return value
