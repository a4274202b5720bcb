"""What an operator costs by its shapes alone: bytes, FLOPs and a roofline time.

Enters: nodes of a joint graph, which have fake values. Leaves: `Call` (a node's
operator with its arguments as plain data), `OpCost`, and the estimate for operators that are not
measured. Guarantees: symbolic sizes are replaced by their hints, nothing is allocated or run, and
a real operator is never priced at zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autoremat._torch import (
    HigherOrderOperator,
    OpOverload,
    extent,
    fake_value,
    has_results,
    is_collective,
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
from autoremat.cost.cache import DeviceCeilings


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


NOMINAL_CEILINGS = {
    "cpu": DeviceCeilings(copy_gbps=20.0, matmul_gflops=200.0, launch_us=3.0),
    "cuda": DeviceCeilings(copy_gbps=1500.0, matmul_gflops=60_000.0, launch_us=5.0),
}
"""Ceilings for a device that cannot be measured because it is not there."""


class Link(NamedTuple):
    """What connects processes: an estimate, since nothing communicates while a plan is made."""

    gbps: float
    latency_us: float


LINKS = {"cpu": Link(gbps=1.0, latency_us=150.0), "cuda": Link(gbps=50.0, latency_us=20.0)}
"""By the device of what is sent: gloo within a machine; between NVLink and a network."""


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


def bytes_moved(call: Call) -> int:
    """Bytes read and written, each distinct element of each tensor once."""
    return sum(spec.distinct_nbytes for spec in (*call.inputs, *call.outputs))


def flop_count(call: Call) -> int:
    """FLOPs by torch's own formula; one per element of the larger side where there is none."""
    formula = flop_registry.get(call.target.overloadpacket)
    if formula is not None:
        counted = _flops_by_formula(formula, call)
        if counted is not None:
            return counted
    sides = (call.inputs, call.outputs)
    return max(sum(math.prod(spec.shape) for spec in side) for side in sides)


def matmul_dtype(call: Call | None) -> torch.dtype:
    """The floating-point type whose matrix ceiling bounds the call."""
    specs = () if call is None else (*call.inputs, *call.outputs)
    floating = [spec.dtype for spec in specs if spec.dtype.is_floating_point]
    narrow = [dtype for dtype in floating if dtype in (torch.bfloat16, torch.float16)]
    return narrow[0] if narrow else torch.float32


def estimate(node: fx.Node, call: Call | None, ceilings: DeviceCeilings) -> OpCost:
    """Roofline price of a node that is not free and not measured.

    A collective has all of its time, though some of it may pass beside other operators: what waits
    for it is free. The workspace of an operator nobody ran is unknown and given as 0.
    """
    if call is not None and is_collective(call.target):
        return replace(FREE, time_us=_communication_us(call))
    moved = bytes_moved(call) if call is not None else _node_nbytes(node)
    flops = flop_count(call) if call is not None else moved // 4
    return replace(FREE, time_us=roofline_us(flops, moved, ceilings))


def _communication_us(call: Call) -> float:
    """The larger side once; what is reduced and then spread goes both ways."""
    link = LINKS["cpu" if call.device.type == "cpu" else "cuda"]
    ways = 2 if "all_reduce" in str(call.target) else 1
    sides = (sum(spec.distinct_nbytes for spec in side) for side in (call.inputs, call.outputs))
    return link.latency_us + ways * max(sides) / (link.gbps * 1e3)


def roofline_us(flops: int, moved_nbytes: int, ceilings: DeviceCeilings) -> float:
    """How long it takes at least to compute or to move so much, and to launch it."""
    memory_us = moved_nbytes / (ceilings.copy_gbps * 1e3)
    compute_us = flops / (ceilings.matmul_gflops * 1e3)
    return ceilings.launch_us + max(memory_us, compute_us)


def estimate_nodes(
    nodes: Sequence[fx.Node], ceilings: Callable[[torch.dtype], DeviceCeilings]
) -> dict[fx.Node, OpCost]:
    """Price every node by its shapes alone: for a device that is not here.

    Args:
        nodes: nodes of a joint graph, which have fake values.
        ceilings: those of the device, by the type whose matrix products bound a call.
    """
    costs = dict.fromkeys(nodes, FREE)
    for node in nodes:
        if not is_free(node):
            call = call_of(node)
            costs[node] = estimate(node, call, ceilings(matmul_dtype(call)))
    return costs


def _flops_by_formula(formula: Callable[..., Any], call: Call) -> int | None:
    """Apply a registered formula to storage-less tensors; None where it does not fit the call."""
    args, kwargs = tree_map(_shape_only, (call.args, call.kwargs))
    results = tuple(_shape_only(spec) for spec in call.outputs)
    out_val = results[0] if len(results) == 1 else results
    try:
        return int(formula(*args, **kwargs, out_val=out_val))
    except Exception:
        # A formula written for other arguments must not stop planning: count elements instead.
        return None


def _shape_only(value: Any) -> Any:
    if not isinstance(value, TensorSpec):
        return value
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")


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


def _node_nbytes(node: fx.Node) -> int:
    """Bytes of all tensors at a node's edges, for operators that are not one call."""
    tensors = tensor_leaves([fake_value(end) for end in (*node.all_input_nodes, node)])
    return sum(size_hint(tensor.numel()) * tensor.dtype.itemsize for tensor in tensors)
