"""What would lower a peak whatever the plan, and what the peak would then be.

Enters: changes of a step, each with the peak that it leads to; or a formula of the peak over a
batch. Leaves: `Remedy` values, the one that saves most first. Guarantees: what saves little is left
out, and never more than a few are named. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoremat.reporting.fields import check_fields
from autoremat.reporting.formula import PeakFormula
from autoremat.units import format_nbytes, format_nbytes_apart

MOST = 3
_LEAST = 0.02  # of the peak: less is not worth a change


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the step that no plan can make.

    Attributes:
        name: for programs: "return only the loss", "chunk the loss", "gradients to None",
            "smaller batch", "8-bit optimizer", "bf16 autocast", "shard over two devices".
        sentence: what to change, and why it takes memory.
        saved_nbytes: by how much the peak falls.
        peak_nbytes: what it then is under the same plan: another one may do better.
    """

    name: str
    sentence: str
    saved_nbytes: int
    peak_nbytes: int

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    def __str__(self) -> str:
        """What to do, and what comes of it."""
        before_nbytes = self.peak_nbytes + self.saved_nbytes
        before, after = format_nbytes_apart(before_nbytes, self.peak_nbytes)
        less = f"{format_nbytes(self.saved_nbytes)} less"
        then = f"Under this plan, the peak is then {after} instead of {before}: {less}."
        return f"{self.sentence} {then}"


def ranked(found: Iterable[Remedy]) -> tuple[Remedy, ...]:
    """The few that save most, without those that are not worth a change."""
    worth = [
        one
        for one in found
        if one.saved_nbytes >= _LEAST * (one.peak_nbytes + one.saved_nbytes) > 0
    ]
    return tuple(sorted(worth, key=lambda one: (-one.saved_nbytes, one.name))[:MOST])


def smaller_batch(formula: PeakFormula | None) -> tuple[int, int] | None:
    """The batch, and the simulated peak of half of it in bytes; None where it does not vary so far.

    Args:
        formula: the simulated peak over the sizes that vary, the batch among them.
    """
    sizes = {} if formula is None else {one.name: one.planned for one in formula.symbols}
    batch = sizes.get("batch", 1)
    half = (batch + 1) // 2
    if formula is None or batch < 2 or half < _lowest(formula):
        return None
    return batch, formula.at(**sizes | {"batch": half})


def of_halves(batch: int, new_gradients_nbytes: int) -> str:
    """Half of the batch, twice: the second half finds the gradients of the first.

    Args:
        batch: as it is.
        new_gradients_nbytes: gradients that the step makes and that nothing holds before it.
    """
    held = ""
    if new_gradients_nbytes:
        held = f", beside {format_nbytes(new_gradients_nbytes)} of gradients of the first half"
    return (
        f"Load the batch of {batch} (first dimension) as two of {(batch + 1) // 2}, with gradient "
        f"accumulation{held}, if its samples do not depend on each other."
    )


def _lowest(formula: PeakFormula) -> int:
    return next(one.lowest for one in formula.symbols if one.name == "batch")
