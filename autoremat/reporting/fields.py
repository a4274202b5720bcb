"""Frozen dataclasses whose fields are what their types say.

Enters: a dataclass made of counts (`int`), amounts (`float`), texts, enums, other dataclasses and
tuples of these. Leaves: nothing, or a `ReportError` that names the field. Numbers are finite and
not negative: a report has no others, and JSON could not hold them.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_EXPECTED = {
    int: "a whole number, not negative",
    float: "a finite number, not negative",
    str: "a text",
    NoneType: "nothing",
}


class ReportError(ValueError):
    """A report that cannot be read or contradicts itself. The message names the culprit."""


def check_fields(part: DataclassInstance) -> None:
    """Refuses a part of a report whose fields are not what their types say.

    Raises:
        ReportError: naming the part, the field and what it should be.
    """
    hints = _hints(type(part))
    for field in fields(part):
        value, hint = getattr(part, field.name), hints[field.name]
        if not _fits(value, hint):
            name = getattr(part, "name", None)
            owner = type(part).__name__ + (f" {name!r:.80}" if name is not None else "")
            raise ReportError(
                f"{owner}: {field.name} is {value!r:.80}; expected {_in_words(hint)}."
            )


# Resolving the annotations of a class takes longer than checking an instance.
@cache
def _hints(part: type) -> dict[str, Any]:
    return get_type_hints(part)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(entry, item) for entry in value)
    if isinstance(hint, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is int or hint is float:
        return _is_number(value, hint)
    return isinstance(value, hint)


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        return False
    return 0 <= value < math.inf


def _in_words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple, each item {_in_words(get_args(hint)[0])}"
    if isinstance(hint, UnionType):
        return ", or ".join(_in_words(option) for option in get_args(hint))
    return _EXPECTED.get(hint, f"a {getattr(hint, '__name__', hint)}")
