"""Many equal records as a few columns: compact JSON for thousands of steps and values.

Enters: frozen dataclasses of one class, or the JSON of them. Leaves: one list per field, texts
replaced by their numbers in a `Texts` table, or the dataclasses again. JSON that does not hold
what it should raises `ReportError`.
"""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from autoremat.reporting.fields import ReportError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Texts:
    """Each distinct text once, in the order in which they were first met."""

    def __init__(self) -> None:
        """Start with none."""
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The text's place in the table."""
        return self._numbers.setdefault(text, len(self._numbers))

    def table(self) -> list[str]:
        """All texts."""
        return list(self._numbers)


def to_columns(kind: type[T], items: tuple[T, ...], texts: Texts) -> dict[str, list[Any]]:
    """One list per field of the class."""
    hints = get_type_hints(kind)
    columns: dict[str, list[Any]] = {}
    for field in fields(kind):
        column = [getattr(item, field.name) for item in items]
        hint = hints[field.name]
        if _is_text(hint):
            column = [texts.number(str(entry)) for entry in column]
        elif hint is bool:
            column = [int(entry) for entry in column]
        columns[field.name] = column
    return columns


def from_columns(kind: type[T], data: object, texts: object) -> tuple[T, ...]:
    """The items that `to_columns` wrote.

    Raises:
        ReportError: if the columns are not those of the class, or differ in length.
    """
    names = [field.name for field in fields(kind)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        raise ReportError(f"The columns of {kind.__name__} are not {', '.join(names)}.")
    hints = get_type_hints(kind)
    columns = [_entries(kind, name, hints[name], data[name], texts) for name in names]
    if len({len(column) for column in columns}) > 1:
        raise ReportError(f"The columns of {kind.__name__} differ in length.")
    return tuple(kind(*row) for row in zip(*columns, strict=True))


def _entries(kind: type, name: str, hint: Any, column: object, texts: object) -> list[Any]:
    where = f"column {name!r} of {kind.__name__}"
    if not isinstance(column, list):
        raise ReportError(f"The {where} is a {type(column).__name__}; expected a list.")
    if _is_text(hint):
        column = [_text(where, entry, texts) for entry in column]
        if hint is not str:
            return [_member(where, hint, entry) for entry in column]
    elif hint is bool:
        if not {0, 1}.issuperset(entry if type(entry) is int else -1 for entry in column):
            raise ReportError(f"The {where} holds something other than 0 and 1.")
        return [bool(entry) for entry in column]
    return [tuple(entry) if isinstance(entry, list) else entry for entry in column]


def _is_text(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, str)


def _text(where: str, number: object, texts: object) -> Any:
    if not isinstance(texts, list):
        raise ReportError(f"texts is a {type(texts).__name__}; expected a list.")
    if type(number) is not int or not 0 <= number < len(texts):
        raise ReportError(f"The {where} holds {number!r:.80}, which is no number of a text.")
    return texts[number]


def _member(where: str, kind: type[StrEnum], name: Any) -> StrEnum:
    try:
        return kind(name)
    except ValueError as error:
        raise ReportError(f"The {where} holds something unknown: {error}.") from error
