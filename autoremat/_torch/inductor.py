"""Private names of Inductor."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import get_mutable_args
from torch._inductor import ir, list_mode_options, list_options, lowering
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.virtualized import ops

from autoremat._torch.running import extent
from autoremat._torch.sizes import sized

__all__ = [
    "DRAWS_FOUR_AT_A_TIME",
    "SEEDED_DRAWS",
    "SEED_MAKERS",
    "CustomPartitionerFn",
    "InductorError",
    "caches_are_off",
    "compile_fx",
    "generates_loops",
    "in_place_results",
    "inductor_config",
    "inductor_layout",
    "inductor_output_strides",
    "inductor_result_nbytes",
    "inductor_settings",
    "inlining_limits",
    "is_as_torch_has_it",
    "is_kept_for_reuse",
    "list_options",
    "options_of_mode",
    "prefers_channels_last",
    "wrapper_namespace",
    "writes_in_place",
]

# Whether Inductor's kernels on CUDA may draw four numbers at a time, which depends on their shape:
# 2.13 does, 2.11 does not, later releases ask this option.
DRAWS_FOUR_AT_A_TIME = hasattr(TritonOverrides, "_can_use_4x_random") and getattr(
    torch._inductor.config.triton, "use_rand4x", True
)

# Operators of which Inductor makes random numbers; importing it defines them.
_prims = torch.ops.prims
SEED_MAKERS = frozenset({_prims.inductor_seeds.default, _prims.inductor_seed.default})
SEEDED_DRAWS = frozenset({_prims.inductor_random.default, _prims.inductor_randint.default})

_aten = torch.ops.aten
# Their lowerings call torch's kernels, though they are not listed as such.
_SORTS = frozenset(
    {_aten.sort, _aten.topk, _aten.kthvalue, _aten.median, _aten.nanmedian, _aten.mode}
)

_ops: Any = torch.ops.higher_order
# Operators of which Inductor may make the form that writes, by the arguments that it writes to.
_UPDATES: dict[Any, tuple[int, ...]] = {
    **{op: form.mutated_args for op, form in reinplace.inplaceable_ops.items()},
    **dict.fromkeys(reinplace.inplaceable_foreach_ops, (0,)),
    **dict.fromkeys(reinplace._SCATTER_OP_TO_VIEW, (0,)),
}


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size and stride


def caches_are_off() -> bool:
    """Whether the user has turned off all caches of compiled code."""
    return bool(torch.compiler.config.force_disable_caches)


def inductor_settings() -> str:
    """What Inductor's configuration says of one module; passes and other objects by their `uuid`.

    One that has none is told by its address: in another process it is another one.
    """
    values = sorted(torch._inductor.config.get_config_copy().items())
    left_out = ("trace.", "custom_partitioner_fn")
    own = [(name, value) for name, value in values if not name.startswith(left_out)]
    return repr([(name, v.uuid() if hasattr(v, "uuid") else v) for name, v in own])


def inductor_result_nbytes(graph: Any, device: torch.device) -> dict[str, list[int]]:
    """Bytes of every element that an Inductor operation returns, by the buffer's name."""
    own: dict[str, int] = {}
    members: dict[str, list[tuple[tuple[Any, ...], int]]] = {}
    for buffer in graph.buffers:
        name = buffer.get_name()
        found = _as_numbers(graph, buffer.get_output_spec())
        if found is None:
            continue
        size, stride, dtype, place = found
        # What is written into a view of another buffer has that one's strides, of other dimensions.
        count = extent(size, stride) if len(size) == len(stride) else math.prod(size)
        own[name] = count * dtype.itemsize if place.type == device.type else 0
        if isinstance(buffer, ir.MultiOutput):
            container = buffer.inputs[0].get_name()
            indices = tuple(index for _, index in buffer.indices)
            members.setdefault(container, []).append((indices, own[name]))
    return {name: [nbytes] for name, nbytes in own.items()} | {
        name: _in_order(parts) for name, parts in members.items()
    }


def _in_order(parts: list[tuple[tuple[Any, ...], int]]) -> list[int]:
    """Elements by their index; elements that nobody takes count as nothing."""
    if any(not indices for indices, _ in parts):
        return [max(nbytes for _, nbytes in parts)]
    by_index = {indices[0]: nbytes for indices, nbytes in parts}
    if not all(isinstance(index, int) for index in by_index):
        return list(by_index.values())
    return [by_index.get(index, 0) for index in range(max(by_index) + 1)]


def size_hint_of_expr(graph: Any, expression: Any) -> int:
    """The number that a size in an Inductor graph stands for."""
    sizevars = graph.sizevars
    ask = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(ask(sized(expression), fallback=4096))


def wrapper_namespace() -> dict[str, Any]:
    """Names that library calls in an Inductor wrapper use."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
        "device": torch.device,
    }


def inductor_layout(graph: Any, name: str) -> Layout | None:
    """That of a buffer or input of an Inductor graph, if it is one."""
    return _layout_of(graph, graph.try_get_buffer(name))


def inductor_output_strides(graph: Any) -> list[tuple[int, ...] | None]:
    """Strides that an Inductor graph gives its outputs; None where an output has no layout."""
    layouts = (_layout_of(graph, output) for output in graph.graph_outputs)
    return [None if layout is None else layout[1] for layout in layouts]


def _layout_of(graph: Any, value: Any) -> Layout | None:
    ask = getattr(value, "maybe_get_layout", None)
    return None if ask is None else _as_numbers(graph, ask())


def _as_numbers(graph: Any, layout: Any) -> Layout | None:
    if not isinstance(layout, ir.Layout):
        return None
    size, stride = (
        tuple(size_hint_of_expr(graph, number) for number in numbers)
        for numbers in (layout.size, layout.stride)
    )
    return size, stride, layout.dtype, layout.device


def inductor_config(values: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Inductor's configuration with these values, for what it generates within."""
    config: Any = torch._inductor.config
    return config.patch(values)


def options_of_mode(mode: str) -> dict[str, Any] | None:
    """What a mode of torch.compile stands for; None for a mode that it does not know."""
    try:
        return list_mode_options(mode)
    except RuntimeError:
        return None


def prefers_channels_last(nodes: Iterable[fx.Node]) -> bool:
    """Whether Inductor would give the convolutions of a module what they read with channels last.

    Args:
        nodes: the module's.
    """
    module: Any = SimpleNamespace(graph=SimpleNamespace(nodes=list(nodes)))
    return GraphLowering.decide_layout_opt(module, is_inference=False)


def is_as_torch_has_it(option: str) -> bool:
    """Whether an option of Inductor's configuration has the value that torch gives it.

    Its own `_is_default` says no for ever once somebody has patched the option for a while.
    """
    config: Any = torch._inductor.config
    return bool(getattr(config, option) == config._config[option].default)


def writes_in_place() -> bool:
    """Whether Inductor may leave the result of a loop in the memory of what the loop reads."""
    return bool(torch._inductor.config.inplace_buffers)


def in_place_results(node: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Arguments in whose memory Inductor may leave a result, with the nodes that take that result.

    The node is the functional form of an operator that writes to them.
    """
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    for key, base in _updated(node):
        takers = [node] if key is None else _elements([node], key)
        if isinstance(base, fx.Node):
            found.append((base, takers))
        elif isinstance(base, (list, tuple)):
            found += [(part, _elements(takers, number)) for number, part in enumerate(base)]
    return found


def _elements(nodes: Sequence[fx.Node], key: object) -> list[fx.Node]:
    """Nodes that take one element of the nodes' results."""
    users = [user for node in nodes for user in node.users]
    return [user for user in users if user.target is getitem and user.args[1] == key]


def _updated(node: fx.Node) -> Iterator[tuple[object, Any]]:
    """The arguments, or lists of them, each with the result's element; None for all of it."""
    kwargs: Any = node.kwargs
    operator: Any = node.args[0] if node.args else None
    if node.target in _UPDATES:
        yield from ((None, node.args[position]) for position in _UPDATES[node.target])
    elif node.target is _ops.with_effects and node.args[1] in _UPDATES:
        for number, position in enumerate(_UPDATES[node.args[1]]):
            yield number + 1, node.args[position + 2]
    elif node.target is _ops.triton_kernel_wrapper_functional:
        yield from ((name, kwargs["kwargs"][name]) for name in kwargs["tensors_to_clone"])
    elif node.target in (_ops.auto_functionalized, _ops.auto_functionalized_v2):
        bases = kwargs.get("_all_bases")
        if bases is None:
            bases = [kwargs[name] for name in get_mutable_args(operator)[0]]
        yield from enumerate(bases, start=len(node.meta["val"]) - len(bases))


@dataclass(frozen=True)
class InliningLimits:
    """How much a pointwise value may take to compute before Inductor gives it memory.

    Attributes:
        shared_reads: buffers read, if several operations read the value.
        reads: buffers read, in any case.
        operations: operations, loads and constants among them, in any case.
    """

    shared_reads: int
    reads: int
    operations: int


def inlining_limits(device: torch.device) -> InliningLimits:
    """Inductor's limits for a device, as they are configured here."""
    return InliningLimits(
        shared_reads=torch._inductor.config.realize_reads_threshold,
        reads=_limit("acc_reads", device),
        operations=_limit("opcount", device),
    )


def _limit(name: str, device: torch.device) -> int:
    """What the user has set, else what this torch has for the device, or for all."""
    config: Any = torch._inductor.config
    asked = getattr(config, f"realize_{name}_threshold")
    of_all = getattr(config, f"_realize_{name}_threshold_default", asked)  # 2.11 has one for all
    of_device = getattr(config, f"realize_{device.type}_{name}_threshold", of_all)
    return int(of_device if asked is None else asked)


def generates_loops(target: Any) -> bool:
    """Whether Inductor generates code for an operator, rather than call a library's.

    Lowerings to products, convolutions and the like live in modules of their own; those to torch's
    kernels are listed, but for what is sorted. A few decide by type or shape.
    """
    found = lowering.lowerings.get(target)
    of_module = getattr(found, "__module__", None) == lowering.__name__
    is_sort = getattr(target, "overloadpacket", None) in _SORTS
    return of_module and target not in lowering.fallbacks and not is_sort


@functools.cache
def is_kept_for_reuse(operation: str) -> bool:
    """Whether Inductor keeps what an operation on the CPU computes if several others read it.

    Its own lowering is asked about the operation of this name on constants: the list of those that
    are expensive is in its code.
    """
    parameters = inspect.signature(getattr(OpsHandler, operation, lambda: None)).parameters

    def compute(_index: Any) -> Any:
        one = ops.constant(1.0, torch.float32)
        return getattr(ops, operation)(*[one] * (len(parameters) - 1))

    if not parameters:
        return False
    value = ir.Pointwise(
        device=torch.device("cpu"), dtype=torch.float32, inner_fn=compute, ranges=[1]
    )
    with torch._inductor.config.patch(realize_opcount_threshold=sys.maxsize):
        return bool(ir.StorageBox(value).should_realize_on_reuse(2))
