"""The private names of Dynamo by which autoremat says what it is to look at, and where to stop.

Enters: torch 2.11 to 2.13. Leaves: contexts for our own compiles, and `stop_at` for those of
others. `tests/house/test_torch_names.py` has a smoke test for each name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

__all__ = [
    "admitting_recurrent_layers",
    "backend_around",
    "compile_apart",
    "compiling_steps",
    "in_functional_transform",
    "is_static_input",
    "kinds_of_global_hooks",
    "marked_ranges",
    "marked_sizes",
    "may_vary",
    "stop_at",
    "stop_at_padding",
    "takes_what_is_called",
    "traces_recurrent_layers",
]

# Seen on 2.11, not on 2.13: Dynamo passes over the guards of parameters while their module's dict
# is as it was, and fails on packed sequences. (2.12 has not been tried.)
_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

_COUNTS_APART = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # 2.13

_compiles = 0  # of `compile_apart`, where Dynamo does not tell them apart

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def may_vary(tensor: torch.Tensor, dimension: int) -> None:
    """Let Dynamo take a size for a symbol; where the code insists on its number, it stays one."""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def marked_sizes(tensor: torch.Tensor) -> set[int]:
    """Dimensions of which the user has said that they vary (`torch._dynamo.mark_dynamic`)."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    return {dimension for mark in marks for dimension in getattr(tensor, mark, ())}


def marked_ranges(tensor: torch.Tensor) -> dict[int, tuple[int, int]]:
    """Of marks with a largest size (`mark_dynamic(t, dim, min=, max=)`), both, by dimension."""
    found = getattr(tensor, "_dynamo_dynamic_range", ())
    return {one.dim: (int(one.min or 1), int(one.max)) for one in found if one.max is not None}


def compile_apart(
    call: Callable[..., Any],
    backend: Callable[..., Callable[..., Any]],
    *,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """The call, compiled: what others have compiled of the same functions does not count.

    Dynamo gives up a function that it has compiled `recompile_limit` times. After a graph break
    the functions are the classes' own, which all models of these classes share.
    """
    compile_call: Any = torch.compile  # torch's stubs leave the option out
    if _COUNTS_APART:
        return compile_call(call, backend=backend, dynamic=dynamic, isolate_recompiles=True)
    global _compiles
    _compiles += 1
    compiled: Callable[..., Any] = compile_call(call, backend=backend, dynamic=dynamic)

    def run(*args: Any, **kwargs: Any) -> Any:
        config: Any = torch._dynamo.config
        with config.patch(recompile_limit=_compiles * config.recompile_limit):
            return compiled(*args, **kwargs)

    return run


def compiling_steps(most_compiles: int) -> contextlib.AbstractContextManager[None]:
    """Compile and run here what a model may change between its steps.

    Hooks that are added to modules later are noticed, and parameters that are frozen or thawed.

    Args:
        most_compiles: of a function, at least, before Dynamo gives the function up.
    """
    config: Any = torch._dynamo.config
    values = {
        "skip_nnmodule_hook_guards": False,
        "recompile_limit": max(most_compiles, config.recompile_limit),
    }
    if _IS_OLD:
        values["skip_tensor_guards_with_matching_dict_tags"] = False
    return config.patch(values)


def traces_recurrent_layers() -> bool:
    """Whether the user has told Dynamo to write recurrent layers out, step by step."""
    return bool(torch._dynamo.config.allow_rnn)


def admitting_recurrent_layers() -> contextlib.AbstractContextManager[None]:
    """Let Dynamo look into recurrent layers here instead of giving up the rest of the function."""
    return torch._dynamo.config.patch(allow_rnn=True)


@functools.cache
def stop_at_padding() -> None:
    """Let Dynamo stop where packed sequences are padded, if this torch fails to trace that.

    2.11 does, and ends in an error, unless it has given up the function before. For the rest of
    the process.
    """
    if _IS_OLD:
        skip(nn.utils.rnn.pad_packed_sequence)


def in_functional_transform() -> bool:
    """Whether a transform of `torch.func` runs: Dynamo skips what it meets there, for good."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def takes_what_is_called() -> bool:
    """Whether functions that are called now are compiled, by whom this code runs under."""
    return callable(get_eval_frame_callback())


@torch.compiler.disable(recursive=False)  # traced, it could not ask
def backend_around() -> str:
    """The name of the backend of whose compile this code runs under; empty without one."""
    compiling = get_eval_frame_callback()
    while hasattr(compiling, "_torchdynamo_orig_backend"):
        compiling = compiling._torchdynamo_orig_backend
    return str(getattr(compiling, "compiler_name", ""))


def is_static_input(tensor: torch.Tensor) -> bool:
    """Whether an input of a Dynamo graph is the same tensor in each call: a parameter or buffer."""
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def kinds_of_global_hooks() -> dict[str, bool]:
    """The kinds of hooks that all modules share, and whether there are any of each."""
    return {name: bool(getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS}


def stop_at(is_planned: Callable[[nn.Module], bool]) -> None:
    """Let Dynamo stop, in compiles of the user's own, at training calls of certain modules.

    It would look into their `forward` and not run what is called instead of it. This holds for
    the rest of the process.

    Args:
        is_planned: asked for each module that is about to be traced.
    """
    trace = UnspecializedNNModuleVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if (
            is_planned(self.value)
            and torch.is_grad_enabled()
            and self.var_getattr(tx, "training").as_python_constant()  # leaves a guard
        ):
            unimplemented(
                gb_type="A module that autoremat has planned",
                context=type(self.value).__name__,
                explanation="autoremat.optimize compiles this module by itself, by its plan.",
                hints=["Optimize the outer module instead, to have one plan for all of it."],
            )
        return trace(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
