"""What the compiled forwards of this process have left alive for their backwards.

Enters: each run of a planned graph as it happens, of whichever model, and the start of each
backward. Leaves: the runs that are open. Guarantees: a run is open from its forward until a
backward that keeps no graph has gone through it, or nothing can reach it any more; a run costs
one hook on one node of autograd's graph.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autoremat import _torch
from autoremat.measure import same_device, storages_of

SAME = 1.02  # peaks that differ by less are told of once

Roots = Sequence[Any]  # tensors or edges that a backward begins at


class Owner(Protocol):
    """Who plans the graphs of a model, and answers for their budget."""

    audit: Any  # `audit.Audit`: knows what the model holds

    def backward_begins(self, roots: Roots, *, keeps_graph: bool) -> None:
        """A backward begins that may reach runs of its graphs."""


@dataclass(eq=False)
class Run:
    """One forward of a planned graph. Only its node of autograd's graph holds it.

    Attributes:
        owner: of the graph.
        name: of the graph; "" for a call in eager mode.
        device: where it ran.
        crossing_nbytes: what it holds until its backward, what it returned included.
        returned: identities of the storages that it returned.
        is_over: whether its backward has begun that keeps no graph.
    """

    owner: Owner
    name: str
    device: torch.device
    crossing_nbytes: int
    returned: frozenset[int] = frozenset()
    is_over: bool = False


@dataclass
class _Books:
    """Of this process: its memory is one."""

    open: weakref.WeakValueDictionary[int, Run] = field(default_factory=weakref.WeakValueDictionary)
    returned: dict[int, tuple[StorageWeakRef, int, torch.device]] = field(default_factory=dict)
    told_nbytes: dict[int, int] = field(default_factory=dict)  # by budget, in this step
    has_gone_back: bool = False  # since the latest forward: the next one begins another step


_books = _Books()
_numbers = itertools.count()  # of runs, in their order
_KEY = "autoremat"  # in the metadata of autograd's nodes


def open_runs(device: torch.device) -> list[Run]:
    """Runs whose backward is still to come, in the order in which they ran."""
    runs = sorted(_books.open.items())
    return [run for _, run in runs if not run.is_over and same_device(run.device, device)]


def returned_storages(device: torch.device) -> dict[int, int]:
    """Bytes of what runs that are over have returned and somebody holds, by identity."""
    counted = {key for run in open_runs(device) for key in run.returned}
    found: dict[int, int] = {}
    for key, (storage, nbytes, place) in list(_books.returned.items()):
        if storage.expired():
            _books.returned.pop(key, None)
        elif key not in counted and same_device(place, device):
            found[key] = nbytes
    return found


def run_of(node: Any) -> Run | None:
    """The run that a node of autograd's graph is the backward of."""
    run: Run | None = node.metadata.get(_KEY)
    return run


def is_news(budget_nbytes: int, peak_nbytes: int, *, is_final: bool) -> bool:
    """Whether nobody has told of such a peak above a budget in this step, which now is told of.

    Args:
        budget_nbytes: the budget.
        peak_nbytes: the peak.
        is_final: whether all of the step's forward has run: until then it grows, and is told once.
    """
    before_nbytes = _books.told_nbytes.get(budget_nbytes, 0)
    if before_nbytes and (not is_final or peak_nbytes <= SAME * before_nbytes):
        return False
    _books.told_nbytes[budget_nbytes] = peak_nbytes
    return True


def note_run(
    owner: Owner,
    name: str,
    *,
    outputs: Sequence[Any],
    crossing_nbytes: int,
    device: torch.device,
) -> None:
    """A graph has run its forward, or a model that has none.

    Args:
        owner: of the graph.
        name: of the graph; "" for a call in eager mode.
        outputs: what it returned; without a gradient to come, it holds nothing.
        crossing_nbytes: what it holds until its backward.
        device: where it ran.
    """
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    node = _torch.compiled_backward_of(tensors) if name else _first_node(tensors)
    if node is None or run_of(node) is not None:
        return
    _watch()
    if _books.has_gone_back:
        _books.told_nbytes.clear()
        _books.has_gone_back = False
    returned = {
        _torch.storage_identity(storage): (StorageWeakRef(storage), storage.nbytes(), tensor.device)
        for tensor in tensors
        for storage in storages_of(tensor)
    }
    run = Run(owner, name, device, crossing_nbytes, frozenset(returned))
    node.metadata[_KEY] = run
    node.register_prehook(functools.partial(_backward_runs, weakref.ref(run)))
    _books.open[next(_numbers)] = run
    _books.returned |= returned


def _first_node(tensors: Sequence[torch.Tensor]) -> Any | None:
    return next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)


def _backward_runs(reference: weakref.ref[Run], _gradients: Any) -> None:
    """Its memory goes with this backward, unless that keeps the graph."""
    run = reference()
    _books.has_gone_back = True
    if run is not None:
        run.is_over = not _torch.keeps_graph()


@functools.cache
def _watch() -> None:
    """Tell owners of each backward; once, and not before there are any."""
    _torch.watch_backwards(_around_backward)


@contextlib.contextmanager
def _around_backward(roots: Roots, keeps_graph: bool) -> Iterator[None]:
    if _torch.CompileContext.current_compile_id() is None:  # else it only traces one
        for owner in dict.fromkeys(run.owner for run in _books.open.values()):
            owner.backward_begins(roots, keeps_graph=keeps_graph)
    yield
