"""What the compiled forwards of this process have left alive for their backwards.

Enters: each run of a planned graph as it happens, of whichever model, and the start of each
backward. Leaves: the runs that are open. Guarantees: a run is open from its forward until a
backward that keeps no graph has gone through it, or nothing can reach it any more; a run costs
one hook on one node of autograd's graph.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autoremat import _torch

Roots = Sequence[Any]  # tensors or edges that a backward begins at


class Owner(Protocol):
    """Who plans the graphs of a model, and answers for their budget."""

    audit: Any  # `audit.Audit`: knows what the model holds

    def backward_begins(self, roots: Roots, *, keeps_graph: bool) -> None:
        """A backward begins that may reach runs of its graphs."""


@dataclass(eq=False)
class Run:
    """One forward of a planned graph.

    Attributes:
        owner: of the graph.
        name: of the graph.
        device: where it ran.
        crossing_nbytes: what it holds until its backward, what it returned included.
        node: of autograd's graph; None once that is gone.
    """

    owner: Owner
    name: str
    device: torch.device
    crossing_nbytes: int
    node: weakref.ref[Any]
    _is_over: bool = field(default=False, repr=False)


_open: dict[Run, None] = {}


def open_runs() -> list[Run]:
    """Runs whose backward is still to come, in the order in which they ran."""
    for run in [run for run in _open if run._is_over]:
        _open.pop(run, None)
    return list(_open)


def has_run(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a planned graph."""
    return any(run.node() is node for run in list(_open))


def note_run(
    owner: Owner,
    name: str,
    *,
    outputs: Sequence[Any],
    crossing_nbytes: int,
    device: torch.device,
) -> None:
    """A graph has run its forward.

    Args:
        owner: of the graph.
        name: of the graph.
        outputs: what it returned; without a gradient to come, it holds nothing.
        crossing_nbytes: what it holds until its backward.
        device: where it ran.
    """
    node = _torch.compiled_backward_of(o for o in outputs if isinstance(o, torch.Tensor))
    if node is None or has_run(node):
        return
    _watch()
    run = Run(owner, name, device, crossing_nbytes, weakref.ref(node))
    weakref.finalize(node, _open.pop, run, None).atexit = False
    node.register_prehook(functools.partial(_backward_runs, run))
    _open[run] = None


def _backward_runs(run: Run, _gradients: Any) -> None:
    """Its memory goes with this backward, unless that keeps the graph."""
    run._is_over = not _torch.keeps_graph()


@functools.cache
def _watch() -> None:
    """Tell owners of each backward; once, and not before there are any."""
    _torch.watch_backwards(_around_backward)


@contextlib.contextmanager
def _around_backward(roots: Roots, keeps_graph: bool) -> Iterator[None]:
    if _torch.CompileContext.current_compile_id() is None:  # else it only traces one
        for owner in dict.fromkeys(run.owner for run in open_runs()):
            owner.backward_begins(roots, keeps_graph=keeps_graph)
    yield
