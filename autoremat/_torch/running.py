"""Private names of tensors, operators, modes, optimizers and the profiler.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._C import _autograd
from torch._C._autograd import DeviceType
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as _optimizer
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map

__all__ = [
    "DeviceType",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "arg_tree_leaves",
    "base_of",
    "can_be_bounded",
    "foreach_by_default",
    "getitem",
    "has_results",
    "is_compiled_backward",
    "is_getitem",
    "is_mutable",
    "memory_events",
    "profiler_is_active",
    "real_execution",
    "recording_memory",
    "restores_rng_state",
    "rng_state_nbytes",
    "size_hint",
    "sparse_parts",
    "step_hooks",
    "storage_identity",
    "storage_key",
    "tree_leaves",
    "tree_map",
]


def real_execution() -> AbstractContextManager[Any]:
    """Suspend fake-tensor, proxy and functional modes: what runs inside really runs."""
    return _disable_current_modes()


def profiler_is_active() -> bool:
    """Whether some torch profiler session is recording; a second one would end it."""
    return _autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


@contextmanager
def recording_memory() -> Iterator[torch.profiler.profile]:
    """A session of the profiler that records what is allocated and freed on the CPU.

    Torch 2.13 tells the terminal of the start and end of every session, 2.11 that there is no GPU.
    The profiler reads how much it shall say when the process first uses it: nothing, unless the
    user has set `KINETO_LOG_LEVEL`.
    """
    silenced = "KINETO_LOG_LEVEL" not in os.environ
    if silenced:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # 2.11 warns of the events of earlier cycles; there are none
        ) as session:
            yield session
    finally:
        if silenced:
            os.environ.pop("KINETO_LOG_LEVEL", None)


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


def restores_rng_state(device: torch.device) -> bool:
    """Whether `run_with_rng_state` gives a device's operators the state that they first had.

    On CUDA it saves and restores the state of the current device's generator only.
    """
    if device.type == "cuda":
        return device.index in (None, torch.cuda.current_device())
    return device.type == "cpu"


def rng_state_nbytes() -> int:
    """Bytes of the saved state of a random generator: it lies on the CPU for every device."""
    return int(torch.get_rng_state().nbytes)


def can_be_bounded(size: torch.SymInt) -> bool:
    """Whether a guard may keep a symbolic size from being larger than while tracing.

    Not where the size is known only when the code runs, where it could not be smaller either (it
    would become a constant), and where it has a bound already, which the user may insist on.
    """
    hint = getattr(size.node, "hint", None)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return isinstance(hint, int) and bool(bounds.lower < hint and bounds.upper >= sys.maxsize - 1)


def size_hint(size: int | torch.SymInt) -> int:
    """The concrete number that a symbolic size stands for while tracing (4096 if it has none)."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = getattr(node, "hint", None)
    if isinstance(hint, int):
        return hint
    shape_env = node.shape_env
    ask = getattr(shape_env, "optimization_hint", None)
    if ask is not None:
        return int(ask(node.expr, fallback=4096))
    return int(shape_env.size_hint(node.expr, allow_none=True) or 4096)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of a (fake) tensor's storage; None where it has none (sparse tensors)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes an element of a tuple of results."""
    return node.op == "call_function" and node.target is getitem


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was made from by autograd's account; else the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"
