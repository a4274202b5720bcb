"""What the user may ask for about random numbers that the backward needs; needs no torch."""

from __future__ import annotations

from enum import StrEnum


class DropoutPolicy(StrEnum):
    """What becomes of random numbers that the backward needs."""

    REPLAY = "replay"
    SAVE_MASKS = "save_masks"


def parse_dropout(given: object) -> DropoutPolicy | None:
    """The policy that the user names; None leaves it to what is safe.

    Raises:
        ValueError: naming the accepted forms.
    """
    if given is None:
        return None
    if isinstance(given, str) and given in tuple(DropoutPolicy):
        return DropoutPolicy(given)
    forms = " or ".join(f'"{policy}"' for policy in DropoutPolicy)
    raise ValueError(f"dropout is {forms} (or None for the safe one of them), not {given!r}.")
