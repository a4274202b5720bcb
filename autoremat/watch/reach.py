"""What a step's own code holds that nobody has told of, found where that code can name it.

Enters: the functions that run on this thread while a step is looked into. Leaves: what modules hold
that are not trained, as a reference or a moving average, and single tensors that have come since
the first step began, as cached results, their gradients, perturbations of weights. Guarantees:
holds no tensor; single tensors that were there before the first step are data, and left out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.call_stack import globals_of, named_by_users
from autoremat.memory.meter import gradients_of, storage_identities, storages_of
from autoremat.watch.eager_code import nodes_behind

DEPTH = 4  # of containers and attributes, from a variable on
MOST = 4000  # things that are looked at, those next to the step's own code first
MOST_NODES = 100_000  # of autograd's graphs, behind what is found
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})
_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = frozenset({"autoremat", "builtins", "torch"})  # whose objects hold nothing of the user's


class Reach:
    """What the code of one session's steps can name."""

    def __init__(self) -> None:
        """Nothing is known to be data."""
        self._data: dict[int, StorageWeakRef] | None = None

    def note_data(self) -> None:
        """The first step begins, unless one has."""
        if self._data is None:
            single, _ = _in_reach(of_all=True)
            storages = (storage for tensor in single for storage in storages_of(tensor))
            self._data = {_torch.storage_identity(s): StorageWeakRef(s) for s in storages}

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside its data, which is noted if none was."""
        self.note_data()
        single, modules = _in_reach()
        known = self._data or {}
        self._data = data = {key: s for key, s in known.items() if not s.expired()}
        new = [t for t in single if data.keys().isdisjoint(storage_identities([t]))]
        return new + [tensor for module in modules for tensor in _untrained(module)]


def _untrained(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module that only helps: frozen as a whole, or in eval mode."""
    parameters = list(module.parameters())
    if module.training and (not parameters or any(p.requires_grad for p in parameters)):
        return []
    return [t for t in (*parameters, *module.buffers()) if not is_lazy(t)]


def _in_reach(*, of_all: bool = False) -> tuple[list[torch.Tensor], list[nn.Module]]:
    """Real tensors that code can name, or differentiates, and their gradients; and modules."""
    things = list(_things_in_reach(of_all))
    named = [thing for thing in things if isinstance(thing, torch.Tensor)]
    single = [*named, *_differentiated_in(named)]
    return single + gradients_of(single), [t for t in things if isinstance(t, nn.Module)]


def _differentiated_in(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What autograd has taken gradients to, but for parameters: its graph holds that on.

    As the loss of an attack's last pass does with the perturbation that the next has replaced.
    """
    nodes = itertools.islice(nodes_behind(map(_grad_fn, tensors)), MOST_NODES)
    leaves = [node.variable for node in nodes if _torch.accumulates(node)]
    return [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter) and _is_real(leaf)]


def _grad_fn(tensor: torch.Tensor) -> Any:
    """What made it; None also of a view whose base was changed so that autograd refuses to say."""
    with suppress(RuntimeError):
        return tensor.grad_fn
    return None


def _things_in_reach(of_all: bool) -> Iterator[torch.Tensor | nn.Module]:
    """Each once; single tensors only of the function that calls the model, or a backward.

    And of the optimizer's step that calls it as a closure. What others around it hold may be of
    another step, or of none; and what the model's own methods hold, parameters that FSDP has
    gathered among it, is known in other ways.

    Args:
        of_all: whether single tensors are those of all functions.
    """
    seen: set[int] = set()
    is_around = False
    for owner, values in named_by_users():
        is_own = issubclass(type(owner), nn.Module)
        is_step = issubclass(type(owner), torch.optim.Optimizer)
        is_asked = of_all or is_step or not (is_own or is_around)
        for depth in range(DEPTH):
            inner: list[Any] = []
            for value in values:
                if type(value) in _PLAIN or id(value) in seen or len(seen) > MOST:
                    continue
                seen.add(id(value))
                # `isinstance` would ask proxies for their class and run their code.
                if issubclass(type(value), nn.Module):
                    yield value
                elif not issubclass(type(value), torch.Tensor):
                    inner += _held_by(value, is_named=not depth)
                elif is_asked and _is_real(value):
                    yield value
            values = inner
        is_around |= not is_own


def _is_real(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, _torch.FakeTensor):
        return False
    with suppress(RuntimeError, NotImplementedError):  # half-dead ones have no storage to show
        return bool(storages_of(tensor))
    return False


def _held_by(value: Any, *, is_named: bool) -> Iterable[Any]:
    """What is in a container, an object of the user's, or a function that their code names.

    None of the user's code runs: what they have made of a list is read as a list.
    """
    kind = type(value)
    container = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    if container is not None:
        return itertools.islice(container.__iter__(value), MOST)
    if issubclass(kind, dict):
        return itertools.islice(dict.values(value), MOST)
    if kind is MethodType:
        return (value.__self__, value.__func__)
    if kind is FunctionType:
        if not is_named:
            return ()
        return [*_cells_of(value), *globals_of(value.__code__, value.__globals__)]
    is_closed = str(kind.__module__).partition(".")[0] in _CLOSED
    if issubclass(kind, type) or (is_closed and not issubclass(kind, torch.optim.Optimizer)):
        return ()
    with suppress(AttributeError):
        return list(object.__getattribute__(value, "__dict__").values())
    return ()


def _cells_of(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # of a variable that has no value yet
            yield cell.cell_contents
