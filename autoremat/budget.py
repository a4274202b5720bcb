"""The user's budget as bytes.

Enters: what a user may write, `"40GB"`, `"37.5 GiB"`, `"80%"` or a number of bytes. Leaves: a
positive `int` of bytes, or a `ValueError` that names the accepted forms. Guarantees: exact
arithmetic, rounded down to a whole byte; the device is asked only if the budget is a percentage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from numbers import Integral

from autoremat.reporting.text import format_nbytes

__all__ = ["budget_argument", "format_nbytes", "parse_budget"]

_DEVICE = "the device's memory"
_ACCEPTED_FORMS = (
    'Accepted: a size such as "40GB", "1.5 TB" (powers of 1000: B, KB, MB, GB, TB) or "40GiB" '
    "(powers of 1024: KiB, MiB, GiB, TiB), a whole number of bytes such as 40_000_000_000, or "
    'a share of {whole} such as "80%". It must be above zero.'
)

_NBYTES_PER_UNIT = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
# The digits are limited so that no text, however long, makes Python refuse or crawl.
_BARE_NBYTES = re.compile(r"[0-9](?:[0-9_]{0,29}[0-9])?")
_AMOUNT = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*(%|[a-z]+)\s*", re.IGNORECASE)


def parse_budget(budget: object, *, device_nbytes: Callable[[], int], whole: str = _DEVICE) -> int:
    """The budget in bytes.

    Args:
        budget: a size with its unit, a percentage, or an integer number of bytes. Case and
            blanks do not matter. A text without a unit is refused: `"40"` is no 40 bytes.
        device_nbytes: what a percentage is of, in bytes: as a rule the device's total memory;
            called only for a percentage.
        whole: what `device_nbytes` is, in words for the message.

    Raises:
        ValueError: if the budget is malformed, not above zero, or above 100 %.
    """
    if isinstance(budget, str):
        nbytes = _parse_text(budget, device_nbytes, whole)
    elif isinstance(budget, Integral) and not isinstance(budget, bool):
        nbytes = int(budget)
    else:
        raise _malformed(budget, f"is of type {type(budget).__name__}", whole)
    if nbytes <= 0:
        raise _malformed(budget, "is not above zero bytes", whole)
    return nbytes


def budget_argument(text: str) -> str | int:
    """A budget as the command line gets it, for `parse_budget`: there a bare number is bytes."""
    text = text.strip()
    # Two underscores in a row are none of Python's numbers.
    return int(text) if _BARE_NBYTES.fullmatch(text) and "__" not in text else text


def _parse_text(text: str, device_nbytes: Callable[[], int], whole: str) -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise _malformed(text, "is no number with a unit", whole)
    amount, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        return _share(text, amount, device_nbytes, whole)
    if unit not in _NBYTES_PER_UNIT:
        raise _malformed(text, f"has the unknown unit {match[2]!r}", whole)
    return int(amount * _NBYTES_PER_UNIT[unit])


def _share(text: str, percent: Fraction, device_nbytes: Callable[[], int], whole: str) -> int:
    if not 0 < percent <= 100:
        raise _malformed(text, "is not a percentage above 0 and up to 100", whole)
    total_nbytes = device_nbytes()
    if total_nbytes <= 0:
        raise ValueError(
            f"Budget {text!r} is a share of {whole}, whose size is unknown here. "
            'Give the budget in bytes, such as "40GB".'
        )
    return int(percent * total_nbytes / 100)


def _malformed(budget: object, fault: str, whole: str) -> ValueError:
    shown = repr(budget)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ValueError(f"Budget {shown} {fault}. {_ACCEPTED_FORMS.format(whole=whole)}")
