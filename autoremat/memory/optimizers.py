"""The optimizer behind its wrappers, whose parameters it steps, and what it keeps.

Enters: an optimizer as the user's training stack hands it over: a torch optimizer, or something
around one. Leaves: each layer of it, its parameters, and where its tensors are. Guarantees:
nothing is stepped or changed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_PLAIN = frozenset({bool, bytes, complex, float, int, str, type(None)})
_INNER = ("optimizer", "_optimizer", "optim")  # where wrappers keep what they wrap


def layers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers among a wrapper and what it wraps, the outermost first."""
    layers: list[torch.optim.Optimizer] = []
    while optimizer is not None and not any(optimizer is layer for layer in layers):
        if isinstance(optimizer, torch.optim.Optimizer):
            layers.append(optimizer)
        held = (getattr(optimizer, name, None) for name in _INNER)
        optimizer = next((o for o in held if isinstance(o, torch.optim.Optimizer)), None)
    return layers


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters that any layer of an optimizer steps, each once."""
    groups = (group for layer in layers_of(optimizer) for group in layer.param_groups)
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    return list(found.values())


def steps_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has a `step`: LOMO has none, whose hooks step within the backward."""
    own, none = type(optimizer).step, torch.optim.Optimizer.step
    return inspect.unwrap(own) is not inspect.unwrap(none)


def tensors_in_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors in the state by parameter, and in objects there: GaLore keeps matrices in such."""
    states = list(optimizer.state.values())
    held = (value for state in states if isinstance(state, dict) for value in state.values())
    return _tensors_in([*states, *(_attributes_of(value) for value in held)])


def tensors_beside_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What else an optimizer keeps: some have tensors in attributes, alone or in containers."""
    known = ("param_groups", "state", "defaults")
    return _tensors_in([value for name, value in vars(optimizer).items() if name not in known])


def _attributes_of(value: Any) -> dict[str, Any]:
    """Those of a plain object; objects of the user's may answer anything."""
    with suppress(Exception):
        is_other = isinstance(value, torch.Tensor | nn.Module | torch.optim.Optimizer)
        found = object.__getattribute__(value, "__dict__")
        if isinstance(found, dict) and not (is_other or callable(value)):
            return found
    return {}


def _tensors_in(values: list[Any]) -> list[torch.Tensor]:
    """Tensors in containers and dataclasses, which may be in cycles, and long."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # alive, or others would get their identities
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            values += (inner for inner in _inside(value) if type(inner) not in _PLAIN)
    return found


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if not dataclasses.is_dataclass(value):
        return ()
    return [getattr(value, field.name, None) for field in dataclasses.fields(value)]


def count_values(optimizer: torch.optim.Optimizer) -> int:
    """Of the state, without a look at tensors: it is asked for after each step."""
    count = 0
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for value in state.values():
                count += len(value) if isinstance(value, list) else 1
    return count


class StepOptimizers:
    """The optimizers of a step: those that were given, and those that have stepped it.

    Attributes:
        steps: how often the models were stepped by any of them, as far as it was told.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[torch.Tensor]], given: Sequence[Any]
    ) -> None:
        """Of models that have these parameters now, with these optimizers."""
        self._parameters = parameters
        self._given = list(given)
        self.steps = 0
        # How many values the state had after the latest step; None for another model's.
        self._met: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()

    def add(self, optimizers: Iterable[Any]) -> None:
        """These were given, too, each once; and there are more models."""
        known = {id(given) for given in self._given}
        self._given += [optimizer for optimizer in optimizers if id(optimizer) not in known]
        for optimizer in [o for o, count in self._met.items() if count is None]:
            del self._met[optimizer]

    @property
    def given(self) -> list[Any]:
        """Those that are going to step the models, whether they have or not."""
        return self._given

    @property
    def known(self) -> list[Any]:
        """Those that live, the given ones first."""
        layers = {id(layer) for given in self._given for layer in layers_of(given)}
        met = (o for o, count in list(self._met.items()) if count is not None)
        return [*self._given, *(o for o in met if id(o) not in layers)]

    def has_new_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has stepped the model for the first time, or has more state."""
        if optimizer not in self._met:
            self._met[optimizer] = -1 if self._steps_model(optimizer) else None
        before, now = self._met[optimizer], count_values(optimizer)
        if before is not None:
            self._met[optimizer] = now
        is_given = any(optimizer is layer for given in self._given for layer in layers_of(given))
        self.steps += before is not None or is_given  # which may step copies of the parameters
        return before not in (None, now)

    def _steps_model(self, optimizer: torch.optim.Optimizer) -> bool:
        mine = {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in mine for parameter in parameters_of(optimizer))


class Stepped(Protocol):
    """Who wants to know of optimizers that training code makes after planning was asked for."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of whichever model, has made a step."""


_watching: weakref.WeakSet[Stepped] = weakref.WeakSet()
_have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_steps = 0


def watch_optimizers(watcher: Stepped) -> None:
    """Tell somebody of each optimizer's steps, for as long as it lives."""
    _watching.add(watcher)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_post_hook(_has_stepped)


def count_steps() -> int:
    """How many steps optimizers have made since anybody watches them."""
    return _steps


def that_have_stepped() -> list[torch.optim.Optimizer]:
    """Optimizers of whichever model that live and have made a step since anybody watches them."""
    return list(_have_stepped)


def _has_stepped(optimizer: torch.optim.Optimizer, *_arguments: object) -> None:
    global _steps
    _steps += 1
    _have_stepped.add(optimizer)
    for watcher in list(_watching):
        watcher.optimizer_stepped(optimizer)


def require_optimizer_of(model: nn.Module, optimizer: Any) -> None:
    """Refuse what is no optimizer, or the optimizer of another model.

    Parameters of another precision than any of the model's may be copies of the model's, as mixed
    precision keeps them by hand.

    Raises:
        TypeError: if it is no optimizer, nor anything around one.
        ValueError: if none of its parameters is the model's.
    """
    if optimizer is None:
        return
    if not layers_of(optimizer):
        raise TypeError(
            "optimizer is a torch.optim.Optimizer, or a wrapper that has one as its .optimizer, "
            f"not {type(optimizer).__name__}."
        )
    mine, stepped = list(model.parameters()), parameters_of(optimizer)
    shared = {id(parameter) for parameter in mine}.intersection(map(id, stepped))
    if shared or not {p.dtype for p in mine}.intersection(p.dtype for p in stepped):
        return
    raise ValueError(
        f"None of the optimizer's {len(stepped)} parameters is among the model's {len(mine)}: it "
        "is another model's, or was made before the model's parameters were replaced (a copy of "
        "the model, model.to() where that makes new parameters, sharding, "
        "load_state_dict(assign=True)). Make the optimizer from model.parameters() of this model, "
        "after all that changes them."
    )
