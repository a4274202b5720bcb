"""What goes wrong in words that help: fact with units, cause, remedy.

Enters: the numbers and names that the planner knows. Leaves: exceptions and warnings whose
attributes a program can read and whose text a user can act on. Guarantees: each survives
pickling (a worker may raise it in another process); the codes of fallbacks never change meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autoremat.reporting.remedies import Remedy
from autoremat.reporting.resident import ResidentParts
from autoremat.units import format_nbytes, format_nbytes_apart, format_parts

Alone = Literal["", "eager", "inference"]

_CODE = re.compile(r"AR[0-9]{3}")

# What accelerate's `find_executable_batch_size` and Lightning's `BatchSizeFinder` look for, on any
# device, in the only argument of a RuntimeError: they go on with a smaller batch.
_AS_OUT_OF_MEMORY = "[Smaller batches may fit, as of DefaultCPUAllocator: can't allocate memory]"

SECOND_BACKWARD = (
    "A gradient was taken with create_graph=True through an optimised module, and then a gradient "
    "of that: torch.compile makes no backward of a backward, so nothing of it can be planned. Take "
    "the first gradient inside the forward of the optimised module, with torch.func.grad, and "
    "return the loss of it: that is one graph, and planned. Or do not optimise the module whose "
    "gradient has a gradient."
)


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A value that is live at the peak, or what the operation there needs for itself.

    Attributes:
        name: of the graph's node.
        nbytes: its size.
        source: the user's line that made it, "model.py:88", or "".
        kind: what it is to the step, such as "saved", "gradient" or "its workspace", or "".
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

    To accelerate's `find_executable_batch_size` and Lightning's `BatchSizeFinder` it is memory that
    ran out, so that they go on with a smaller batch; where none may fit, it ends the run.

    Attributes:
        budget_nbytes: what was asked for.
        smallest_peak_nbytes: smallest peak that a known plan reaches; as a budget it is accepted.
            Where the budget is below the resident bytes nothing is searched for, and the smallest
            peak may be lower: ask for `resident_nbytes` to have it searched.
        floor_nbytes: proven: no plan has a smaller peak. Under Inductor, whose code takes something
            else than its operations one by one, no more is proven than what is resident.
        resident: live all the time, under every plan, by what it is.
        step: name of the node at which the smallest plan peaks, or "".
        source: the user's line of that node, "model.py:88", or "".
        largest: the largest values live at that step, largest first.
        tried: the stages of the search that ran; none where nothing was searched for.
        left_out: those that did not, as the time limit was over.
        ranks: of several processes that train one model, those that cannot meet the budget; the
            numbers are of the one that needs most. Empty where nobody asked others.
        advice: what would lower that peak whatever the plan, at most three, best first.
        largest_sizes: where a range of sizes was asked for, by name the largest of each with which
            the budget would do.
        is_each_enough: whether that is so with the others as large as asked, or only of all of them
            together.
        offload: why values that may leave the device do not lower that peak; "" where none may.
    """

    budget_nbytes: int
    smallest_peak_nbytes: int
    floor_nbytes: int
    resident: ResidentParts
    step: str = ""
    source: str = ""
    largest: tuple[LiveValue, ...] = ()
    tried: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    advice: tuple[Remedy, ...] = ()
    largest_sizes: tuple[tuple[str, int], ...] = ()
    is_each_enough: bool = True
    offload: str = ""

    def __post_init__(self) -> None:
        """`args` is one text, by whose words other libraries know what an error is."""
        words = f" {_AS_OUT_OF_MEMORY}" if self.may_fit_smaller_batch else ""
        self.args = (f"{self}{words}",)

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle calls the class with: all fields."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self)), vars(self)

    @property
    def may_fit_smaller_batch(self) -> bool:
        """Whether a smaller batch can do: not where what no batch changes is above the budget."""
        parts = self.resident
        state_nbytes = parts.parameters_nbytes + parts.optimizer_nbytes + parts.buffers_nbytes
        return state_nbytes <= self.budget_nbytes

    @property
    def resident_nbytes(self) -> int:
        """Live all the time, under every plan."""
        return self.resident.nbytes

    @property
    def is_resident_too_much(self) -> bool:
        """Whether the budget cannot hold even what is resident."""
        return self.resident_nbytes > self.budget_nbytes

    @property
    def fact(self) -> str:
        """The first sentence: what was asked for, and what the least is that is known."""
        return next(iter(self._sentences()))

    def __str__(self) -> str:
        """Fact, cause, remedies."""
        where = (f"{ranks_in_words(self.ranks)}:",) if self.ranks else ()
        return " ".join((*where, *self._sentences()))

    def _sentences(self) -> tuple[str, ...]:
        if self.is_resident_too_much:
            fact = filter(None, (self._resident_fact(), self._ranges()))
            return *fact, self._remedy(), *map(str, self.advice)
        sentences = (
            *(self._fact(), self._ranges(), self._search()),
            *(self._cause(), self.offload, self._remedy()),
        )
        return (*filter(None, sentences), *map(str, self.advice))

    def _search(self) -> str:
        if self.left_out:
            missed = ", ".join(self.left_out)
            return (
                f"The time limit left out stages of the search ({missed}): with more, less may do."
            )
        return f"Searched by {', '.join(self.tried)}." if self.tried else ""

    def _fact(self) -> str:
        budget, smallest = format_nbytes_apart(self.budget_nbytes, self.smallest_peak_nbytes)
        proof = "a lower one is not ruled out"
        if self.floor_nbytes >= self.smallest_peak_nbytes:
            proof = "proven to be the lowest of this step's operations"
        elif self.floor_nbytes > self.resident_nbytes:
            floor, _ = format_nbytes_apart(self.floor_nbytes, self.smallest_peak_nbytes)
            proof = f"proven floor of this step's operations {floor}"
        return f"Budget {budget} is below the smallest peak found, {smallest} ({proof})."

    def _resident_fact(self) -> str:
        budget, resident = format_nbytes_apart(self.budget_nbytes, self.resident_nbytes)
        return (
            f"Budget {budget} is below what is resident under every plan, {resident} "
            f"({format_parts(self.resident.by_name)}). A plan that is known without a search "
            f"peaks at {format_nbytes(self.smallest_peak_nbytes)}; others may take less."
        )

    def _cause(self) -> str:
        where = f"At `{self.step}`" if self.step else "At the peak"
        where += f" ({self.source})" if self.source else ""
        parts = format_parts(self.resident.by_name)
        cause = f"{where}, {format_nbytes(self.resident_nbytes)} are resident"
        cause += f" ({parts})" if parts else ""
        if self.largest:
            values = ", ".join(str(value) for value in self.largest)
            cause += f", and the largest live values are {values}"
        return f"{cause}."

    def _ranges(self) -> str:
        if not self.largest_sizes:
            return ""
        how = ", or " if self.is_each_enough else " with "
        found = how.join(f"{name} up to {size}" for name, size in self.largest_sizes)
        return f"That is at the largest sizes that were asked for: it would do for {found}."

    def _remedy(self) -> str:
        smallest = self.smallest_peak_nbytes
        remedy = f'Raise the budget to {smallest} bytes (budget="{smallest}B")'
        if self.is_resident_too_much:
            return (
                f"{remedy}, which is accepted, or make the resident part smaller, since it exceeds "
                "the budget by itself: parameters in lower precision, an optimizer with less "
                "state, sharding."
            )
        return (
            f"{remedy} or reduce what is live: a smaller batch or sequence, lower precision, or "
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

    def _sentences(self) -> tuple[str, ...]:
        return self._fact(), self._cause(), self._remedy(), *map(str, self.advice)

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


@dataclass(eq=False, repr=False)
class OverReserved(InfeasibleBudget):
    """No plan that was tried keeps what CUDA's allocator reserves within the budget.

    Attributes:
        smallest_peak_nbytes: the least that a plan was emulated to reserve; as a budget of what is
            reserved it is accepted.
        allocated_nbytes: the peak of what that plan has allocated.
        setting: of the allocator, one with which that plan would be within the budget, or "".
    """

    allocated_nbytes: int = 0
    setting: str = ""

    def _sentences(self) -> tuple[str, ...]:
        budget, smallest = format_nbytes_apart(self.budget_nbytes, self.smallest_peak_nbytes)
        fact = (
            f"Budget {budget} reserved is below the smallest that a plan was found to reserve, "
            f"{smallest}, of which {format_nbytes(self.allocated_nbytes)} are its allocated peak."
        )
        raised = (
            f'Raise the budget to {self.smallest_peak_nbytes} bytes (budget="'
            f'{self.smallest_peak_nbytes}B reserved"), or make the step smaller.'
        )
        if not self.setting:
            return fact, raised
        return fact, f"With PYTORCH_ALLOC_CONF={self.setting} that plan is within it.", raised


class OffloadError(RuntimeError):
    """What a plan sends away finds no room. It is raised in the step that wanted it."""


class RankError(RuntimeError):
    """Ranks that train one model in lockstep could not begin: the message names who, and why.

    Attributes:
        ranks: who did not come, or failed.
    """

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        """Keeps who it was; the reason goes on from their names."""
        super().__init__(ranks, reason)
        self.ranks = ranks

    def __str__(self) -> str:
        """Who, and why."""
        return f"{ranks_in_words(self.ranks)} {self.args[1]}"


class SteeringError(ValueError):
    """What the user asked of the plan does not exist, or cannot be done."""


class SizeError(ValueError):
    """An input is larger than the range that was given for it.

    Attributes:
        name: of the size.
        size: what it is in this call.
        highest: what it may be.
    """

    def __init__(self, name: str, size: int, highest: int) -> None:
        """Keeps the numbers; the text is made when it is read."""
        super().__init__(name, size, highest)
        self.name, self.size, self.highest = name, size, highest

    def __str__(self) -> str:
        """Fact, cause, remedy."""
        return (
            f"{self.name} is {self.size} in this call, and the step was planned for at most "
            f"{self.highest}, as sizes= says: beyond it, the budget is not promised. Give a range "
            f'up to {self.size}, or on_larger="plan" to have larger ones planned as they come. If '
            'it is not a size that varies, name the inputs: sizes={"input_ids": {1: (128, 4096)}}.'
        )


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
    """A step peaks above the budget: as measured, or by its plans and what is live beside them.

    Attributes:
        measured_nbytes: what the device reported; None where nothing was measured.
        budget_nbytes: what was asked for.
        predicted_nbytes: what the step takes by its plans and what was found live beside them.
        is_planned_anew: whether the next step gets another plan, which takes that into account.
        is_planned: else, whether anything of the step has a plan.
        is_leanest: else, whether no plan is known that takes less.
        alone: what takes it where no planned graph waits for its backward: code in eager mode, or
            what runs without gradients.
        accumulates: whether gradients that exist as a step begins are needed there.
    """

    is_planned_anew = False
    is_planned = True
    is_leanest = True
    alone: Alone = ""
    accumulates = False

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
                "already and runs as lean as it can. " + self._raise_or("remove the graph break")
            )
        if self.is_planned_anew:
            return (
                f"{fact} Something in the process took memory that the plan did not see. If "
                "another step shows it again, those after it are planned for it."
            )
        return (
            f"{fact} Something in the step holds memory that the plan does not see. "
            f"Lower the budget by {excess} to make room for it."
        )

    def _before_measuring(self) -> str:
        predicted, budget = format_nbytes_apart(self.predicted_nbytes, self.budget_nbytes)
        if self.alone == "inference":
            return (
                f"Predicted peak {predicted} is above the budget {budget}: what runs without "
                "gradients (a call of the model, or what is frozen before all that is trained) "
                "takes it while nothing waits for a backward. It keeps nothing, so no plan makes "
                "it smaller. Raise the budget, or give it fewer samples at a time."
            )
        if self.alone:
            return (
                f"Predicted peak {predicted} is above the budget {budget}: code in eager mode "
                "takes it in a backward of its own, that of a loss of results which the model "
                "made without gradients. No plan has a part in it. Raise the budget, or take that "
                "loss of fewer results at a time."
            )
        if self.is_planned_anew:
            return (
                f"Predicted peak {predicted} of this step is above the budget {budget}: when it "
                "was planned, it was not known what else the step holds (other graphs of it, more "
                "calls before the backward, code in eager mode, other models, earlier batches, an "
                "optimizer's state). From the next step on it is planned for that. If memory runs "
                "out in this one, take it again."
            )
        if not self.is_planned:
            return (
                f"Predicted peak {predicted} is above the budget {budget}: nothing of this step "
                "has a plan, as a FallbackWarning says, so no other budget makes it smaller. Do "
                "what that warning names, or optimize a part of the model that can be planned."
            )
        if not self.is_leanest:
            excess = format_nbytes(self.predicted_nbytes - self.budget_nbytes)
            return (
                f"Predicted peak {predicted} is above the budget {budget}: the plan was made "
                "without some of what the step holds (other graphs, calls before the backward, "
                "code in eager mode, other models, earlier batches and their gradients, larger "
                f"inputs), and none is made for that. Lower the budget by {excess} to make room "
                "for it, or have one module call all parts and return the loss."
            )
        return (
            f"Predicted peak {predicted} is above the budget {budget}: what the step holds beside "
            "this part of it (other graphs, calls before the backward, code in eager mode, other "
            "models, earlier batches and their gradients, larger inputs) leaves too little. It "
            "runs as lean as it can. "
            + self._raise_or(
                "remove graph breaks", "have one module call all parts and return the loss"
            )
        )

    def _raise_or(self, *others: str) -> str:
        """What to do, in a sentence: gradients that are added to are not for the user to drop."""
        *first, last = ["Raise the budget", *others]
        if not self.accumulates:
            first, last = [*first, last], "set gradients to None before each step"
        return f"{', '.join(first)}, or {last}."


def on_ranks(error: Exception, ranks: tuple[int, ...]) -> Exception:
    """One of our errors as all ranks raise it: with the names of those that have it."""
    found = _with_ranks(error, ranks)
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _with_ranks(error: Exception, ranks: tuple[int, ...]) -> Exception:
    if isinstance(error, InfeasibleBudget):
        return replace(error, ranks=ranks)
    if isinstance(error, RankError):
        return RankError(ranks, error.args[1])
    *code, text = error.args
    return type(error)(*code, f"{ranks_in_words(ranks)}: {text}")


_FEW_RANKS = 4


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """Such as "Ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    *first, last = map(str, ranks[:_FEW_RANKS])
    more = len(ranks) - _FEW_RANKS
    if more > 0:
        first, last = [*first, last], f"{more} more"
    return f"Ranks {', '.join(first)} and {last}"


def reason_of(error: Exception) -> str:
    """What the system says of a file, without its number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
