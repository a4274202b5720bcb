"""Runs planned graphs operation by operation, in exactly the planned order.

Enters: a forward or backward module. Leaves: a callable that frees every value right after its
last use, its own arguments included, so that memory follows the plan to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autoremat import _torch


def compile_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], **_of_inductor: Any
) -> Callable[..., Any]:
    """A callable over a list of arguments, which it empties."""
    module.graph.set_codegen(_torch.BoxedCodeGen())
    module.recompile()
    _torch.force_recompile(module)  # else `forward` goes by `__call__`, and through users' hooks
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    return _torch.as_boxed(run)
