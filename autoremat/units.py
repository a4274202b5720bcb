"""Bytes and microseconds in words.

Enters: a number. Leaves: text for people, as errors, reports and tables write it; and what a unit
of theirs means in a text of a user's. Guarantees: needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping

NBYTES_PER_UNIT = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
"""What users may write, in lower case."""

_DECIMAL_UNITS = ("kB", "MB", "GB", "TB")
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_nbytes(nbytes: int, *, binary: bool = False, digits: int = 1) -> str:
    """A size for people: "11.3 GB", or "10.5 GiB" if `binary`; exact below one kB or KiB.

    Args:
        nbytes: the size in bytes; may be negative (a difference).
        binary: powers of 1024 instead of 1000.
        digits: after the decimal point.
    """
    factor, units = (1024, _BINARY_UNITS) if binary else (1000, _DECIMAL_UNITS)
    if abs(nbytes) < factor:
        return f"{nbytes} B"
    power = 1
    # Compared after rounding, so that 999.96 MB is written 1.0 GB and not 1000.0 MB.
    while power < len(units) and abs(round(nbytes / factor**power, digits)) >= factor:
        power += 1
    return f"{nbytes / factor**power:.{digits}f} {units[power - 1]}"


def format_nbytes_apart(first_nbytes: int, second_nbytes: int) -> tuple[str, str]:
    """Two sizes with as many digits as it takes to tell them apart, if they differ."""
    for digits in range(1, 13):
        first = format_nbytes(first_nbytes, digits=digits)
        second = format_nbytes(second_nbytes, digits=digits)
        if first != second or first_nbytes == second_nbytes:
            return first, second
    return f"{first_nbytes} B", f"{second_nbytes} B"


def format_us(time_us: float, *, digits: int = 1) -> str:
    """A duration for people: "850.0 us", "1.9 ms", "2.3 s"."""
    for unit, scale in (("us", 1.0), ("ms", 1e3)):
        if round(time_us / scale, digits) < 1000:
            return f"{time_us / scale:.{digits}f} {unit}"
    return f"{time_us / 1e6:.{digits}f} s"


def format_us_apart(first_us: float, second_us: float) -> tuple[str, str]:
    """Two durations with as many digits, up to four, as it takes to tell them apart."""
    texts = [(format_us(first_us, digits=n), format_us(second_us, digits=n)) for n in (1, 2, 3, 4)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def format_parts(nbytes_by_name: Mapping[str, int]) -> str:
    """Parts of a whole in words: "0.5 GB parameters, 0.7 GB optimizer state"; "" for nothing."""
    named = nbytes_by_name.items()
    return ", ".join(f"{format_nbytes(nbytes)} {name}" for name, nbytes in named if nbytes)
