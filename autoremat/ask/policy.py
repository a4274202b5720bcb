"""The strategies that a user may name in place of the planner; needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

_EVERY = re.compile(r"every-([1-9][0-9]{0,3})")
_PLAIN = ("optimal", "save-all", "recompute-all", "sqrt", "selective-attention")


@dataclass(frozen=True)
class Policy:
    """What decides which values are saved.

    Attributes:
        name: as the user writes it.
        layers: how many layers one segment has; 0 where the policy does not speak of layers.
    """

    name: str = "optimal"
    layers: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether the plan follows from the model alone, whatever the budget."""
        return self.name != "optimal"

    def __str__(self) -> str:
        """As an argument."""
        return f'policy="{self.name}"'


OPTIMAL = Policy()


def parse_policy(given: object) -> Policy:
    """The policy that the user names.

    Raises:
        ValueError: naming the accepted names.
    """
    if isinstance(given, str):
        if given in _PLAIN:
            return Policy(given)
        if given == "every-layer":
            return Policy(given, 1)
        if match := _EVERY.fullmatch(given):
            return Policy(given, int(match[1]))
    names = ", ".join(f'"{name}"' for name in _PLAIN)
    raise ValueError(
        f'policy is one of {names}, "every-layer", "every-2" (or another number of layers), '
        f"not {given!r:.80}."
    )
