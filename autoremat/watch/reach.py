"""What a step's own code holds that nobody has told of, found where that code can name it.

Enters: the functions that run on this thread while a step is looked into, and steps of optimizers.
Leaves: what modules hold that are not trained, as a reference or a moving average, and single
tensors that have come since the first step began, as cached results, their gradients, perturbations
of weights. Guarantees: holds no tensor; single tensors that were there before the first step are
data, and left out, unless the training has written to them since.

A step may be written in several functions: one takes the loss and its gradients, another moves the
weights, and what that returns is a variable of the one around both. But functions around a step
hold what is of no step as well, as results of earlier ones. Of those only that counts which has
come since an optimizer has stepped: it is of the training step that goes on.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from autoremat import _torch
from autoremat.call_stack import (
    globals_of,
    named_by_users,
    variables_of_waiting,
    waiting_generators,
)
from autoremat.memory.meter import gradients_of
from autoremat.memory.optimizers import count_steps
from autoremat.memory.storage_sizes import storage_identities, storages_of
from autoremat.watch.eager_code import nodes_behind
from autoremat.watch.ledger import beginnings
from autoremat.watch.written import Written

DEPTH = 4  # of containers and attributes, from a variable on
MOST = 4000  # things that are looked at, those next to the step's own code first
MOST_NODES = 100_000  # of autograd's graphs, behind what is found
NOTED_STEPS = 4  # training steps as which begin what is there is noted, without being asked
AFTER_ONE_MISSED = 2  # further ones: models may take turns
SEARCHES = 32  # for `with` blocks, whatever they take
SHARE_OF_SEARCHES = 0.02  # of the time, what later ones take
_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})
_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = frozenset({"autoremat", "builtins", "torch"})  # whose objects hold nothing of the user's


class Reach:
    """What the code of one session's steps can name.

    Attributes:
        is_sure: whether it can be told which single tensors of functions around are the step's.
        is_later: whether the pass that goes on is a later one of its training step, where what an
            earlier one has made may be there.
    """

    def __init__(self) -> None:
        """Nothing is known to be data."""
        self._data: _Storages | None = None
        self._before: _Storages | None = None  # there as the training step began
        self._written = Written()
        self._optimizer_steps = 0
        self.is_later = False
        self._searches = 0
        self._begun = 0  # training steps that optimizers have ended, or where one was missed
        self.is_sure = True

    def note_data(self) -> None:
        """The first step begins, unless one has."""
        if self._data is None:
            found = _in_reach()
            self._data = _storages_of(found.single)
            with suppress(Exception):  # as below
                self._written.note(found.single)
                self._written.averages(found.modules)  # none yet

    def begin_step(self, optimizer_steps: int) -> None:
        """A forward begins, and no backward of one before it is to come.

        What is there is noted as it begins another training step, in the first ones: later on where
        `tensors` was asked in one of which nothing is known, for the next ones.

        Args:
            optimizer_steps: so many have optimizers made. Without any, all may be one training
                step, or none: what functions around hold is not the step's then.
        """
        is_same = optimizer_steps == self._optimizer_steps
        self.is_later = is_same and optimizer_steps > 0  # else nobody may tell of any step
        if is_same:
            return
        self._optimizer_steps, self._before = optimizer_steps, None
        self.is_sure = self._begun < NOTED_STEPS
        if self.is_sure:
            self._begun += 1
            with suppress(Exception):  # objects of the user's may answer anything
                self._before = _storages_of(_in_reach(self._waiting()).single)

    def _waiting(self) -> Iterator[list[Any]]:
        self._searches += 1
        return _blocks.variables(is_due=self._searches <= SEARCHES)

    def tensors(self) -> list[torch.Tensor]:
        """What it holds beside its data, which is noted if none was."""
        self.note_data()
        waiting = () if self._before is None else self._waiting()
        found, known = _in_reach(waiting), self._data or {}
        self._data = data = {key: s for key, s in known.items() if not s.expired()}
        new = _but(data, found.own)
        if self._before is not None:
            new += _but(self._before, _but(data, found.around))
        elif not self.is_sure:
            self._begun = NOTED_STEPS - AFTER_ONE_MISSED
        modules = [module for module in found.modules if _is_untrained(module)]
        with suppress(Exception):  # tensors of the user's classes may answer anything
            modules += self._written.averages(found.modules)
            new += self._written.among(found.single)
        return new + [tensor for module in modules for tensor in _tensors_of(module)]


class _Blocks:
    """The `with` blocks that wait, looked for once for all sessions of a moment.

    The search goes over all of Python's objects: after a session's first ones it takes a small
    share of the time, and a block that is entered in between is not found.
    """

    def __init__(self) -> None:
        self._moment: Hashable = None
        self._found: list[Any] = []
        self._next_s = 0.0

    def variables(self, *, is_due: bool) -> Iterator[list[Any]]:
        """What those that wait still have in variables.

        Args:
            is_due: whether to look for others whatever that takes.
        """
        now_s, moment = time.monotonic(), (count_steps(), beginnings())
        if moment != self._moment and (is_due or now_s >= self._next_s):
            self._moment, self._found = moment, waiting_generators()
            ended_s = time.monotonic()
            self._next_s = ended_s + (ended_s - now_s) / SHARE_OF_SEARCHES
        return variables_of_waiting(self._found)


_blocks = _Blocks()
_Storages = Mapping[int, StorageWeakRef]  # by identity


def _storages_of(tensors: Iterable[torch.Tensor]) -> _Storages:
    storages = (storage for tensor in tensors for storage in storages_of(tensor))
    return {_torch.storage_identity(s): StorageWeakRef(s) for s in storages}


def _but(known: _Storages, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have no storage of these."""
    return [t for t in tensors if known.keys().isdisjoint(storage_identities([t]))]


def _is_untrained(module: nn.Module) -> bool:
    """Whether a module only helps: frozen as a whole, or in eval mode."""
    parameters = list(module.parameters())
    is_frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
    return is_frozen or not module.training


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, but for those that are still to be made."""
    return [t for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)]


@dataclass
class _Found:
    """Real tensors that code can name, or differentiates, and their gradients; and modules.

    Attributes:
        own: of the function that calls the model, or a backward.
        around: of functions that have called that one.
        methods: of the model's own methods.
        modules: of all.
    """

    own: list[torch.Tensor] = field(default_factory=list)
    around: list[torch.Tensor] = field(default_factory=list)
    methods: list[torch.Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def single(self) -> list[torch.Tensor]:
        """All tensors that no module holds."""
        return [*self.own, *self.around, *self.methods]


def _in_reach(waiting: Iterable[list[Any]] = ()) -> _Found:
    """Of the functions that run, and beside them of what waits."""
    found = _Found()
    for thing, named in _things_in_reach(found, waiting):
        if isinstance(thing, nn.Module):
            found.modules.append(thing)
        else:
            named.append(thing)
    for named in (found.own, found.around, found.methods):
        named += _differentiated_in(named)
        named += gradients_of(named)
    return found


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


def _things_in_reach(
    found: _Found, waiting: Iterable[list[Any]]
) -> Iterator[tuple[torch.Tensor | nn.Module, list[Any]]]:
    """Each once, and which list of what is found a single tensor belongs to.

    The function that calls the model, or a backward, has its own; so has the optimizer's step that
    calls it as a closure. What others around it hold may be of another step, or of none, and so may
    what is an attribute of modules and tensors; what the model's own methods hold, parameters that
    FSDP has gathered among it, is known in other ways.
    """
    seen: set[int] = set()
    aside: list[Any] = []
    is_around = False
    for owner, values in named_by_users():
        is_own = issubclass(type(owner), nn.Module)
        is_step = issubclass(type(owner), torch.optim.Optimizer)
        named = found.around if is_around else found.own
        named = found.own if is_step else found.methods if is_own else named
        for thing in _things_among(values, seen):
            yield thing, named
            aside += _attributes_of(thing)
        is_around |= not is_own
    for thing in _things_among(aside, seen):
        yield thing, found.around
    for values in waiting:  # which may be of anything: no module there is known to be the step's
        for thing in _things_among(values, seen):
            if not isinstance(thing, nn.Module):
                yield thing, found.around


def _things_among(values: list[Any], seen: set[int]) -> Iterator[torch.Tensor | nn.Module]:
    """Real tensors and modules in these, and in what these hold, that were not seen before."""
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
            elif _is_real(value):
                yield value
        values = inner


def _attributes_of(thing: torch.Tensor | nn.Module) -> list[Any]:
    """What the user has put on a tensor, or on a module, its parts and their parameters.

    Private names are others': a parameter of FSDP's holds there what it gathers.
    """
    owners: list[Any] = [thing]
    if isinstance(thing, nn.Module):
        owners = [*thing.modules(), *thing.parameters()]
    found = (item for owner in owners for item in getattr(owner, "__dict__", {}).items())
    return [value for name, value in found if name[:1] != "_" and type(value) not in _PLAIN]


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
