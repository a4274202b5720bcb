"""Library calls of a GPU's wrapper, on the CPU.

Enters: operators as the wrapper calls them, on tensors of `Memory`. Leaves: their results, laid out
as the operators' fakes say for CUDA, in blocks that are counted. Guarantees: what an operator
allocates for itself on the CPU does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autoremat.host.operators import COPIES
from tests.elsewhere.executed.copies import LateCopies
from tests.elsewhere.executed.memory import Memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class OnCpu(TorchDispatchMode):
    """While open, operators that say CUDA run here.

    Attributes:
        called: the operators that made their results themselves, by name.
        copies: of values that wait on the host.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory, self._fakes = memory, FakeTensorMode()
        self.copies = LateCopies(memory)
        self.called: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in COPIES:
            return self.copies.run(func, args)
        keywords = dict(kwargs or {})
        name = str(func).removeprefix("aten.").removesuffix(".default")
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return func(*args, **keywords)  # a view, or what was given, written to
        if not func._schema.returns:
            return func(*args, **keywords)
        self.called.add(name)
        laid_out = self._as_on_cuda(func, args, keywords)
        made = func(*args, **{k: CPU if k == "device" else v for k, v in keywords.items()})
        if isinstance(made, Tensor):
            return _filled(laid_out, made)
        return type(made)(_filled(out, one) for out, one in zip(laid_out, made, strict=True))

    def _as_on_cuda(self, func: Any, args: Any, keywords: Any) -> Any:
        """Empty results as they lie on CUDA; what is no tensor as it is."""

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

        with self._fakes:
            found = func(*tree_map(placed, args), **tree_map(placed, keywords))
        return tree_map(lambda v: self.empty_like(v) if isinstance(v, Tensor) else v, found)

    def empty_like(self, value: Tensor) -> Tensor:
        return self._memory.empty_strided(value.shape, value.stride(), value.dtype)


def _filled(out: Any, made: Any) -> Any:
    return out.copy_(made) if isinstance(out, Tensor) else made
