"""A step's first graph whose plan another process has made: torch has its code, we the rest.

Enters: all that the graph's plan depends on beside the graph. Leaves: a question in words, and what
is kept of a plan for those who ask it of the same graph. Guarantees: what is kept belongs to the
very code that torch has stored; where it does not tell all, nothing is kept.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.plan_file import NodeRecord, StoredGraph
from autoremat.ask.steering import Steering
from autoremat.cost.machine import settings_key
from autoremat.errors import PlanMismatch
from autoremat.memory.residents import Resident
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.planning.asked import choose_stored
from autoremat.planning.choice import TORCH
from autoremat.planning.figures import Figures, KeptFigures
from autoremat.planning.found_before import FoundBefore, code_key
from autoremat.planning.nesting import Around
from autoremat.planning.part import Part, Planned
from autoremat.session.steps import Steps
from autoremat.watch.eager_code import held_nbytes


@dataclass(frozen=True)
class Remembered:
    """What is kept of a plan.

    Attributes:
        figures: of the graph under the plan, as a list; None for a graph that needs none.
        between_nbytes: as of `Part`.
        schedule: operations in their order, and so are the next two as of `StoredGraph`.
        saved: names of what its backward receives.
        method: how it was found.
        line: the summary of the step.
        draws_differently: whether its code draws other random numbers than eager code would.
        in_order: as of `StoredGraph`.
    """

    figures: Sequence[Any] | None = None
    between_nbytes: int = 0
    schedule: Sequence[str] = ()
    saved: Sequence[str] = ()
    method: str = ""
    line: str = ""
    draws_differently: bool = False
    in_order: bool = True

    @classmethod
    def of(cls, part: Part, line: str, *, draws_differently: bool) -> Remembered:
        """Of a planned graph."""
        stored, figures = part.planned.whole.stored, part.figures
        numbers = figures.to_keep() if isinstance(figures, Figures) else figures
        return cls(
            astuple(numbers),
            part.between_nbytes,
            stored.schedule,
            stored.saved,
            stored.method,
            line,
            draws_differently,
            stored.in_order,
        )

    @property
    def kept_figures(self) -> KeptFigures:
        """Its figures."""
        assert self.figures is not None
        return KeptFigures(*self.figures)

    def plan_of(self, nodes: tuple[NodeRecord, ...]) -> StoredGraph:
        """Its plan, of a graph of these."""
        schedule, saved = tuple(self.schedule), tuple(self.saved)
        is_own = self.method != TORCH
        return StoredGraph(nodes, schedule, saved, self.method, is_own, self.in_order)


def remembered(code: str) -> Remembered | None:
    """What is kept for code that torch's cache had; None if nothing."""
    with FoundBefore.open() as before:
        found = before.read([_key(code)], Remembered).get(_key(code))
    try:
        return found if found is None or found.figures is None or found.kept_figures else None
    except TypeError:  # what is stored there is something else
        return None


def keeping(
    part: Part | None, line: str, *, draws_differently: bool
) -> Callable[[str], None] | None:
    """What keeps a plan for code that torch's cache stores; None if another search may do better.

    Args:
        part: the graph under its plan; None for one without gradients.
        line: as of `Remembered`, and so is the next one.
        draws_differently: see there.
    """
    found = Remembered()
    if part is not None:
        alone = part.planned.whole.choice.alone
        if not part.figures.fits or (alone is not None and alone.failed):
            return None
        found = Remembered.of(part, line, draws_differently=draws_differently)

    def keep(code: str) -> None:
        with FoundBefore.open() as kept:
            kept.write({_key(code): found}, replaces=True)

    return keep


def as_remembered(found: Planned, known: Remembered, budget_nbytes: int) -> Planned:
    """A graph by the plan that was kept of it; another search may have found another one.

    Args:
        found: the graph as it is planned now.
        known: what was kept.
        budget_nbytes: of the step.

    Raises:
        PlanMismatch: if it cannot have that plan any more.
    """
    stored = known.plan_of(found.stored.nodes)
    if stored == found.stored:
        return found
    allowed_nbytes = budget_nbytes or sys.maxsize  # of the least that can be, any amount
    choice = choose_stored(found.subject, stored, allowed_nbytes, reads=True)
    if choice is None:
        raise PlanMismatch(
            "The step runs by a plan that was kept on this machine, and its graph, traced again, "
            "is another one. Forget what is kept with `autoremat cache --clear`."
        )
    return replace(found, choice=choice, stored=stored)


def _key(code: str) -> str:
    return hashlib.sha256(f"recalled|{code}".encode()).hexdigest()


def may_be_recalled(steps: Steps, module: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether all that a graph's plan depends on can be put in words before it is traced.

    It is the first one of a process by itself, none of its sizes varies, and a search plans it,
    for the device that is here.
    """
    options, setting = steps.options, steps.options.setting
    # Names of modules are in no key of torch's, and "auto" is another number each time.
    is_asked = replace(setting.steering, model_is_known=False) != Steering()
    is_searched = not (is_asked or options.tune or setting.spec or options.budget.is_free)
    is_known = not (steps.graphs.parts or steps.replans.count or steps.told.fallbacks)
    is_fixed = all(map(_has_fixed_sizes, example_inputs))
    return (
        setting.compiler == "inductor"
        and steps.offline is None
        and is_searched
        and is_known
        and is_fixed
        and steps.surroundings.found == Around()
        and _torch.job_store() is None
        and not _torch.caches_are_off()
        and _torch.code_can_be_cached(module)
    )


def _has_fixed_sizes(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter, _torch.FakeTensor)
    sizes = (*value.shape, *value.stride(), value.storage_offset()) if is_plain else ()
    return is_plain and all(type(size) is int for size in sizes)


def question_of(
    steps: Steps,
    resident: Resident,
    device: torch.device,
    example_inputs: Sequence[Any],
    *,
    refuses: bool,
) -> str:
    """All that the plan of such a graph depends on beside the graph, in words.

    Args:
        steps: that it is one of.
        resident: what is held whatever the plan.
        device: where it runs.
        example_inputs: its inputs.
        refuses: whether a budget that cannot be met is an error.
    """
    options, made = steps.options, steps.surroundings.eager_results
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    storages = [storage_sizes([tensor], device) for tensor in tensors]
    numbers = {key: n for n, key in enumerate(dict.fromkeys(k for s in storages for k in s))}
    facts = (
        sorted(options.asked().items()),
        options.budget_nbytes(device),
        options.setting.strict,
        options.setting.offload and options.setting.offload.free_nbytes,
        astuple(resident.parts),
        resident.transient_nbytes,
        astuple(resident.traffic),
        held_nbytes(example_inputs, resident.storages, device, made),
        refuses,
        repr(_torch.Ambient.now()),
        [[(numbers[key], nbytes) for key, nbytes in found.items()] for found in storages],
        settings_key(device),
        code_key(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()
