"""Peak and time of ways to run a step: the points of the report's curve.

Enters: bytes and microseconds. Leaves: frozen values. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoremat.reporting.fields import check_fields


class PointKind(StrEnum):
    """Who found a point of the curve of peak and time."""

    PLAN = "plan"
    """A plan of ours, at some budget."""
    OFFLOAD = "offload"
    """The same with values that wait elsewhere."""
    CHOSEN = "chosen"
    """The plan that this report is about."""
    STRATEGY = "strategy"
    """A classic strategy, such as recomputing every layer."""
    TORCH = "torch"
    """PyTorch's built-in partitioner at one of its settings."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One way to run the step: its peak and its time.

    Attributes:
        peak_nbytes: highest live bytes.
        time_us: duration of the step.
        label: such as "every layer" or "torch, budget 0.5".
        kind: who found it.
        budget_nbytes: what was asked for, if anything was.
    """

    peak_nbytes: int
    time_us: float
    label: str
    kind: PointKind
    budget_nbytes: int | None = None

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)
