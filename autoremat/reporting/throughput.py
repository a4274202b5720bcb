"""What a step does per second at its budget, at one below and at one above, and without any.

Enters: peaks and times of the plans that were made for these budgets. Leaves: frozen values, and
sentences. Guarantees: every rate is that of a plan that was made, none is interpolated; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoremat.reporting.fields import check_fields
from autoremat.units import format_nbytes, format_nbytes_apart, format_us

_LARGE_NBYTES = 5_000_000_000  # a budget of which a GB more or less is a step that one takes
_GB = 1_000_000_000
_SHARE = 10  # of a smaller budget, one part in so many
_SAME = 1 + 1e-9  # times of the same operations in another order


def step_nbytes(budget_nbytes: int) -> int:
    """By how much budgets beside one differ from it: a GB, or a tenth of one below 5 GB."""
    return _GB if budget_nbytes >= _LARGE_NBYTES else max(1, budget_nbytes // _SHARE)


@dataclass(frozen=True, slots=True)
class AtBudget:
    """The step as it was planned for a budget.

    Attributes:
        budget_nbytes: allowed peak; None where memory is no limit.
        needed_nbytes: the smallest budget that the plan fits.
        time_us: predicted duration of its forward and backward.
    """

    budget_nbytes: int | None
    needed_nbytes: int
    time_us: float

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def fits(self) -> bool:
        """Whether the plan is within the budget; else it is the leanest that was found."""
        return self.budget_nbytes is None or self.needed_nbytes <= self.budget_nbytes


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a step does per second, and what it would do with other budgets.

    Attributes:
        samples: size of the first dimension of the step's first input; 0 where it has none.
        tokens: numbers in the first input in which tokens are looked up, row by row; 0 without.
        here: the plan that the report is about.
        less: that for a step of memory less.
        more: that for a step of memory more.
        unlimited: that for any budget.
        runs: of graphs in the step; times are those of all together.
        is_of_kernels: whether times are those of the generated kernels, not of single operations.
    """

    samples: int
    tokens: int
    here: AtBudget
    less: AtBudget
    more: AtBudget
    unlimited: AtBudget
    runs: int = 1
    is_of_kernels: bool = False

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def unit(self) -> str:
        """What is counted per second."""
        return "samples" if self.samples else "steps"

    def per_second(self, at: AtBudget) -> float:
        """Samples (or steps) per second of a plan; 0 where no time is known."""
        return _rate(self.samples or 1, at)

    def tokens_per_second(self, at: AtBudget) -> float:
        """Tokens per second of a plan."""
        return _rate(self.tokens, at)

    def change(self, at: AtBudget) -> float:
        """How much more per second a plan does than this one, as a fraction."""
        now = self.per_second(self.here)
        return self.per_second(at) / now - 1 if now else 0.0

    @property
    def enough_nbytes(self) -> int:
        """The smallest budget known at which the step is as fast as with any."""
        most_us = self.unlimited.time_us * _SAME
        found = (self.here, self.more, self.unlimited)
        return min(at.needed_nbytes for at in found if at.time_us <= most_us)

    def rows(self) -> Iterator[tuple[str, AtBudget]]:
        """Each budget in words, the smallest first, and its plan."""
        here, less, more = (a.budget_nbytes or 0 for a in (self.here, self.less, self.more))
        yield f"{format_nbytes(here - less)} less", self.less
        yield "this budget", self.here
        yield f"{format_nbytes(more - here)} more", self.more
        yield "no limit", self.unlimited

    def rate_text(self, at: AtBudget) -> str:
        """What a plan does per second."""
        text = f"{digits(self.per_second(at))} {self.unit} per second"
        if self.tokens:
            text += f", {digits(self.tokens_per_second(at))} tokens"
        return text

    def change_text(self, at: AtBudget) -> str:
        """How much more that is, or that there is no such plan."""
        if not at.fits:
            budget, needed = format_nbytes_apart(at.budget_nbytes or 0, at.needed_nbytes)
            return f"no plan fits {budget}, the leanest that was found needs {needed}"
        percent = round(100 * self.change(at), 1) + 0.0  # which turns -0.0 into 0.0
        return f"{percent:+.1f} %" if percent else "as fast"

    def text(self) -> str:
        """All of it in one line."""
        steps = [
            f"{name} {self._beside(at)}" for name, at in self.rows() if at in (self.less, self.more)
        ]
        counted = f"batch {self.samples}, " if self.samples else ""
        return (
            f"{self.rate_text(self.here)} ({counted}{format_us(self.here.time_us)} predicted "
            f"{self.of_what}); {'; '.join(steps)}; {self.adaptive_text()}"
        )

    @property
    def of_what(self) -> str:
        """What the times are of."""
        kind = "kernels as generated" if self.is_of_kernels else "operations"
        runs = f" in {self.runs} runs of graphs" if self.runs > 1 else ""
        return f"for the {kind} of forward and backward{runs}"

    def adaptive_text(self) -> str:
        """From where on more memory buys nothing, and what a budget above that does."""
        enough_nbytes, budget_nbytes = self.enough_nbytes, self.here.budget_nbytes or 0
        if budget_nbytes < enough_nbytes:
            enough, _ = format_nbytes_apart(enough_nbytes, budget_nbytes)
            return (
                f"from {enough} on the step is as fast as without a limit: it recomputes only "
                "where memory is short"
            )
        _, enough = format_nbytes_apart(budget_nbytes, enough_nbytes)
        return (
            f"from {enough} on the step is as fast as without a limit: a budget above that leaves "
            "it as it is"
        )

    def _beside(self, at: AtBudget) -> str:
        if not at.fits:
            return f"would be too little: {self.change_text(at)}"
        verb, sign = ("would buy", 1) if at is self.more else ("would cost", -1)
        difference = sign * (self.per_second(at) - self.per_second(self.here))
        if difference <= 0 or self.change_text(at) == "as fast":
            return f"{verb} nothing"
        return f"{verb} {digits(difference)} {self.unit} per second ({self.change_text(at)})"


def bounded(found: Throughput) -> Throughput:
    """The same, where what fits less memory is not left for what is slower or needs more.

    A search for a larger budget may end at a slower plan: its time is limited, and kernels take
    other times than single operations. A plan that fits less memory is there for more of it, too.
    So may one for a smaller budget that nothing fits end at a plan that needs more than this one.
    """
    less, here, more, unlimited = found.less, found.here, found.more, found.unlimited
    if here.needed_nbytes < less.needed_nbytes:
        less = replace(here, budget_nbytes=less.budget_nbytes)
    more = _faster(more, here)
    return replace(found, less=less, more=more, unlimited=_faster(_faster(unlimited, more), here))


def _faster(larger: AtBudget, smaller: AtBudget) -> AtBudget:
    """For the larger budget, the faster of both plans."""
    if not smaller.fits or (larger.fits and larger.time_us * _SAME < smaller.time_us):
        return larger
    return replace(smaller, budget_nbytes=larger.budget_nbytes)


def _rate(count: int, at: AtBudget) -> float:
    return 1e6 * count / at.time_us if at.time_us > 0 else 0.0


def digits(per_second: float) -> str:
    """A rate for people: four digits, and all of those before the point."""
    whole = len(f"{abs(per_second):.0f}")
    return f"{per_second:.{max(0, 4 - whole)}f}"
