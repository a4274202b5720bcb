"""A claim about all plans, held against a plan that exists.

Enters: a bound or a floor, and what a checked plan takes. Leaves: whether both can be true. Where
they cannot, the claim is a defect: it is told with both numbers, and never trimmed to fit.
"""

from __future__ import annotations

import warnings

NOISE = 1e-9  # of a number: sums of the same times in another order differ by less


class CertificateError(RuntimeError):
    """What was proven of all plans is not true of one that exists; the plan itself is valid."""


class CertificateWarning(RuntimeWarning):
    """The same as `CertificateError`, where the plan is used all the same, without certificate."""


def holds(claim: str, claimed: float, found: float, *, strict: bool, stacklevel: int = 2) -> bool:
    """Whether a lower bound is at most what a plan takes; told if it is not.

    Args:
        claim: what was claimed, in words, with its unit.
        claimed: no plan takes less.
        found: what a plan takes.
        strict: raise instead of a warning.
        stacklevel: as of `warnings.warn`.

    Raises:
        CertificateError: if it does not hold and `strict` is given.
    """
    if claimed <= found * (1 + NOISE):
        return True
    text = (
        f"The {claim} is {claimed:.15g}, but there is a plan of {found:.15g}. The plan is valid, "
        "what was proven of it is not, and is dropped: this is a defect, please report it."
    )
    if strict:
        raise CertificateError(text)
    warnings.warn(CertificateWarning(text), stacklevel=stacklevel + 1)
    return False
