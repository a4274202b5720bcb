"""Private torch names that `cost`, `profile` and `measure` rely on.

Enters: torch 2.11 to 2.13. Leaves: the names below. Meant to be folded into `_torch`; it is a
file of its own because `measure` must not pay for importing Inductor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _autograd
from torch._C._autograd import DeviceType
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as _optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DeviceType",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "foreach_by_default",
    "has_results",
    "is_mutable",
    "memory_events",
    "profiler_is_active",
    "real_execution",
    "sparse_parts",
    "step_hooks",
    "storage_identity",
    "tree_leaves",
    "tree_map",
]


def real_execution() -> AbstractContextManager[Any]:
    """Suspend fake-tensor, proxy and functional modes: what runs inside really runs."""
    return _disable_current_modes()


def profiler_is_active() -> bool:
    """Whether some torch profiler session is recording; a second one would end it."""
    return _autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def memory_events(session: torch.profiler.profile) -> list[Any]:
    """Raw events of a finished session, in order of time (`name()`, `start_ns()`, `nbytes()`)."""
    inner = session.profiler
    if inner is None or inner.kineto_results is None:
        return []
    return sorted(inner.kineto_results.events(), key=lambda event: event.start_ns())


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that two live storages share exactly if they are one."""
    return storage._cdata


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor (COO) as it holds them, also while fakes are traced."""
    with _disable_current_modes():
        return tensor._indices(), tensor._values()


def is_mutable(operator: OpOverload) -> bool:
    """Whether the operator's schema says that it writes to an argument."""
    return operator._schema.is_mutable


def has_results(operator: OpOverload) -> bool:
    """Whether the operator's schema says that it returns anything."""
    return bool(operator._schema.returns)


def foreach_by_default(params: list[torch.Tensor], differentiable: bool) -> bool:
    """Whether torch's optimizers use their multi-tensor form for these parameters unasked."""
    _, foreach = _optimizer._default_to_fused_or_foreach(params, differentiable, use_fused=False)
    return foreach


def step_hooks() -> tuple[str, ...]:
    """Names of the attributes in which an optimizer keeps the user's hooks around `step`."""
    return ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
