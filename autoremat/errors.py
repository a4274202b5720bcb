"""What goes wrong in words that help: fact with units, cause, remedy.

Enters: the numbers and names that the planner knows. Leaves: exceptions and warnings whose
attributes a program can read and whose text a user can act on. Guarantees: each survives
pickling (a worker may raise it in another process); the codes of fallbacks never change meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from autoremat.reporting.text import format_nbytes, format_nbytes_apart

_CODE = re.compile(r"AR[0-9]{3}")


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A value that is live at the peak.

    Attributes:
        name: of the graph's node.
        nbytes: its size.
        source: the user's line that made it, "model.py:88", or "".
        kind: what it is to the step, such as "saved", "gradient" or "output", or "".
    """

    name: str
    nbytes: int
    source: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """Name, size and what is known beside them."""
        notes = ", ".join(note for note in (self.kind, self.source) if note)
        return f"`{self.name}` {format_nbytes(self.nbytes)}" + (f" ({notes})" if notes else "")


@dataclass(eq=False, repr=False)
class InfeasibleBudget(RuntimeError):
    """No plan fits the budget. Raised before any training step runs.

    Attributes:
        budget_nbytes: what was asked for.
        smallest_peak_nbytes: smallest peak that a known plan reaches; as a budget it is accepted.
        floor_nbytes: proven: no plan has a smaller peak. Under Inductor, whose code takes something
            else than its operations one by one, no more is proven than what is resident.
        resident_nbytes: live all the time, under every plan.
        step: name of the node at which the smallest plan peaks, or "".
        source: the user's line of that node, "model.py:88", or "".
        largest: the largest values live at that step, largest first.
    """

    budget_nbytes: int
    smallest_peak_nbytes: int
    floor_nbytes: int
    resident_nbytes: int
    step: str = ""
    source: str = ""
    largest: tuple[LiveValue, ...] = ()

    def __post_init__(self) -> None:
        """All fields become `args`: that is what pickle calls the class with."""
        self.args = tuple(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        """Fact, cause, remedies."""
        return " ".join(part for part in (self._fact(), self._cause(), self._remedy()) if part)

    def _fact(self) -> str:
        budget, smallest = format_nbytes_apart(self.budget_nbytes, self.smallest_peak_nbytes)
        proof = "a lower one is not ruled out"
        if self.floor_nbytes >= self.smallest_peak_nbytes:
            proof = "proven to be the lowest of this step's operations"
        elif self.floor_nbytes > self.resident_nbytes:
            floor, _ = format_nbytes_apart(self.floor_nbytes, self.smallest_peak_nbytes)
            proof = f"proven floor of this step's operations {floor}"
        return f"Budget {budget} is below the smallest peak found, {smallest} ({proof})."

    def _cause(self) -> str:
        where = f"At `{self.step}`" if self.step else "At the peak"
        where += f" ({self.source})" if self.source else ""
        cause = f"{where}, {format_nbytes(self.resident_nbytes)} are resident"
        if self.largest:
            values = ", ".join(str(value) for value in self.largest)
            cause += f", and the largest live values are {values}"
        return f"{cause}."

    def _remedy(self) -> str:
        smallest = self.smallest_peak_nbytes
        remedy = f'Raise the budget to {smallest} bytes (budget="{smallest}B") or'
        if self.resident_nbytes >= self.budget_nbytes:
            return (
                f"{remedy} make the resident part smaller, since it exceeds the budget by itself: "
                "parameters in lower precision, an optimizer with less state, sharding."
            )
        return (
            f"{remedy} reduce what is live: a smaller batch or sequence, lower precision, or "
            "splitting the operation at the peak."
        )


@dataclass(eq=False, repr=False)
class OverBudget(InfeasibleBudget):
    """The plan that the user chose, by a policy or a file, peaks above the budget.

    Attributes:
        smallest_peak_nbytes: the peak of the plan that was chosen.
        choice: what was chosen, as the argument: 'policy="every-layer"'.
        optimal_peak_nbytes: the peak of what `policy="optimal"` finds for the same budget.
    """

    choice: str = ""
    optimal_peak_nbytes: int = 0

    def _fact(self) -> str:
        budget, peak = format_nbytes_apart(self.budget_nbytes, self.smallest_peak_nbytes)
        return f"Budget {budget} is below {peak}, the peak of {self.choice}."

    def _remedy(self) -> str:
        peak, optimal = self.smallest_peak_nbytes, self.optimal_peak_nbytes
        remedy = f'Raise the budget to {peak} bytes (budget="{peak}B") or drop {self.choice}: '
        if optimal <= self.budget_nbytes:
            return f'{remedy}policy="optimal" fits the budget, with a peak of {optimal} bytes.'
        return (
            f'{remedy}policy="optimal" reaches {optimal} bytes '
            f"({format_nbytes(optimal)}), which is above the budget too."
        )


class SteeringError(ValueError):
    """What the user asked of the plan does not exist, or cannot be done."""


class PlanMismatch(SteeringError):
    """A stored plan is not a plan of this model: the message names the first difference."""


class _Coded:
    """A stable code and a sentence, for tools and for people."""

    args: tuple[str, str]

    def __init__(self, code: str, sentence: str) -> None:
        if not _CODE.fullmatch(code):
            raise ValueError(f"Code {code!r} is not of the form 'AR101'.")
        super().__init__(code, sentence)  # type: ignore[call-arg]

    @property
    def code(self) -> str:
        return self.args[0]

    @property
    def sentence(self) -> str:
        return self.args[1]

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"


class FallbackWarning(_Coded, UserWarning):
    """A graph is compiled without a memory plan; the sentence says which node and why."""


class FallbackError(_Coded, RuntimeError):
    """The same as `FallbackWarning`, raised because the user asked for `strict=True`."""

    @classmethod
    def of(cls, warning: FallbackWarning) -> FallbackError:
        """The error with the warning's code and sentence."""
        return cls(warning.code, warning.sentence)


class OverBudgetWarning(UserWarning):
    """A step peaks above the budget: by measurement, or by plan where training already runs.

    Attributes:
        measured_nbytes: what the device reported; None before a step ran.
        budget_nbytes: what was asked for.
        predicted_nbytes: what the plan promised.
        is_planned_anew: whether the next step gets another plan, which shares the budget.
    """

    is_planned_anew = False

    def __init__(
        self, measured_nbytes: int | None, budget_nbytes: int, predicted_nbytes: int
    ) -> None:
        """Keeps the numbers; the text is made when it is read."""
        super().__init__(measured_nbytes, budget_nbytes, predicted_nbytes)
        self.measured_nbytes = measured_nbytes
        self.budget_nbytes = budget_nbytes
        self.predicted_nbytes = predicted_nbytes

    def __str__(self) -> str:
        """Fact, cause, remedy."""
        if self.measured_nbytes is None:
            return self._before_measuring()
        measured, budget = format_nbytes_apart(self.measured_nbytes, self.budget_nbytes)
        excess = format_nbytes(self.measured_nbytes - self.budget_nbytes)
        fact = (
            f"Measured peak {measured} is above the budget {budget} by {excess}; the plan predicts "
            f"{format_nbytes(self.predicted_nbytes)}."
        )
        if self.measured_nbytes <= self.predicted_nbytes:
            return (
                f"{fact} It is the plan that does not fit: a part of the step found too much live "
                "already and runs as lean as it can. Raise the budget, remove the graph break, or "
                "set gradients to None before each step."
            )
        return (
            f"{fact} Something in the step holds memory that the plan does not see. "
            f"Lower the budget by {excess} to make room for it."
        )

    def _before_measuring(self) -> str:
        predicted, budget = format_nbytes_apart(self.predicted_nbytes, self.budget_nbytes)
        if self.is_planned_anew:
            return (
                f"Predicted peak {predicted} of this step is above the budget {budget}: when the "
                "first of its graphs was planned, it was not known how much the later ones need. "
                "From the next step on they share the budget. If memory runs out in this one, "
                "take it again, or remove the graph break."
            )
        return (
            f"Predicted peak {predicted} is above the budget {budget}: what this part of the step "
            "finds live already (earlier graphs of the step, or gradients of earlier batches) "
            "leaves too little. It runs as lean as it can. Raise the budget, remove the graph "
            "break, or set gradients to None before each step."
        )
