"""What is compared: names that users write, and the task that a worker gets.

Enters: names such as "every-2" or "torch:0.5", and budgets. Leaves: `Variant`s in the order asked
for, eager first. Guarantees: what is malformed is refused before anything runs. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from autoremat.ask.budget import Budget

SMALLEST = "smallest"
BUDGETS = ("75%", "50%", "25%", SMALLEST)
CHECKPOINTS = ("every-layer", "every-2", "sqrt", "selective-attention")
TORCH = ("compile", "torch:0.5", "torch:0.1")
ACCEPTED = (
    "every-layer, every-N (one checkpoint for N layers), sqrt, selective-attention, compile, or "
    "torch:X with torch's activation_memory_budget X from 0 to 1"
)

_WHOLE = "what eager's step needs above its resident bytes"
_EVERY = re.compile(r"every-([1-9][0-9]{0,5})")
_SETTING = re.compile(r"torch:(0|1|[01]?\.[0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the step.

    Attributes:
        name: as it stands in the table.
        kind: "eager", "checkpoint", "compile", "torch" or "autoremat".
        compiler: "eager" or "inductor".
        segment: layers in one checkpoint; 0 takes the square root of their number.
        selective: whether a checkpoint saves matrix products and attention.
        setting: torch's `activation_memory_budget`.
        budget: of autoremat; None asks for the smallest.
    """

    name: str
    kind: str
    compiler: str
    segment: int = 1
    selective: bool = False
    setting: float | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker measures.

    Attributes:
        target: `path/to/file.py:function` or `package.module:function`.
        variant: the way to run its step; its budget is said in bytes.
        budget_nbytes: of autoremat, resident bytes included; None asks for the smallest.
        time_limit: seconds for the solver.
        threads: of torch; None leaves torch's own choice.
    """

    target: str
    variant: Variant
    budget_nbytes: int | None
    time_limit: float
    threads: int | None


def chosen_variants(
    names: Iterable[str] | None, budgets: Iterable[str | int], compiler: str
) -> tuple[Variant, ...]:
    """Eager, the named ones (all that the compiler can run if None), then ours.

    Raises:
        ValueError: for a name or a budget that means nothing.
    """
    if compiler not in ("eager", "inductor"):
        raise ValueError(f'compiler is "inductor" or "eager", not {compiler!r}.')
    if names is None:
        names = CHECKPOINTS if compiler == "eager" else (*CHECKPOINTS, *TORCH)
    eager = Variant("eager", "eager", "eager")
    others = [_variant(name.strip(), compiler) for name in names if name.strip() != "eager"]
    ours = [_planned(budget, compiler) for budget in budgets]
    return tuple({variant.name: variant for variant in (eager, *others, *ours)}.values())


def budget_nbytes(
    budget: Budget | None, resident_nbytes: int, above_nbytes: int | None
) -> int | None:
    """The budget of a whole step in bytes; None for the smallest.

    Args:
        budget: a size, or a share of what eager's step needs above its resident bytes.
        resident_nbytes: parameters, buffers and batch.
        above_nbytes: what eager's step needs above them, or None where it is not known.

    Raises:
        ValueError: for a share where eager's peak is not known.
    """
    if budget is None:
        return None
    if not budget.is_share:
        return budget.nbytes()
    if above_nbytes is None:
        raise ValueError(
            "eager's step was not measured, so a share of its peak is unknown: give a size"
        )
    return resident_nbytes + budget.nbytes(above_nbytes)


def _variant(name: str, compiler: str) -> Variant:
    if name == "every-layer":
        return Variant(name, "checkpoint", compiler)
    if name == "sqrt":
        return Variant(name, "checkpoint", compiler, segment=0)
    if name == "selective-attention":
        return Variant(name, "checkpoint", compiler, selective=True)
    if name == "compile":
        return Variant(name, "compile", "inductor")
    if every := _EVERY.fullmatch(name):
        return Variant(name, "checkpoint", compiler, segment=int(every[1]))
    if (setting := _SETTING.fullmatch(name)) and float(setting[1]) <= 1:
        return Variant(name, "torch", "inductor", setting=float(setting[1]))
    raise ValueError(f"Variant {name!r:.60} is not known. Accepted: {ACCEPTED}.")


def _planned(budget: str | int, compiler: str) -> Variant:
    if isinstance(budget, str):
        budget = budget.strip()
    asked = None if budget == SMALLEST else Budget.parse(budget, whole=_WHOLE)
    name = f"{budget} B" if isinstance(budget, int) else budget
    return Variant(f"autoremat {name}", "autoremat", compiler, budget=asked)


def segment_length(segment: int, layers: int) -> int:
    """Layers in one checkpoint."""
    return segment or max(1, math.isqrt(layers - 1) + 1)
