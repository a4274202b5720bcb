"""What calls of operators cost that are seen one by one, each distinct call once.

Enters: operators with their (fake) arguments and results. Leaves: an `OpCost` for each. Guarantees:
nothing of a step is held; until they are measured, calls are free.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import FREE, OpCost
from autoremat.cost.op_times import profile_nodes
from autoremat.graph.random_draws import has_own_generator, is_random


class Prices:
    """Of the operators of one step."""

    def __init__(self) -> None:
        """Of none yet."""
        self._graph = fx.Graph()
        self._nodes: dict[Hashable, fx.Node | None] = {}
        self._costs: dict[Hashable, OpCost] = {}

    def of(self, operator: Any, given: tuple[Any, Any], result: Any) -> OpCost:
        """The cost of a call; nothing before it was seen, and measured."""
        key = self.key(operator, given)
        if key not in self._nodes:
            tensors = _torch.tensor_leaves((given, result))
            is_plain = isinstance(operator, _torch.OpOverload) and all(map(_is_strided, tensors))
            self._nodes[key] = self._sample(operator, given, result) if is_plain else None
        return self._costs.get(key, FREE)

    def key(self, operator: Any, given: tuple[Any, Any]) -> Hashable:
        """What is equal for calls that cost the same."""
        lengths = (len(v) if isinstance(v, (list, tuple)) else -1 for v in given[0])
        return operator, *given[1], *lengths, *map(_plain, _torch.tree_leaves(given))

    def cost(self, key: Hashable) -> OpCost:
        """The cost of a call that was seen."""
        return self._costs.get(key, FREE)

    def draws(self, key: Hashable) -> bool:
        """Whether a call that was seen draws from the generator of the device."""
        node = self._nodes.get(key)
        return node is not None and is_random(node) and not has_own_generator(node)

    def draws_apart(self, key: Hashable) -> bool:
        """Whether it draws from a generator of the user's, whose state no checkpoint restores."""
        node = self._nodes.get(key)
        return node is not None and is_random(node) and has_own_generator(node)

    def measure(self) -> None:
        """Find what the calls cost that were seen."""
        todo = {key: node for key, node in self._nodes.items() if node is not None}
        costs = profile_nodes(list(todo.values()))
        self._costs = {key: costs[node] for key, node in todo.items()}

    def _sample(self, operator: Any, given: tuple[Any, Any], result: Any) -> fx.Node:
        """A node of the call, on tensors of its own that share memory as those of the call do."""
        bases: dict[int, torch.Tensor] = {}

        def stands_for(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            node = self._graph.placeholder("given")
            _torch.set_fake_value(node, _twin(value, bases))
            return node

        args, keywords = _torch.tree_map(stands_for, given)
        node = self._graph.call_function(operator, tuple(args), dict(keywords))
        made = _torch.tree_map(
            lambda v: _twin(v, bases) if isinstance(v, torch.Tensor) else v, result
        )
        _torch.set_fake_value(node, made)
        return node


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _twin(tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    """Another tensor of these sizes, in the memory that stands for its own."""
    with torch.no_grad():
        storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
        key = _torch.storage_identity(storage)
        if key not in bases:
            length = storage.nbytes() // size
            bases[key] = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
        base = bases[key].view(tensor.dtype)
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _plain(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        stride = value.stride() if _is_strided(value) else value.layout
        return tuple(value.shape), stride, value.dtype
    return value
