"""An operator call as plain data, and what one costs.

Enters: nodes of a joint graph, which have fake values. Leaves: `Call` (a node's operator with its
arguments as plain data) and `OpCost`. Guarantees: symbolic sizes are replaced by their hints;
nothing is allocated or run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat._torch import (
    HigherOrderOperator,
    OpOverload,
    extent,
    fake_value,
    has_results,
    is_mutable,
    is_wait,
    run_and_save_rng_state,
    run_with_rng_state,
    size_hint,
    storage_key,
    tensor_leaves,
    tree_leaves,
    tree_map,
)


@dataclass(frozen=True, slots=True)
class OpCost:
    """The price of one execution of an operator.

    Attributes:
        time_us: wall time (CPU) or device time (CUDA) of one execution.
        workspace_nbytes: bytes live inside the operator beyond its inputs and outputs, at most.
        excess_nbytes: bytes that the outputs' storages hold beyond what their shapes need: some
            operators return a view of their scratch memory.
        measured: whether time and workspace were measured rather than estimated.
        is_doubtful: whether the times that were measured contradict each other.
    """

    time_us: float
    workspace_nbytes: int
    excess_nbytes: int
    measured: bool
    is_doubtful: bool = False


FREE = OpCost(time_us=0.0, workspace_nbytes=0, excess_nbytes=0, measured=False)
"""What views, element access and arithmetic on sizes cost."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All that an operator's cost depends on in one tensor argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def span(self) -> int:
        """Elements from the first to the last that the tensor reaches in its storage."""
        return extent(self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in memory as they do in the tensor."""
        return self.stride == torch.empty(self.shape, device="meta").stride()

    @property
    def distinct_nbytes(self) -> int:
        """Bytes of the distinct elements: a broadcast dimension counts once."""
        pairs = zip(self.shape, self.stride, strict=True)
        sizes = [size for size, stride in pairs if stride != 0 or size == 0]
        return math.prod(sizes) * self.dtype.itemsize

    @property
    def span_nbytes(self) -> int:
        """Bytes that a storage needs to hold the tensor."""
        return self.span * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call as data: the tensors among the arguments are `TensorSpec`.

    Attributes:
        target: the operator.
        args, kwargs: its arguments, symbolic numbers replaced by hints.
        outputs: one entry for each tensor result.
        fresh_nbytes: bytes of each storage that the results own (not shared with an input).
        placed_on: the device, where no tensor tells.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec, ...]
    fresh_nbytes: tuple[int, ...]
    placed_on: torch.device | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors among the arguments, in order."""
        leaves = tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, TensorSpec))

    @property
    def device(self) -> torch.device:
        """Where the operator runs: the first tensor that is not on the CPU decides."""
        if self.placed_on is not None:
            return self.placed_on
        devices = [spec.device for spec in (*self.outputs, *self.inputs)]
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Describe a (fake) tensor by hints.

    Raises:
        TypeError: it is not a plain strided tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a {tensor.layout} tensor cannot be described by its strides")
    shape = tuple(size_hint(size) for size in tensor.shape)
    stride = tuple(size_hint(step) for step in tensor.stride())
    return TensorSpec(shape, stride, tensor.dtype, tensor.device)


def is_free(node: fx.Node) -> bool:
    """Whether the node runs no kernel: a view, an element access, arithmetic on sizes."""
    if node.op != "call_function":
        return True
    results = tensor_leaves(fake_value(node))
    if not isinstance(node.target, OpOverload):
        # A higher-order operator is no plain function; everything else here (operator.mul,
        # getitem, math.floor, torch.sym_max) works on numbers or takes a tuple apart.
        return not isinstance(node.target, HigherOrderOperator)
    if is_mutable(node.target):
        return False
    if node.target.is_view or is_wait(node.target):  # its time is that of what it waits for
        return True
    if fake_value(node) is None:
        # Nothing is known of the results; only an assertion has none by its schema.
        return not has_results(node.target)
    return not list(_fresh_storages(node, results))


def call_of(node: fx.Node) -> Call | None:
    """The node's operator call as data; None where it is not one operator on plain tensors.

    The wrappers that save and replay a generator's state are seen through.
    """
    target, args, kwargs = _unwrap_rng(node)
    if not isinstance(target, OpOverload):
        return None
    results = tensor_leaves(fake_value(node))
    try:
        plain_args, plain_kwargs = tree_map(_plain, (_values(args), _values(kwargs)))
        outputs = tuple(tensor_spec(result) for result in results)
    except (TypeError, KeyError):
        return None
    return Call(
        target=target,
        args=plain_args,
        kwargs=plain_kwargs,
        outputs=outputs,
        fresh_nbytes=tuple(_fresh_storages(node, results)),
    )


def _unwrap_rng(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if node.target is run_and_save_rng_state:
        return node.args[0], node.args[1:], node.kwargs
    if node.target is run_with_rng_state:
        return node.args[1], node.args[2:], node.kwargs
    return node.target, node.args, node.kwargs


def _values(argument: Any) -> Any:
    """Arguments with every node replaced by what it stands for (KeyError if unknown)."""
    return fx.node.map_arg(argument, fake_value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tensor_spec(value)
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, torch.SymFloat | torch.SymBool):
        if value.node.hint is None:
            raise TypeError(f"{value} has no hint")
        return value.node.hint
    if isinstance(value, torch.Generator | fx.GraphModule):
        raise TypeError(f"{type(value).__name__} arguments are not data")
    return value


def _fresh_storages(node: fx.Node, results: list[torch.Tensor]) -> Iterator[int]:
    """Bytes of each storage among the results that no input shares."""
    given = tensor_leaves([fake_value(source) for source in node.all_input_nodes])
    seen = {storage_key(tensor) for tensor in given}
    for result in results:
        key = storage_key(result)
        if key is not None and key not in seen:
            seen.add(key)
            yield size_hint(result.untyped_storage().nbytes())
