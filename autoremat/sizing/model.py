"""What `fit` found: the largest size within a budget, the fastest one, and what stands between.

Enters: figures of the sizes that were planned. Leaves: frozen dataclasses, which say themselves as
text, strict JSON, CSV, a picture and a page. Guarantees: whatever is said to fit was planned at
that very size; no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from autoremat.reporting.formula import PeakFormula

SCHEMA = "autoremat.fit/1"
WAYS = ("autoremat", "plain step", "every layer", "torch's budget")  # ours first


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the step at one size.

    Attributes:
        peak_nbytes: highest live bytes of the step, resident ones included.
        time_us: predicted duration of forward and backward.
        recompute_share: of that, what runs again.
        fits: whether the peak is within the budget.
        method: which strategy it is.
    """

    peak_nbytes: int
    time_us: float
    recompute_share: float
    fits: bool
    method: str = ""


@dataclass(frozen=True, slots=True)
class FitPoint:
    """A size for which a plan fits.

    Attributes:
        size: such as the batch.
        plan: ours, at the budget.
        plain: the step without a plan, by the same meter.
        every_layer: every layer recomputed, as checkpoints do by hand; None where the model has no
            layers, or that cannot be compiled.
        torch_budget: torch's `activation_memory_budget` at the loosest setting that fits, or at the
            leanest, as `method` says; None where torch cannot.
        seconds: that planning took.
    """

    size: int
    plan: Way
    plain: Way
    every_layer: Way | None = None
    torch_budget: Way | None = None
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Samples (or what the size counts) per second, by the plan."""
        return rate(self.size, self.plan)

    @property
    def ways(self) -> dict[str, Way]:
        """By name, those that are known."""
        found = zip(WAYS, (self.plan, self.plain, self.every_layer, self.torch_budget), strict=True)
        return {name: way for name, way in found if way is not None}


@dataclass(frozen=True, slots=True)
class Refused:
    """A size that cannot be used.

    Attributes:
        size: such as the batch.
        smallest_peak_nbytes: the budget that it would need; None where the model, or the function
            that makes the batch, does not accept it.
        reason: why, one sentence.
        seconds: that finding it out took.
    """

    size: int
    smallest_peak_nbytes: int | None
    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How a wanted global batch is made of several, whose gradients add up.

    Attributes:
        size: of each but the last.
        steps: forwards and backwards to one step of the optimizer.
        last: size of the last one.
        plan: of one of them, beside the gradients of those before.
    """

    size: int
    steps: int
    last: int
    plan: Way

    @property
    def time_us(self) -> float:
        """Of all of them; a smaller last one counts as a whole one."""
        return self.steps * self.plan.time_us


@dataclass(frozen=True, slots=True)
class Fit:
    """Which sizes fit a budget.

    Attributes:
        target: class of the model, or what the user named.
        over: what the size is: "batch", "sequence", ...
        budget_nbytes: the allowed peak.
        reserve_nbytes: of the budget, what was kept free on request (`reserve=`).
        largest: the largest size found for which a plan fits.
        fastest: of the sizes that were planned, the one with the most per second.
        points: those sizes, ascending.
        refused: sizes that were tried and do not fit, ascending.
        step: sizes are multiples of it.
        accumulation: for the global batch that was asked for.
        formula: of the plan for the largest size, its peak over the size; None where the model
            insists on the number, or under Inductor, whose code has another peak.
        device: its name.
        compiler: what would compile the step.
        optimizer: class of the optimizer that is counted, or "".
        notes: what the user has to know beside, one sentence each.
        seconds: of all.
    """

    target: str
    over: str
    budget_nbytes: int
    reserve_nbytes: int
    largest: FitPoint
    fastest: FitPoint
    points: tuple[FitPoint, ...]
    refused: tuple[Refused, ...] = ()
    step: int = 1
    accumulation: Accumulation | None = None
    formula: PeakFormula | None = None
    device: str = ""
    compiler: str = ""
    optimizer: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuses a result that contradicts itself.

        Raises:
            ValueError: naming what.
        """
        sizes = [point.size for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"The sizes of a fit ascend, each once; these are {sizes}.")
        if self.largest not in self.points or self.fastest not in self.points:
            raise ValueError("The largest and the fastest size of a fit are among its points.")
        if self.largest.size != sizes[-1]:
            raise ValueError(f"Size {sizes[-1]} fits as well, above the largest of a fit.")
        over = [point.size for point in self.points if not point.plan.fits]
        if over:
            raise ValueError(f"A point of a fit does not fit: {self.over} {over[0]}.")

    @property
    def is_tight(self) -> bool:
        """Whether the next size was planned and refused."""
        return any(one.size == self.largest.size + self.step for one in self.refused)

    @property
    def margin_nbytes(self) -> int:
        """What the largest size leaves of the budget, by its predicted peak."""
        return self.budget_nbytes - self.largest.plan.peak_nbytes

    @property
    def largest_plain(self) -> int | None:
        """Of the points, the largest size at which the step fits without a plan."""
        return max((point.size for point in self.points if point.plain.fits), default=None)

    @property
    def unit(self) -> str:
        """What is counted per second."""
        return {"batch": "samples", "sequence": "tokens of each sequence"}.get(self.over, self.over)

    def text(self) -> str:
        """The answer, and a table of the sizes that were planned."""
        from autoremat.sizing.text import text

        return text(self)

    def to_json(self) -> str:
        """One object, in strict JSON."""
        return json.dumps(_finite({"schema": SCHEMA, **asdict(self)}), allow_nan=False)

    def to_csv(self) -> str:
        """A row for each size and way to run it."""
        from autoremat.sizing.text import csv

        return csv(self)

    def to_svg(self) -> str:
        """Throughput over size at the budget, as one SVG file."""
        from autoremat.sizing.plot import plot

        return plot(self)

    def to_html(self) -> str:
        """Answer, picture and table as one page without a network."""
        from autoremat.sizing.plot import page

        return page(self)


def rate(size: int, way: Way) -> float:
    """What is done per second; 0 where no time is known."""
    return 1e6 * size / way.time_us if way.time_us > 0 else 0.0


def _finite(document: dict[str, object]) -> dict[str, object]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in document.items()
    }
