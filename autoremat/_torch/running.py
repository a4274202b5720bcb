"""Private names of tensors, operators, modes, modules and optimizers.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as _optimizer
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "address_of",
    "arg_tree_leaves",
    "arguments_of",
    "as_it_is",
    "compiled_call",
    "dispatch_modes",
    "extent",
    "foreach_by_default",
    "getitem",
    "has_results",
    "is_getitem",
    "is_mutable",
    "let_modes_outlast_compiled_calls",
    "module_calls",
    "own_call",
    "real_execution",
    "restores_rng_state",
    "rng_state_nbytes",
    "set_compiled_call",
    "sparse_parts",
    "step_hooks",
    "storage_identity",
    "storage_key",
    "storage_references",
    "tensor_leaves",
    "tree_leaves",
    "tree_map",
    "version_counter",
    "version_of",
]


def real_execution() -> AbstractContextManager[Any]:
    """Suspend fake-tensor, proxy and functional modes: what runs inside really runs."""
    return _disable_current_modes()


def module_calls() -> list[tuple[nn.Module, Any]]:
    """The calls of modules that run on this thread, the outermost first, with what each is given.

    What a hook has put in its place is left out.
    """
    calls, frame = [], sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            known = frame.f_locals  # of no frame that outlives the call: Python may keep them in it
            calls.append((known["self"], (known["args"], known["kwargs"])))
    return calls[::-1]


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that two live storages share exactly if they are one."""
    return storage._cdata


def storage_references(identity: int) -> int:
    """How many tensors hold a storage that is alive: what autograd has saved included."""
    return int(torch._C._storage_Use_Count(identity)) - 1  # what asks holds it as well


def address_of(storage: torch.UntypedStorage) -> int:
    """Where its memory begins, which copies on write may share; 0 if it has none."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return int(torch._C._data_address(view))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place; of one that counts nothing, 0."""
    return 0 if tensor.is_inference() else tensor._version


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of a storage from the first to the last that a tensor of this layout reaches."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor (COO) as it holds them, also while fakes are traced."""
    with _disable_current_modes():
        return tensor._indices(), tensor._values()


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest of lists, tuples, dicts and registered containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def as_it_is(layer: nn.Module) -> nn.Module:
    """The same layer by itself, with the same parameters: what others set or swap is not its own.

    `copy.copy` would share the containers, and run what recurrent layers do as they are loaded.
    """
    twin: nn.Module = object.__new__(type(layer))
    own = vars(layer).items()
    vars(twin).update((k, v.copy() if isinstance(v, dict | list) else v) for k, v in own)
    return twin


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor whose version changes as one is written into; it holds no memory of that."""
    if tensor.is_inference():
        return torch.empty(0)
    found = tensor.detach()
    found.data = found.new_empty(0)
    return found


def dispatch_modes() -> list[Any]:
    """The modes that see operators on this thread, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


@functools.cache
def let_modes_outlast_compiled_calls() -> None:
    """From the next compiled call on, a mode that begins inside of one sees what comes after it.

    As such a call returns, torch puts back the keys of dispatch that were on as it began. Those of
    modes are on then as long as modes are: one may have begun meanwhile, or ended.
    """
    guard, every = torch._C._ForceDispatchKeyGuard, torch._C.DispatchKey
    keys_of_modes = every.Python, every.PythonTLSSnapshot  # a name would be looked up in each call

    class Guard:
        def __init__(self, *keys: Any) -> None:
            self._guard = guard(*keys)

        def __enter__(self) -> None:
            self._guard.__enter__()

        def __exit__(self, *raised: object) -> None:
            self._guard.__exit__(*raised)
            is_on = torch._C._len_torch_dispatch_stack() > 0
            for key in keys_of_modes:
                if torch._C._dispatch_tls_is_dispatch_key_included(key) != is_on:
                    torch._C._dispatch_tls_set_dispatch_key_included(key, is_on)

    torch._C._ForceDispatchKeyGuard = Guard  # type: ignore[misc]


def is_mutable(operator: OpOverload) -> bool:
    """Whether the operator's schema says that it writes to an argument."""
    return operator._schema.is_mutable


def arguments_of(operator: Any) -> list[Any]:
    """The arguments in an operator's schema (`name`, `default_value`), in their order."""
    return list(operator._schema.arguments)


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, past what it is compiled to."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What runs when a module is called, if that is not its own call."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let something run when a module is called, as `nn.Module.compile` does; None: its own."""
    module._compiled_call_impl = call


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


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of a (fake) tensor's storage; None where it has none (sparse tensors)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes an element of a tuple of results."""
    return node.op == "call_function" and node.target is getitem
