"""A forward of a planned graph whose backward is still to come.

Enters: what a graph has returned as it ran, and how it was planned. Leaves: how much its run holds
until its backward, and how much of what it returned somebody holds beside that. Guarantees: keeps
nothing alive of what the graph has returned.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoremat import _torch
from autoremat.memory.storage_sizes import rounded_nbytes, storages_of, tensors_in
from autoremat.planning.part import Part
from autoremat.planning.ran import Ran

# A loss and its gradient, as CUDA rounds them: looks at a backward need not see who holds these.
SCALARS_NBYTES = 1024
_SHARES = 1024  # steps of other sizes are alike if as much of what they return is held, about

LetGo = dict[tuple[bool, ...], bool]  # as of `Run`
Roots = Sequence[Any]  # tensors or edges that a backward begins at


class Owner(Protocol):
    """Who plans the graphs of a model, and answers for their budget."""

    audit: Any  # `audit.Audit`: knows what the model holds
    is_nested: bool  # whether each of its backwards came before those of earlier runs
    backward: int  # number of the latest that went through a run of its graphs

    def backward_begins(self, roots: Roots, *, keeps_graph: bool) -> None:
        """A backward begins that may reach runs of its graphs, or what they have returned."""

    def holds_more(self) -> None:
        """Somebody holds more of what a run has returned than after earlier ones like it."""

    def backward_ended(self) -> None:
        """A backward is over that began while runs of its graphs were open."""

    def waits_beside(self, peak_nbytes: int, runs: Sequence[Run]) -> None:
        """A step takes so much in all while these runs are open; others cannot do with less."""

    def reruns_begin(self, roots: Roots) -> None:
        """A backward begins in which its graphs may run, as they did in one before."""


class Returned(NamedTuple):
    """A storage that a run has returned; its identity is its own as long as this lives."""

    storage: StorageWeakRef
    nbytes: int
    device: torch.device


@dataclass(eq=False, repr=False)  # which would write out all of its owner
class Run:
    """One forward of a planned graph. Only its node of autograd's graph holds it.

    Attributes:
        owner: of the graph.
        ran: as the step of the graph has it; None for a call in eager mode.
        device: where it ran.
        sizes: what the graph's symbolic sizes stood for.
        find_graph: finds the graph at these sizes, when it is asked for.
        returned: the storages that it returned, by identity.
        behind: the operations in eager mode whose results it was given, by their names.
        has_waited: whether a backward has begun since.
        held: the most of its results that somebody held as a backward went through it.
        let_go: by which of its results live, whether that is what its backward needs; known of
            earlier runs by the same plan.
    """

    owner: Owner
    ran: Ran | None
    device: torch.device
    sizes: tuple[int, ...] = ()
    find_graph: Callable[[], Part] | None = None
    returned: Mapping[int, Returned] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
    has_waited: bool = False
    held: float = 0.0
    let_go: LetGo = field(default_factory=dict)

    @functools.cached_property
    def graph(self) -> Part | None:
        """The graph at these sizes; None for a call in eager mode."""
        return None if self.find_graph is None else self.find_graph()

    @functools.cached_property
    def name(self) -> str:
        """Of the plan that the graph ran by; "" for a call in eager mode."""
        return "" if self.ran is None else self.ran.name

    @functools.cached_property
    def situation(self) -> Hashable:
        """What tells situations apart in which it is open."""
        return id(self.owner), self.name

    @property
    def region(self) -> int:
        """Number of the region of a checkpoint that it ran in; 0 if in none."""
        return 0 if self.ran is None else self.ran.region.number

    @property
    def held_nbytes(self) -> int:
        """What it holds now for its backward, what it returned included."""
        if self.ran is not None and self.region:
            return self.returned_nbytes + self.ran.region.state_nbytes
        if self.graph is None:
            return 0
        crossing = self.graph.figures.crossing
        return crossing.nbytes - (crossing.passed_nbytes if self.is_let_go else 0)

    @property
    def again_nbytes(self) -> int:
        """What it will hold more, once its region runs again."""
        return self.graph.figures.crossing_nbytes if self.graph and self.region else 0

    @property
    def left_nbytes(self) -> int:
        """What outlives its backward of what it returned, as far as is known."""
        return 0 if self.graph is None or self.ran is None else self.ran.left_by(self.graph)

    @property
    def returned_nbytes(self) -> int:
        """What it has returned and somebody holds."""
        return living_nbytes(self.returned)

    @property
    def is_let_go(self) -> bool:
        """Whether nobody holds what it has returned, but for its own backward where that needs it.

        That holds what it needs all the time: is there no more, the rest is gone.
        """
        living = tuple(not kept.storage.expired() for kept in self.returned.values())
        if not any(living):
            return True
        if self.region or self.find_graph is None:  # in one it runs again for its backward
            return False
        if living not in self.let_go:
            self.let_go[living] = self._has_what_it_needs()
        return self.let_go[living]

    def _has_what_it_needs(self) -> bool:
        """Whether no more of what it has returned lives than that."""
        living = (kept for kept in self.returned.values() if not kept.storage.expired())
        living_nbytes = sum(rounded_nbytes(kept.nbytes, kept.device) for kept in living)
        with suppress(Exception):  # in a user's backward, which goes on without
            assert self.graph is not None
            figures = self.graph.figures
            return living_nbytes <= figures.outputs_nbytes - figures.crossing.passed_nbytes
        return False

    def held_share(self, node: Any) -> float:
        """Of what it has returned, the share that somebody holds beside its backward, at most.

        Args:
            node: of autograd's graph, which may have saved some of it.
        """
        alive = [key for key, kept in self.returned.items() if not kept.storage.expired()]
        if not alive:
            return 0.0
        sizes = {
            key: rounded_nbytes(kept.nbytes, kept.device) for key, kept in self.returned.items()
        }
        least_nbytes = sum(sizes.values()) / _SHARES
        # What a node has saved is asked for only where there is something to let go of.
        is_much = sum(sizes.values()) > SCALARS_NBYTES
        if is_much and any(sizes[key] > least_nbytes for key in alive):
            own = Counter(_results_saved_by(node))
            alive = [key for key in alive if _torch.storage_references(key) > own[key]]
        living_nbytes = sum(sizes[key] for key in alive)
        return math.ceil(_SHARES * living_nbytes / max(1, sum(sizes.values()))) / _SHARES


def _results_saved_by(node: Any) -> list[int]:
    """Storages of its own results that a node has saved, once for each tensor that holds one.

    Whatever else it has saved may be the very tensor that somebody holds: it is left out.
    """
    return [
        _torch.storage_identity(storage)
        for value in tensors_in(_torch.saved_by(node))
        if value.grad_fn is node
        for storage in storages_of(value)
    ]


def living_nbytes(returned: Mapping[int, Returned]) -> int:
    """Of storages that were returned, those that somebody holds."""
    return sum(kept.nbytes for kept in returned.values() if not kept.storage.expired())


def returned_by(tensors: Iterable[torch.Tensor]) -> Mapping[int, Returned]:
    """The storages of what a graph has returned, by identity."""
    return {
        _torch.storage_identity(storage): Returned(
            StorageWeakRef(storage), storage.nbytes(), tensor.device
        )
        for tensor in tensors
        for storage in storages_of(tensor)
    }
