"""Values that wait on the host of a GPU that is not here, copied as late as may be.

Enters: the operators of copies, on tensors of `Memory`. Leaves: their results. Guarantees: nothing
is copied before somebody waits for it; until then what a copy makes is not-a-number. So code that
reads what has not come, or that changes what is leaving, has other results than without copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from tests.elsewhere.executed.memory import Memory


class LateCopies:
    """Those of one step.

    Attributes:
        made_nbytes: that have left, and that have come back.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._begun: dict[int, int] = {}  # by where it goes, what a copy is of
        self.made_nbytes = {"out": 0, "in": 0}

    def run(self, operator: Any, args: Any) -> Tensor:
        """What the operator gives."""
        if operator in (OFFLOADED, RELOADED):
            return self._wait("out" if operator is OFFLOADED else "in", *args)
        source: Tensor = args[0]
        if operator is RELOAD:
            to = self._memory.empty_strided(source.shape, source.stride(), source.dtype)
        else:
            assert operator is OFFLOAD
            to = _unwritten(source)
        self._begun[to.data_ptr()] = source.data_ptr()
        return to

    def _wait(self, way: str, to: Tensor, source: Tensor) -> Tensor:
        begun = self._begun.pop(to.data_ptr(), None)
        if begun is not None:
            assert begun == source.data_ptr(), "what is held is not what is copied"
            with _disable_current_modes():
                to.copy_(source)
            self.made_nbytes[way] += source.nbytes
        return to


def _unwritten(source: Tensor) -> Tensor:
    """Memory of the host, which the GPU's does not count."""
    with _disable_current_modes():
        made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        return made.fill_(float("nan") if made.is_floating_point() else -1)
