"""What the command line was given, as values: what commands share. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Refusal(Exception):
    """Input that cannot be used; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class PlanArguments:
    """What to plan for.

    Attributes:
        budget: as the user wrote it; None for a curve.
        device: as the user wrote it; None for the model's own.
        optimizer: name of an optimizer, or None.
        compiler: "inductor" or "eager".
        time_limit: seconds for the solver.
        points: of the curve.
        setup: fields of a `TrainingSetup`, as the user wrote them.
        code: whether code for a GPU that is not here is generated and read.
        offload: where values may wait, as the user wrote it; None if none may.
        link: how they get there; None for the device's own.
        sizes: ranges of sizes, as the user wrote them; None for those of the batch alone.
        goal: what the report tells beside the plan.
    """

    budget: str | None
    device: str | None
    optimizer: str | None
    compiler: str
    time_limit: float
    points: int
    setup: Mapping[str, Any] = field(default_factory=dict)
    code: bool = True
    offload: str | None = None
    link: str | None = None
    sizes: str | None = None
    goal: str = "time"

    def check(self) -> None:
        """Refuse what no command can use.

        Raises:
            Refusal: if the limit is no finite number of seconds.
        """
        if not 0 <= self.time_limit < float("inf"):
            raise Refusal(f"The time limit is {self.time_limit}: give a finite number of seconds.")
        if self.points == 1:
            raise Refusal("A curve has two ends: give --curve 0 or at least 2.")


@dataclass(frozen=True)
class FitArguments:
    """Which sizes to look for.

    Attributes:
        budget: as the user wrote it.
        over: "batch", "sequence", another name of a size, or "batch,sequence".
        global_batch: to be made of several, or None.
        device: as the user wrote it; None for the model's own.
        optimizer: name of a class of `torch.optim`, or None.
        compiler: "inductor" or "eager".
        time_limit: seconds for the solver, for each size.
        reserve: share of the budget to be left free.
        most: the largest size to try, or None.
        multiple_of: of which all sizes are multiples.
        points: sizes to plan to find the fastest.
    """

    budget: str
    over: str
    global_batch: int | None
    device: str | None
    optimizer: str | None
    compiler: str
    time_limit: float
    reserve: float
    most: int | None
    multiple_of: int
    points: int

    @property
    def is_over_both(self) -> bool:
        """Whether the batch is asked for at several lengths of sequences."""
        return set(self.over.replace(" ", "").split(",")) == {"batch", "sequence"}


def outputs_asked(**paths: Path | None) -> dict[str, Path]:
    """The files that were asked for, by format."""
    return {name: path for name, path in paths.items() if path is not None}
