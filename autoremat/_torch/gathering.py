"""Private names of what units of FSDP2 gather: asked for at each graph of a step.

Guarantees: nothing is held; importing this imports nothing of `torch.distributed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Gathering"]


@dataclass(frozen=True)
class Gathering:
    """The units of one model, as their parameters come and go.

    Two are equal that are of the same units.
    """

    _groups: tuple[weakref.ref[Any], ...]

    @classmethod
    def of(cls, groups: Iterable[Any]) -> Gathering:
        """Of groups of parameters that are gathered together."""
        return cls(tuple(map(weakref.ref, groups)))

    def states(self) -> list[Hashable]:
        """Of each unit, what changes whenever it gathers its parameters or lets them go.

        No function is called for a unit: there may be many, and few of them change.
        """
        living = [reference() for reference in self._groups]
        return [g and (g._sharded_state, g._all_gather_result is None) for g in living]

    def gathered(self, number: int) -> tuple[torch.Tensor, ...]:
        """What a unit has made of its parameters; without memory while they are not gathered."""
        group = self._groups[number]()
        if group is None:
            return ()
        return (*tensors_among(map(gathered_of, group.fsdp_params)), *moving_in(group))

    def in_flight(self) -> tuple[torch.Tensor, ...]:
        """Buffers of collectives that no unit has."""
        living = [reference() for reference in self._groups]
        contexts = {id(g.comm_ctx): g.comm_ctx for g in living if g is not None}
        return tuple(t for context in contexts.values() for t in moving_between(context))


def gathered_of(param: Any) -> Any:
    """A parameter as a forward sees it; None if it was never gathered."""
    return getattr(param, "_unsharded_param", None)


def moving_in(group: Any) -> tuple[torch.Tensor, ...]:
    """What a unit's parameters are gathered from and into, and its gradients reduced."""
    return tensors_among(_moving_in(group))


def _moving_in(group: Any) -> Iterator[Any]:
    for param in group.fsdp_params:
        yield from param.all_gather_outputs
        yield from getattr(param, "_unsharded_inner_tensors", ())
        yield getattr(param, "_sharded_post_forward_param_data", None)
    yield getattr(group._all_reduce_state, "all_reduce_input", None)
    yield getattr(group._all_gather_result, "all_gather_output", None)


def moving_between(context: Any) -> tuple[torch.Tensor, ...]:
    """What streams of collectives still need, of whichever unit."""
    kept = getattr(context, "all_gather_state", None)
    result = getattr(kept, "all_gather_result", None)
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:  # torch 2.11 keeps one
        states = [getattr(context, "reduce_scatter_state", None)]
    inputs = (state.reduce_scatter_input for state in states if state is not None)
    return tensors_among([getattr(result, "all_gather_output", None), *inputs])


def tensors_among(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Those of the values that are tensors."""
    return tuple(value for value in values if isinstance(value, torch.Tensor))
