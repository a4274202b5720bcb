"""Every private torch name that autoremat relies on, in one place.

Enters: torch 2.11 to 2.13. Leaves: the names below, under which the rest of the package uses
them. `tests/test_torch_names.py` has a smoke test for each, so that a torch release that moves
one says which.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.partitioners as _partitioners
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import CompileContext, detect_fake_mode
from torch._inductor import custom_graph_pass, ir, list_mode_options, memory
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import arg_tree_leaves, tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "DRAWS_FOUR_AT_A_TIME",
    "TANGENTS_ARE_FREED",
    "BackendCompilerFailed",
    "BoxedCodeGen",
    "CheckpointPolicy",
    "CompileContext",
    "CustomPartitionerFn",
    "CustomSchedulerPass",
    "DataDependentOutput",
    "GraphLowering",
    "InductorError",
    "OpOverload",
    "OpOverloadPacket",
    "ShortenTraceback",
    "activation_memory_budget",
    "aot_autograd",
    "arg_tree_leaves",
    "base_of",
    "compile_fx",
    "compile_fx_inner",
    "default_partition",
    "extract_forward_and_backward",
    "fake_mode_of",
    "force_recompile",
    "force_save_what_torch_demands",
    "fx_graph_cse",
    "invoke_subgraph",
    "is_backward_seed",
    "is_compiled_backward",
    "is_opaque",
    "is_primal",
    "is_symbolic",
    "is_tangent",
    "kernels_before_fusion",
    "limit_fusion",
    "min_cut_without_budget",
    "must_run_in_backward",
    "options_of_mode",
    "origin_names",
    "pre_fusion_pass",
    "restores_rng_state",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "size_hint",
    "storage_key",
    "thread_rng_states",
    "tree_leaves",
]

# From 2.12 on, the compiled backward takes its incoming gradients over and frees each after its
# last use; before, their caller held them until the backward ended.
# (The module is imported here because importing it before torch._dynamo is a circular import.)
TANGENTS_ARE_FREED = "boxed_grads_call" in inspect.getsource(
    importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
)

# Whether Inductor's kernels on CUDA may draw four numbers at a time, which depends on their shape:
# 2.13 does, 2.11 does not, later releases ask this option.
DRAWS_FOUR_AT_A_TIME = hasattr(TritonOverrides, "_can_use_4x_random") and getattr(
    torch._inductor.config.triton, "use_rand4x", True
)

# What Inductor's caches accept as a pass over scheduler nodes; before 2.12 the class for graphs.
CustomSchedulerPass: Any = getattr(
    custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass
)

getitem = operator.getitem
default_partition = _partitioners.default_partition
is_primal = _partitioners._is_primal
is_tangent = _partitioners._is_tangent
is_backward_seed = _partitioners._is_bwd_seed_offset
is_symbolic = _partitioners.is_sym_node
must_run_in_backward = _partitioners._must_be_in_backward
invoke_subgraph = torch.ops.higher_order.invoke_subgraph
force_recompile = _LazyGraphModule.force_recompile


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is a torch-bind or other opaque object, not a tensor or symbol."""
    test: Callable[[fx.Node], bool] | None = getattr(_partitioners, "is_opaque_node", None)
    return test is not None and test(node)


def force_save_what_torch_demands(module: fx.GraphModule) -> None:
    """Tag collectives, effects and sources of mutations as saved, and close checkpoint regions."""
    if _partitioners.has_recomputable_ops(module):
        _partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    _partitioners.force_save_collectives(module)
    _partitioners.force_save_effectful_ops(module)
    _partitioners.force_save_bw_mutation_src(module)


def extract_forward_and_backward(
    joint: fx.GraphModule, saved: Sequence[fx.Node], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph at the given saved nodes (tensors, symbols and opaque objects)."""
    symbols = [n for n in saved if is_symbolic(n) and not _is_only_asserted(n)]
    opaque = [n for n in saved if is_opaque(n)]
    tensors = [n for n in saved if not is_symbolic(n) and n not in opaque]
    extract = _partitioners._extract_fwd_bwd_modules
    keywords: dict[str, Any] = {}
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:
        keywords["saved_opaque_nodes"] = opaque
    forward, backward = extract(
        joint, tensors, saved_sym_nodes=symbols, num_fwd_outputs=num_fwd_outputs, **keywords
    )
    return forward, backward


def _is_only_asserted(node: fx.Node) -> bool:
    """Whether a truth about sizes is nothing but checked: the forward has checked it."""
    checks = (user.target is torch.ops.aten._assert_scalar.default for user in node.users)
    return isinstance(node.meta.get("val"), torch.SymBool) and bool(node.users) and all(checks)


def activation_memory_budget(share: float) -> contextlib.AbstractContextManager[None]:
    """Let what compiles within use torch's own memory budget, a share of what it would save."""
    config: Any = torch._functorch.config
    patch: contextlib.AbstractContextManager[None] = config.patch(activation_memory_budget=share)
    return patch


def min_cut_without_budget(
    joint: fx.GraphModule, *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's default partition for Inductor; changes the joint graph that it is given."""
    with activation_memory_budget(1.0):
        forward, backward = _partitioners.min_cut_rematerialization_partition(
            joint, None, compiler="inductor", num_fwd_outputs=num_fwd_outputs
        )
    return forward, backward


def thread_rng_states(
    forward: fx.GraphModule, backward: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand the RNG states of higher-order operators' bodies through, as torch does."""
    thread = _partitioners.thread_graphsafe_rng_from_hops
    return thread(forward, is_backward=False), thread(backward, is_backward=True)


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


def fake_mode_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """The fake mode that a fake value, or any in a list, belongs to."""
    return detect_fake_mode(value) or contextlib.nullcontext()


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of a (fake) tensor's storage; None where it has none (sparse tensors)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was made from by autograd's account; else the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes an element of a tuple of results."""
    return node.op == "call_function" and node.target is getitem


@contextlib.contextmanager
def patched_compile_to_module(replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace Inductor's step from a scheduled graph to loaded kernels, in this context."""
    original = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = replacement  # type: ignore[method-assign]
    try:
        yield
    finally:
        GraphLowering.compile_to_module = original  # type: ignore[method-assign]


def compile_without_cache(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool,
    static_input_idxs: Sequence[int],
) -> Any:
    """Inductor's inner compile of one module under the ambient fake mode, caches unused."""
    with torch._inductor.config.patch(
        custom_partitioner_fn=None, fx_graph_cache=False, fx_graph_remote_cache=False
    ):
        return compile_fx_inner(
            module,
            inputs,
            is_backward=is_backward,
            static_input_idxs=static_input_idxs,
            cudagraphs=BoxedBool(False),
            graph_id=None,
            boxed_forward_device_index=None,
        )


def inductor_result_nbytes(graph: Any, device: torch.device) -> dict[str, list[int]]:
    """Bytes of every element that an Inductor operation returns, by the buffer's name."""
    own: dict[str, int] = {}
    members: dict[str, list[tuple[tuple[Any, ...], int]]] = {}
    for buffer in graph.buffers:
        name = buffer.get_name()
        layout = buffer.get_output_spec()
        if not isinstance(layout, ir.Layout):
            continue
        size = [size_hint_of_expr(graph, extent) for extent in layout.size]
        stride = [size_hint_of_expr(graph, extent) for extent in layout.stride]
        extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        counted = layout.device.type == device.type
        own[name] = extent * layout.dtype.itemsize if counted else 0
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
    return int(ask(expression, fallback=4096))


def passing_through(error: Exception) -> Exception:
    """The same error in a form that Dynamo lets through without wrapping it.

    It is an instance of the error's own class with the same attributes and text.
    """
    kind = type(error)

    def __init__(self: Any) -> None:
        Exception.__init__(self, *error.args)
        self.__dict__.update(error.__dict__)
        self.first_useful_frame = None

    through = type(
        kind.__name__,
        (kind, ShortenTraceback),
        {
            "__init__": __init__,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            # Dynamo adds its own hints to the first argument: here that is a number, not a text.
            "args": property(lambda _self: error.args, lambda _self, _value: None),
            "__str__": lambda _self: str(error),
            "__reduce__": lambda _self: error.__reduce__(),
        },
    )
    result: Exception = through()
    return result


def wrapper_namespace() -> dict[str, Any]:
    """Names that library calls in an Inductor wrapper use."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "extern_kernels": extern_kernels,
        "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,
        "device": torch.device,
    }


def inductor_layout(
    graph: Any, name: str
) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device] | None:
    """Size, stride, dtype and device of a buffer or input of an Inductor graph, if it is one."""
    buffer = graph.try_get_buffer(name)
    if buffer is None:
        return None
    layout = buffer.maybe_get_layout() if hasattr(buffer, "maybe_get_layout") else None
    if not isinstance(layout, ir.Layout):
        return None
    size = tuple(size_hint_of_expr(graph, extent) for extent in layout.size)
    stride = tuple(size_hint_of_expr(graph, extent) for extent in layout.stride)
    return size, stride, layout.dtype, layout.device


def inductor_output_strides(graph: Any) -> list[tuple[int, ...] | None]:
    """Strides that an Inductor graph gives its outputs; None where an output has no layout."""
    strides: list[tuple[int, ...] | None] = []
    for output in graph.graph_outputs:
        layout = output.maybe_get_layout() if hasattr(output, "maybe_get_layout") else None
        if isinstance(layout, ir.Layout):
            strides.append(tuple(size_hint_of_expr(graph, extent) for extent in layout.stride))
        else:
            strides.append(None)
    return strides


def options_of_mode(mode: str) -> dict[str, Any] | None:
    """What a mode of torch.compile stands for; None for a mode that it does not know."""
    try:
        return list_mode_options(mode)
    except RuntimeError:
        return None


def pre_fusion_pass() -> Any:
    """The pass over scheduler nodes that the user has configured, if any."""
    return torch._inductor.config._pre_fusion_custom_pass


def origin_names(nodes: Sequence[Any]) -> set[str]:
    """Names of the graph nodes that Inductor's scheduler nodes compute."""
    parts = (part.node for node in nodes for part in node.get_nodes())
    return {origin.name for part in parts for origin in getattr(part, "origins", ())}


@dataclass(frozen=True)
class KernelsBeforeFusion:
    """Inductor's scheduler nodes by their positions.

    Attributes:
        predecessors: for each node the nodes that must run before it.
        buffers: bytes when made, bytes when freed, maker (None: an input), readers, is an output.
    """

    predecessors: tuple[tuple[int, ...], ...]
    buffers: tuple[tuple[int, int, int | None, tuple[int, ...], bool], ...]


def kernels_before_fusion(nodes: Sequence[Any]) -> tuple[dict[str, int], KernelsBeforeFusion]:
    """Positions by the names of operations, and what the nodes need; inside a compile only."""
    scheduler, outputs = nodes[0].scheduler, OrderedSet(V.graph.get_output_names())
    _, inputs = memory.prepare_planning_info(
        list(nodes),
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        outputs,
    )
    position = {node: number for number, node in enumerate(nodes)}
    made: list[tuple[Any, int | None]] = [(b, None) for b in inputs.values()]
    made += [(b, position[node]) for node in nodes for b in node.get_outputs()]
    buffers = tuple(
        (
            int(buffer.mpi_buffer.size_alloc),
            int(buffer.mpi_buffer.size_free),
            maker,
            tuple(sorted(position[reader] for reader in buffer.mpi_buffer.succ_nodes)),
            buffer.get_name() in outputs,
        )
        for buffer, maker in made
    )
    predecessors = tuple(
        tuple(sorted(position[before] for before in node.mpi_node.pred_nodes)) for node in nodes
    )
    numbers = {part.get_name(): position[node] for node in nodes for part in node.get_nodes()}
    return numbers, KernelsBeforeFusion(predecessors, buffers)


def limit_fusion(nodes: Sequence[Any], admits: Callable[[set[str]], bool]) -> None:
    """Let the nodes' own scheduler ask, last of all, whether operations may become one kernel.

    It is asked by their names, once it has chosen to fuse them if they make no cycle.
    """
    scheduler = nodes[0].scheduler
    makes_cycle = scheduler.will_fusion_create_cycle

    def refuses(node1: Any, node2: Any) -> bool:
        names = {part.get_name() for node in (node1, node2) for part in node.get_nodes()}
        return makes_cycle(node1, node2) or not admits(names)

    scheduler.will_fusion_create_cycle = refuses
