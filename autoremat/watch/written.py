"""What a training's own code writes to: a moving average of the weights, a queue.

Enters: tensors and modules, at each look at what the code of a step can name. Leaves: those that
have been written to since they were seen first, though no optimizer steps them and they have no
gradient; of a module, each parameter. Guarantees: holds no tensor.

Data are only read, and what is trained has an optimizer or a gradient. What else is written to is
part of the training that writes, wherever it was before the first step. Writes through `.data` are
not seen: torch does not count them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from autoremat import _torch
from autoremat.memory.meter import state_of
from autoremat.memory.optimizers import parameters_of, that_have_stepped
from autoremat.memory.storage_sizes import storage_identities


class Written:
    """How often tensors had been written to as they were seen first."""

    def __init__(self) -> None:
        """None was."""
        self._versions: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there. What was seen before stays known as it was then."""
        for tensor in tensors:
            if tensor not in self._versions:
                self._versions[tensor] = _torch.version_of(tensor)

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have been written to since they were seen, but for what is trained."""
        tensors = list(tensors)
        self.note(tensors)
        stepped = _stepped()
        found = [t for t in tensors if self._is_written(t) and not _is_trained(t, stepped)]
        if not found:
            return []
        state = storage_identities(state_of(that_have_stepped()))
        return [tensor for tensor in found if state.isdisjoint(storage_identities([tensor]))]

    def averages(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Modules, and parts of some, of which all parameters have been written to since.

        torch's own averages are ones from the beginning.
        """
        stepped, seen = _stepped(), set[nn.Module]()
        return [found for module in modules for found in self._within(module, stepped, seen)[1]]

    def _within(
        self, module: nn.Module, stepped: Collection[int], seen: set[nn.Module]
    ) -> tuple[bool, list[nn.Module]]:
        """Whether all of a module, but for what was seen, is such an average; and those in it."""
        if module in seen:
            return True, []
        seen.add(module)
        if isinstance(module, AveragedModel):
            return True, [module]
        own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
        self.note(own)
        inner = [self._within(part, stepped, seen) for part in module.children()]
        found = [average for _, averages in inner for average in averages]
        is_all = all(self._is_written(p) and not _is_trained(p, stepped) for p in own)
        is_all &= all(is_one for is_one, _ in inner)
        return is_all, [module] if is_all and (own or found) else found

    def _is_written(self, tensor: torch.Tensor) -> bool:
        return _torch.version_of(tensor) > self._versions[tensor]


def _stepped() -> set[int]:
    return {id(p) for optimizer in that_have_stepped() for p in parameters_of(optimizer)}


def _is_trained(tensor: torch.Tensor, stepped: Collection[int]) -> bool:
    """Whether an optimizer steps it, or it has a gradient."""
    return id(tensor) in stepped or next(_torch.own_gradients([tensor]), None) is not None
