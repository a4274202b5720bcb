"""The user's budget as a value.

Enters: what a user may write, `"40GB"`, `"37.5 GiB"`, `"80%"`, a number of bytes, `"auto"` or
`"min"`; and `"75GB reserved"`, of what CUDA's allocator takes from the device. Leaves: a `Budget`,
or a `ValueError` that names the accepted forms. Guarantees: exact arithmetic, rounded down to a
whole byte; only a percentage needs to know what it is of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral

from autoremat.units import NBYTES_PER_UNIT

_DEVICE = "the device's memory"
_ACCEPTED_FORMS = (
    'Accepted: a size such as "40GB", "1.5 TB" (powers of 1000: B, KB, MB, GB, TB) or "40GiB" '
    "(powers of 1024: KiB, MiB, GiB, TiB), a whole number of bytes such as 40_000_000_000, "
    'a share of {whole} such as "80%"{words}. It must be above zero.'
)
_WORDS = (
    ', "auto" (what the device has free) or "min" (as little as can be); in plans for GPUs '
    '"75GB reserved"'
)
AUTO, LEAST = "auto", "min"

_LARGEST_NBYTES = 1 << 40  # of a device: what is no byte of it is too small a share of any
# The digits are limited so that no text, however long, makes Python refuse or crawl.
_BARE_NBYTES = re.compile(r"[0-9](?:[0-9_]{0,29}[0-9])?")
_RESERVED = re.compile(r"(.*\S)\s+reserved\s*", re.IGNORECASE | re.DOTALL)
_AMOUNT = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*(%|[a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A size in bytes, a share of what will be known later, or a word.

    Attributes:
        size_nbytes: the size; 0 if it is none.
        share: above 0 and up to 1; 0 if it is none.
        word: `AUTO` for what the device has free, `LEAST` for as little as can be, or "".
        of_reserved: whether it is of what the device's allocator reserves, not of what it gives.
        given: as the user wrote it.
        whole: what a share is of, in words for messages.
    """

    size_nbytes: int = 0
    share: Fraction = Fraction(0)
    word: str = ""
    of_reserved: bool = False
    given: str | int = field(default="", compare=False)
    whole: str = field(default=_DEVICE, compare=False)

    @classmethod
    def parse(cls, given: object, *, whole: str = _DEVICE) -> Budget:
        """The budget that a user writes.

        Args:
            given: a size with its unit, a percentage, an integer number of bytes, or, of a
                device's memory, a word. Case and blanks do not matter. A text without a unit is
                refused: `"40"` is no 40 bytes.
            whole: what a percentage is of, in words for messages.

        Raises:
            ValueError: if it is malformed, not above zero, or above 100 %.
        """
        size_nbytes, share, of_reserved = 0, Fraction(0), False
        if isinstance(given, str) and whole == _DEVICE:
            word = given.strip().lower()
            if word in (AUTO, LEAST):
                return cls(word=word, given=given)
        if isinstance(given, str):
            match = _RESERVED.fullmatch(given) if whole == _DEVICE else None
            of_reserved = match is not None
            if match is not None and _AMOUNT.fullmatch(match[1]) is None:
                raise _malformed(given, "is no size, nor a share, of what is reserved", whole)
            size_nbytes, share = _parse_text(match[1] if match else given, whole)
        elif isinstance(given, Integral) and not isinstance(given, bool):
            size_nbytes = given = int(given)
        else:
            raise _malformed(given, f"is of type {type(given).__name__}", whole)
        if size_nbytes <= 0 and share * _LARGEST_NBYTES < 1:
            raise _malformed(given, "is not above zero bytes", whole)
        return cls(size_nbytes, share, of_reserved=of_reserved, given=given, whole=whole)

    @property
    def is_free(self) -> bool:
        """Whether it is what the device has free."""
        return self.word == AUTO

    @property
    def is_least(self) -> bool:
        """Whether it is as little as can be."""
        return self.word == LEAST

    @property
    def is_share(self) -> bool:
        """Whether its bytes depend on what it is of."""
        return self.share > 0

    def nbytes(self, total_nbytes: int = 0) -> int:
        """The budget in bytes.

        Args:
            total_nbytes: what a share is of; 0 where that is not known.

        Raises:
            ValueError: if it is a share of something unknown, or below a byte.
        """
        if not self.is_share:
            return self.size_nbytes
        if total_nbytes <= 0:
            raise ValueError(
                f"Budget {self.given!r} is a share of {self.whole}, whose size is unknown here. "
                'Give the budget in bytes, such as "40GB".'
            )
        nbytes = int(self.share * total_nbytes)
        if nbytes <= 0:
            raise _malformed(self.given, "is not above zero bytes", self.whole)
        return nbytes


def budget_argument(text: str) -> str | int:
    """A budget as the command line gets it, for `Budget.parse`: there a bare number is bytes."""
    text = text.strip()
    # Two underscores in a row are none of Python's numbers.
    return int(text) if _BARE_NBYTES.fullmatch(text) and "__" not in text else text


def _parse_text(text: str, whole: str) -> tuple[int, Fraction]:
    """The size in bytes and the share, one of which is zero."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise _malformed(text, "is no number with a unit", whole)
    amount, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < amount <= 100:
            raise _malformed(text, "is not a percentage above 0 and up to 100", whole)
        return 0, amount / 100
    if unit not in NBYTES_PER_UNIT:
        raise _malformed(text, f"has the unknown unit {match[2]!r}", whole)
    return int(amount * NBYTES_PER_UNIT[unit]), Fraction(0)


def _malformed(budget: object, fault: str, whole: str) -> ValueError:
    shown = repr(budget)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    words = _WORDS if whole == _DEVICE else ""
    return ValueError(f"Budget {shown} {fault}. {_ACCEPTED_FORMS.format(whole=whole, words=words)}")
