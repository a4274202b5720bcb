"""Runs planned graphs operation by operation, in exactly the planned order.

Enters: a forward or backward module. Leaves: a callable that frees every value right after its
last use, its own arguments included, so that memory follows the plan to the byte; but for a copy
where an operation returns other strides than it was traced with, and no view of it is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoremat import _torch

aten = torch.ops.aten
_VIEW = aten.view.default
_CONVERTED = torch.ops.prims.convert_element_type.default


def view_or_copy(value: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The value in another shape: a copy where its strides allow no view.

    They should, as traced. But the backwards of softplus, hardtanh (ReLU6), hardswish, hardsigmoid
    and logit return the strides of the gradient that they are given, and are traced with those of
    their input; torch's backend `aot_eager` ends with an error there.
    """
    try:
        return _VIEW(value, size)
    except RuntimeError:
        return aten.reshape.default(value, size)


def compile_eager(
    module: fx.GraphModule, example_inputs: Sequence[Any], **_of_inductor: Any
) -> Callable[..., Any]:
    """A callable over a list of arguments, which it empties."""
    for node in module.graph.find_nodes(op="call_function", target=_VIEW):
        node.target = view_or_copy
    _without_python(module.graph)
    module.graph.set_codegen(_torch.BoxedCodeGen())
    module.recompile()
    _torch.force_recompile(module)  # else `forward` goes by `__call__`, and through users' hooks
    forward = module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    return _torch.as_boxed(run)


def _without_python(graph: fx.Graph) -> None:
    """The same operations, by those of C++.

    Graphs for sizes that vary have conversions that torch wrote in Python, each of which takes
    several times as long as the operation, and ask for sizes as they call operations.
    """
    for node in graph.find_nodes(op="call_function", target=_CONVERTED):
        if not node.kwargs:
            value, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        node.target = torch.Tensor.size
