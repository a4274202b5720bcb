"""Frozen dataclasses whose fields are what their types say.

Enters: a dataclass made of counts (`int`), amounts (`float`), texts, enums, other dataclasses and
tuples of these. Leaves: nothing, or a `ReportError` that names the field. Numbers are finite and
not negative: a report has no others, and JSON could not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


_Check = Callable[[object], bool]


class ReportError(ValueError):
    """A report that cannot be read or contradicts itself. The message names the culprit."""


def check_fields(part: DataclassInstance) -> None:
    """Refuses a part of a report whose fields are not what their types say.

    Raises:
        ReportError: naming the part, the field and what it should be.
    """
    for name, hint, fits in _checks(type(part)):
        value = getattr(part, name)
        if not fits(value):
            title = getattr(part, "name", None)
            owner = type(part).__name__ + (f" {title!r:.80}" if title is not None else "")
            raise ReportError(f"{owner}: {name} is {value!r:.80}; expected {_in_words(hint)}.")


# A report has ten thousands of parts: what a type allows is worked out once per class.
@cache
def _checks(part: type[DataclassInstance]) -> tuple[tuple[str, Any, _Check], ...]:
    hints = get_type_hints(part)
    return tuple((f.name, hints[f.name], _check_of(hints[f.name])) for f in fields(part))


def _check_of(hint: Any) -> _Check:
    if get_origin(hint) is tuple:
        fits = _check_of(get_args(hint)[0])
        return lambda value: isinstance(value, tuple) and all(map(fits, value))
    if isinstance(hint, UnionType):
        options = [_check_of(option) for option in get_args(hint)]
        return lambda value: any(fits(value) for fits in options)
    if hint is int or hint is float:
        kinds: tuple[type[int] | type[float], ...] = (int,) if hint is int else (int, float)
        return lambda value: _is_number(value, kinds)
    return lambda value: isinstance(value, hint)


def _is_number(value: Any, kinds: tuple[type[int] | type[float], ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < math.inf


def _in_words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple, each item {_in_words(get_args(hint)[0])}"
    if isinstance(hint, UnionType):
        return ", or ".join(_in_words(option) for option in get_args(hint))
    return _EXPECTED.get(hint, f"a {getattr(hint, '__name__', hint)}")
