"""What a step above its budget has said of itself.

Enters: warnings and errors as they come, and measured peaks. Leaves: a verdict on each step, and
the worst of them for the whole case:

- kept: the measured peak is within the budget.
- told: above it, and a warning or error that names bytes had come by then, for this size of the
  batch or naming at least what was measured. A warning which says that the next step will keep
  the budget does not count for that one.
- told without a number: a warning of ours had come by then, but none names bytes.
- silent: above it, and nothing had been said.
- refused: the step ended in `InfeasibleBudget`, which names the smallest budget.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import autoremat
from autoremat.units import format_nbytes

OURS = (autoremat.FallbackWarning, autoremat.OverBudgetWarning, autoremat.InfeasibleBudget)
WORST_FIRST = ("silent", "told without a number", "told", "kept", "refused")
NBYTES = re.compile(r"(\d[\d,]*(?:\.\d+)?) ?(B|bytes|[kMGT]B|[KMGT]iB)\b")
UNITS = ("B", "kB", "MB", "GB", "TB")
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Row = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """A warning or error of ours.

    Attributes:
        size: of the batch at whose step it came.
        nbytes: the largest number of bytes that it names, other than the budget; None if none.
        text: its category and message.
        is_passing: whether it promises that the next step keeps the budget: then it says nothing
            of the steps after it.
    """

    size: str
    nbytes: int | None
    text: str
    is_passing: bool = False

    @classmethod
    def of(cls, message: Warning | Exception, size: str, budget_nbytes: int) -> Told:
        """What a warning or error says: its attributes, or the numbers of its text."""
        attributes = vars(message).items()
        named = [nbytes for name, nbytes in attributes if _is_peak(name, nbytes)]
        named = named or list(_nbytes_in(str(message), budget_nbytes))
        text = f"{type(message).__name__}: {message}"
        is_passing = getattr(message, "is_planned_anew", False)
        return cls(size, max(named, default=None), text, is_passing)


def _is_peak(name: str, value: object) -> bool:
    return name.endswith("_nbytes") and name != "budget_nbytes" and isinstance(value, int)


def _nbytes_in(text: str, budget_nbytes: int) -> Iterator[int]:
    """Sizes that a text names, the budget left out however it is rounded."""
    budgets = {format_nbytes(budget_nbytes, digits=digits) for digits in range(1, 13)}
    for digits, unit in NBYTES.findall(text):
        if f"{digits} {unit}" in budgets:
            continue
        unit = "B" if unit == "bytes" else unit
        base, units = (1000, UNITS) if unit in UNITS else (1024, BINARY_UNITS)
        yield int(float(digits.replace(",", "")) * base ** units.index(unit))


@dataclass
class Course:
    """What a training under a budget did, step by step.

    Attributes:
        budget_nbytes: of every step.
        told: warnings and errors of ours, in their order.
        others: warnings that are not ours.
        steps: size, measured peak and verdict of each step.
        first_refusal: of the first step, if it was refused: then nothing ran.
    """

    budget_nbytes: int
    told: list[Told] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    steps: list[tuple[str, int | None, str]] = field(default_factory=list)
    first_refusal: autoremat.InfeasibleBudget | None = None

    def note(self, size: str, entry: warnings.WarningMessage) -> None:
        """Keep a warning."""
        if isinstance(entry.message, OURS):
            self.told.append(Told.of(entry.message, size, self.budget_nbytes))
        else:
            self.others.add(f"{entry.category.__name__}: {entry.message}"[:200])

    def ran(self, size: str, measured_nbytes: int | None) -> None:
        """A step ended; its peak is None if it was not measured."""
        self.steps.append((size, measured_nbytes, self.verdict(size, measured_nbytes)))

    def refused(self, size: str, error: autoremat.InfeasibleBudget) -> None:
        """A step was not taken."""
        if not self.steps:
            self.first_refusal = error
        self.told.append(Told.of(error, size, self.budget_nbytes))
        self.steps.append((size, None, "refused"))

    def verdict(self, size: str, measured_nbytes: int | None) -> str:
        """What a step has shown by now; "" if it was not measured."""
        if measured_nbytes is None:
            return ""
        if measured_nbytes <= self.budget_nbytes:
            return "kept"
        lasting = [told for told in self.told if not told.is_passing]
        here = [told for told in lasting if told.size == size]
        if any(told.nbytes is not None for told in here):
            return "told"
        if any((told.nbytes or 0) >= measured_nbytes for told in lasting):
            return "told"
        return "told without a number" if here else "silent"

    def judgement(self) -> Row:
        """The worst verdict on any step, and what belongs to it."""
        verdicts = {verdict for _, _, verdict in self.steps}
        measured = [step for step in self.steps if step[1] is not None]
        worst = max(measured, key=lambda step: step[1] or 0, default=None)
        lasting = [told for told in self.told if not told.is_passing]
        named = [told.nbytes for told in lasting if told.nbytes is not None]
        return {
            "verdict": next((v for v in WORST_FIRST if v in verdicts), "not measured"),
            "budget_nbytes": self.budget_nbytes,
            "worst_size": worst and worst[0],
            "worst_nbytes": worst and worst[1],
            "named_nbytes": max(named, default=None),
            "told": list(dict.fromkeys(f"at {told.size}: {told.text}" for told in self.told)),
            "is_warned": any("Warning: " in told.text for told in lasting),
            "others": sorted(self.others),
            "steps": self.steps,
        }
