"""The library calls in a wrapper that Inductor generated, as data.

Enters: the wrapper's function and the layout of its buffers. Leaves: the calls' nodes, and of one
its `Call`. Guarantees: nothing is run but operators on storage-less tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoremat._torch import OpOverload, tensor_leaves, tree_map
from autoremat.cost.calls import Call, TensorSpec, tensor_spec
from autoremat.cost.work import without_storage

LayoutOf = Callable[[str], TensorSpec | None]
"""Layout of a buffer or input, None for names that are no tensors."""

_LIBRARIES = ("torch.ops.", "extern_kernels.", "aten.")
_COPIES = "torch.ops.autoremat."  # of values that wait elsewhere: they run beside all else
_VIEWS = ("reinterpret_tensor", "alias_tensor", "copy_if_misaligned")
# What Inductor calls by names of its own.
_EXTERN = {"bias_addmm": "addmm"}


class _UnknownError(Exception):
    """An argument is not what this module reads."""


def library_nodes(function: ast.AST) -> Iterator[ast.Call]:
    """A wrapper's calls of libraries, in no order; a plan's copies are none."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith(_LIBRARIES) and not name.startswith(_COPIES):
                yield node


def call_in_wrapper(node: ast.Call, layout_of: LayoutOf) -> Call | None:
    """A library call as data; None if it is not one of torch's operators on tensors.

    Args:
        node: the call.
        layout_of: of the wrapper's buffers and inputs.
    """
    target = _operator(ast.unparse(node.func))
    if target is None:
        return None
    try:
        args = tuple(_argument(part, layout_of) for part in node.args)
        kwargs = {k.arg: _argument(k.value, layout_of) for k in node.keywords if k.arg}
    except _UnknownError:
        return None
    out = kwargs.pop("out", None)
    outputs = (out,) if isinstance(out, TensorSpec) else _results(target, args, kwargs)
    specs = [leaf for leaf in args if isinstance(leaf, TensorSpec)]
    placed_on = specs[0].device if specs else None
    return Call(target, args, kwargs, outputs, (), placed_on)


def layout_of_argument(node: ast.expr, layout_of: LayoutOf) -> TensorSpec | None:
    """Of a tensor that a call is given, perhaps as a view of a buffer; None if that is not read."""
    try:
        found = _argument(node, layout_of)
    except _UnknownError:
        return None
    return found if isinstance(found, TensorSpec) else None


def _operator(name: str) -> OpOverload | None:
    """`torch.ops.aten.mm.default`, or the operator that `extern_kernels.mm` is."""
    parts = name.split(".")
    if parts[0] == "extern_kernels":
        parts = ["aten", _EXTERN.get(parts[1], parts[1]), "default"]
    elif parts[:2] == ["torch", "ops"]:
        parts = parts[2:]
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def _argument(node: ast.expr, layout_of: LayoutOf) -> Any:
    """Plain data; tensors as their layouts.

    Raises:
        _UnknownError: if it is neither.
    """
    match node:
        case ast.Name(id=name) if (layout := layout_of(name)) is not None:
            return layout
        case ast.Call(func=ast.Name(id=name), args=[tensor, *rest]) if name in _VIEWS:
            return _viewed(_argument(tensor, layout_of), rest)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_argument(element, layout_of) for element in elements]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _UnknownError(ast.unparse(node)) from None


def _viewed(base: Any, rest: list[ast.expr]) -> TensorSpec:
    if not isinstance(base, TensorSpec):
        raise _UnknownError
    if len(rest) < 2:
        return base
    try:
        shape, stride = (tuple(ast.literal_eval(part)) for part in rest[:2])
    except ValueError:  # sizes that vary
        raise _UnknownError from None
    return TensorSpec(shape, stride, base.dtype, base.device)


def _results(target: OpOverload, args: Any, kwargs: Any) -> tuple[TensorSpec, ...]:
    """What an operator returns, by running it on tensors without storage; () if it refuses."""
    try:
        found = target(*tree_map(without_storage, args), **tree_map(without_storage, kwargs))
        return tuple(tensor_spec(tensor) for tensor in tensor_leaves(found))
    except Exception:  # operators refuse in any way: then only what it reads is counted
        return ()
