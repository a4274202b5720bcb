"""Of which block of a model a graph is, and how many blocks are like it.

Enters: the arguments that a graph runs with, and the modules that its step trains. Leaves: what
the block has in common with others that may run the same graph, and how many there are. Guarantees:
holds no module and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from autoremat.session.members import kind_of


class _Block(NamedTuple):
    """What blocks have in common that run one graph.

    Attributes:
        kind: of the smallest module that has all parameters which the graph reads.
        names: of these parameters, in it.
    """

    kind: Hashable
    names: frozenset[str]


@dataclass(eq=False)
class Blocks:
    """Of the modules that one session's steps train.

    Attributes:
        modules: those that are there now, parts of others left out.
    """

    modules: Callable[[], Sequence[nn.Module]]
    _counts: dict[_Block, tuple[int, int]] = field(default_factory=dict)  # and modules then

    def block_of(self, args: Iterable[Any]) -> Hashable | None:
        """What a graph that runs with these arguments is of; None if no module has what it reads.

        It may be all of one.
        """
        read = {id(a) for a in args if isinstance(a, nn.Parameter) and a.requires_grad}
        found = next((m for m in self.modules() if read <= _parameters(m).keys()), None)
        if found is None or not read:
            return None
        inner: nn.Module | None = found
        while inner is not None:
            found = inner
            inner = next((m for m in found.children() if read <= _parameters(m).keys()), None)
        names = _parameters(found)
        return _Block(kind_of(found), frozenset(names[key] for key in read))

    def count(self, block: Hashable) -> int:
        """How many blocks are alike; 0 if nobody knows."""
        if not isinstance(block, _Block):
            return 0
        modules = self.modules()
        known = self._counts.get(block)
        if known is None or known[1] != len(modules):
            parts = {id(part): part for module in modules for part in module.modules()}
            alike = sum(_is_of(part, block.kind) for part in parts.values())
            known = self._counts[block] = alike, len(modules)
        return known[0]


def _parameters(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _is_of(module: nn.Module, kind: Hashable) -> bool:
    assert isinstance(kind, tuple)
    return type(module) is kind[0] and kind_of(module) == kind
