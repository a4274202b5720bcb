"""The report as JSON text and back.

Enters: a `Report`, or text from anywhere. Leaves: strict JSON (no NaN, no Infinity) or a checked
`Report`; text that is not one raises `ReportError` with the reason. The totals are written for
readers with other tools (`jq .gap`) and must agree with the graphs when read back. Values, steps
and spans are columns, their texts numbers into the table `texts`: a step of 10,000 operations
takes about two megabytes.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from autoremat_solver.plan import Status

from autoremat.reporting.columns import Texts, from_columns, to_columns
from autoremat.reporting.fields import ReportError
from autoremat.reporting.model import SCHEMA, Report, ValueReport
from autoremat.reporting.timeline import Span, Step

_SCHEMA_NAME, _SCHEMA_VERSION = SCHEMA.split("/")
_STATUS_BY_NAME = {status.name.lower(): status for status in Status}
_COLUMNAR = (ValueReport, Step, Span)
_TEXTS = "texts"
_TOTALS = (
    "resident_nbytes",
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
    texts = Texts()
    data = _encoded(Report, report, texts)
    document = {"schema": SCHEMA, **_totals(report), **data, _TEXTS: texts.table()}
    # One line per field: a difference of two reports shows where they differ.
    lines = (
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for name, value in document.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(text: str) -> Report:
    """The report that `write` wrote.

    Raises:
        ReportError: if the text is no JSON, incomplete, of another schema, or contradictory.
    """
    data = _parse(text)
    _check_schema(data)
    totals = {name: data.pop(name) for name in _TOTALS if name in data}
    texts = data.pop(_TEXTS, [])
    report: Report = _decoded(Report, data, "the report", texts)
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
    other = re.fullmatch(rf"{re.escape(_SCHEMA_NAME)}/([0-9]{{1,9}})", str(schema))
    if other and int(other[1]) > int(_SCHEMA_VERSION):
        raise ReportError(
            f"The report has schema {schema!r}, written by a newer autoremat; this one reads "
            f"{SCHEMA!r}. Update autoremat to read it."
        )
    if other:
        raise ReportError(
            f"The report has schema {schema!r}, written by an older autoremat, without what this "
            f"one shows ({SCHEMA!r}). Plan the model again and write a new report."
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


def _names(part: Any) -> list[str]:
    return [field.name for field in fields(part)]


@cache
def _hints(part: type) -> dict[str, Any]:
    return get_type_hints(part)


def _encoded(hint: Any, value: Any, texts: Texts) -> Any:
    """A part of the report as plain data, by the type of its field."""
    item = _item_of(hint)
    if item in _COLUMNAR:
        return to_columns(item, value, texts)
    if item is not None:
        return [_encoded(item, entry, texts) for entry in value]
    if isinstance(value, Status):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {
            f.name: _encoded(hints[f.name], getattr(value, f.name), texts) for f in fields(value)
        }
    return value


def _decoded(hint: Any, data: Any, where: str, texts: object) -> Any:
    """What `_encoded` was given; fields of plain types are checked by the classes themselves."""
    item = _item_of(hint)
    if item in _COLUMNAR:
        return from_columns(item, data, texts)
    if item is not None:
        if not isinstance(data, list):
            raise ReportError(f"{where} is a {type(data).__name__}; expected a list.")
        return tuple(_decoded(item, entry, f"an item of {where}", texts) for entry in data)
    if isinstance(hint, UnionType):
        if data is None and NoneType in get_args(hint):
            return None
        parts = [option for option in get_args(hint) if is_dataclass(option)]
        return _decoded(parts[0], data, where, texts) if parts else data
    if is_dataclass(hint):
        return _part(hint, data, where, texts)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _member(hint, data, where)
    return data


def _part(part: Any, data: object, where: str, texts: object) -> Any:
    """The dataclass of a JSON object that has exactly its fields."""
    if not isinstance(data, dict):
        raise ReportError(f"Expected {where} as a JSON object, found a {type(data).__name__}.")
    names = _names(part)
    for missing in (name for name in names if name not in data):
        raise ReportError(f"The JSON of {where} lacks {missing!r}. Is the file complete?")
    for unknown in (name for name in data if name not in names):
        raise ReportError(f"The JSON of {where} has the unknown field {unknown!r:.80}.")
    hints = _hints(part)
    return part(**{name: _decoded(hints[name], data[name], name, texts) for name in names})


def _member(kind: type[StrEnum], data: object, where: str) -> StrEnum:
    names = _STATUS_BY_NAME if kind is Status else {member.value: member for member in kind}
    if not isinstance(data, str) or data not in names:
        raise ReportError(f"{where} is {data!r:.80}; expected one of {', '.join(names)}.")
    return names[data]


def _item_of(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is tuple else None
