"""Inductor: the partitioner hook, and what its generated code will allocate and take.

Enters: a planned forward and backward module. Leaves: the live bytes of the wrappers that
Inductor generates for them, and what their kernels will take, before any is compiled; and a
compiled step.
The hook object that Inductor copies, pickles and hashes holds nothing: whoever splits is found by
the context, so Inductor's own cache knows a forward or backward module in another process again;
and so does AOTAutograd's a graph before the split, where all that its plan depends on is told.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx

from autoremat import _torch
from autoremat.cost.cache import Measured
from autoremat.cost.calls import TensorSpec
from autoremat.cost.device_specs import DeviceSpec
from autoremat.cost.gpu_times import gpu_loops_us
from autoremat.cost.large_memory import fresh_us
from autoremat.cost.loop_times import loops_us
from autoremat.elsewhere.apart import done_apart
from autoremat.elsewhere.libraries import library_calls_elsewhere
from autoremat.elsewhere.present import standing_in
from autoremat.graph.joint_graph import copy_module
from autoremat.host.operators import COPIES
from autoremat.inductor.fusion_limit import FusionLimit
from autoremat.inductor.library_calls import library_calls, library_us
from autoremat.inductor.wrapper import (
    Buffers,
    Layout,
    WrapperMemory,
    call_function,
    read_wrapper,
)
from autoremat.memory.storage_sizes import rounded_nbytes

_NUMBERS = (int, torch.SymInt, torch.SymFloat, torch.SymBool)


class Partitioner(Protocol):
    """What splits joint graphs."""

    @property
    def partition(self) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
        """From a joint graph to the forward and the backward module."""


_partitioner: ContextVar[Partitioner] = ContextVar("autoremat partitioner")

# What the plans of graphs depend on that are split in this context, beside the graphs.
_question: ContextVar[str] = ContextVar("autoremat question", default="")


class PartitionerHook(_torch.CustomPartitionerFn):
    """What Inductor calls for each joint graph: hands it to the partitioner of the context."""

    def __deepcopy__(self, memo: object) -> PartitionerHook:
        """Itself: Inductor copies its configuration."""
        return self

    def uuid(self) -> str:
        """A key for caches: Inductor's, of modules after the split, so no plan is in it.

        What a backward may overwrite is: of code that else has one key, that may be wrong. For
        AOTAutograd's, of a graph before the split, it is what its plan depends on.
        """
        overwritten = _torch.may_overwrite()
        is_split = overwritten is not None
        return f"autoremat 2 {overwritten if is_split else _question.get()}"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        """Split the joint graph as whoever is asked to in this context does."""
        return _partitioner.get().partition(gm, joint_inputs, **keywords)


def compile_with_partition(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    partitioner: Partitioner,
    config: dict[str, Any],
    executor: Callable[..., Any] | None = None,
    question: str = "",
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, splitting its joint graphs with the partitioner.

    AOTAutograd's cache, which would hand out another plan's split, is used only for a question. The
    backward is compiled with the forward: no error comes later, and what compiling takes itself, as
    that of max-autotune's trials, is not beside what the forward saves.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        partitioner: splits the joint graphs.
        config: the user's options for Inductor.
        executor: given if no kernels are wanted: it compiles the modules instead.
        question: all that the split depends on beside the graph; "" where that is not known.
    """
    patches = {**_with_own(config), "custom_partitioner_fn": PartitionerHook()}
    handed_over = _torch.handing_over() if executor is None else contextlib.nullcontext()
    caching = contextlib.nullcontext() if question else _torch.without_cached_partitions()
    tokens = _partitioner.set(partitioner), _question.set(question)
    try:
        with caching, handed_over, _torch.with_backwards_ahead():
            compiled: Any = _torch.compile_fx(
                module,
                example_inputs,
                inner_compile=_compile_inner if executor is None else executor,
                config_patches=patches,
            )
    finally:
        _partitioner.reset(tokens[0])
        _question.reset(tokens[1])
    return cast("Callable[..., Any]", compiled)


def _compile_inner(module: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    with _in_its_order(module):
        return _torch.compile_inner(module, inputs, **keywords)


def _in_its_order(module: fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Where values are copied Inductor keeps the order of the rest, by which copies are placed."""
    if COPIES.isdisjoint(node.target for node in module.graph.nodes):
        return contextlib.nullcontext()
    return _torch.inductor_config({"reorder_for_peak_memory": False})


def configured(config: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Let code that is read outside of a compile be what `compile_with_partition` will generate.

    Args:
        config: the user's options for Inductor.
    """
    return _torch.inductor_config(_with_own(config))


def _with_own(config: dict[str, Any]) -> dict[str, Any]:
    """Limited fusion and reuse, unless the user hooks in there, and two habits left off.

    With masked vectors at the ends of loops, gradients of a Falcon-Mamba are wrong (torch 2.13 on
    the CPU); `docs/torch_issues.md` says what is known and was ruled out. A sum of a few terms that
    is written out as additions is put off to where it is read, and holds its terms until then: of
    T5's position bias those of all layers, so that no plan takes less.

    The partitioner is called while it holds, so the wrappers that are read have it as well.
    """
    own: dict[str, Any] = {"cpp.enable_loop_tail_vec": False}
    if _torch.is_as_torch_has_it("unroll_reductions_threshold"):
        own["unroll_reductions_threshold"] = 1
    if _torch.pre_fusion_pass() is None:
        own["_pre_fusion_custom_pass"] = FusionLimit()
    return {**own, **config}


@dataclass(frozen=True)
class Generated:
    """What Inductor makes of a module, short of kernels.

    Attributes:
        memory: what its wrapper allocates; its results are the module's, in their order.
        time_us: what its calls of libraries take as they were measured, and its loops by estimate;
            both by the data sheet for a device that is not here. On a processor, also what it takes
            that large buffers are new. None where that is not known.
        strides: strides of the module's outputs, by the name of the node; Inductor may lay them
            out in another way than the graph says, and the backward is compiled for that.
        source: of the wrapper; "" where there is nothing to compute.
    """

    memory: WrapperMemory
    time_us: float | None
    strides: Mapping[str, tuple[int, ...]]
    source: str = ""


def generate(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    owned: Mapping[str, tuple[int, int]],
    num_visible_outputs: int,
    device: torch.device,
    strides: Mapping[str, tuple[int, ...]] | None = None,
    static: Collection[str] = (),
    donated: Collection[str] = (),
    elsewhere: DeviceSpec | None = None,
) -> Generated:
    """The wrapper that Inductor generates for a module, read.

    Args:
        module: a forward or backward module as the partitioner returns it; not changed.
        is_backward: which of the two it is.
        owned: inputs that the call frees after their last use (saved values that nobody else
            holds): storage number and bytes. The others count as nothing: they are live anyway.
        num_visible_outputs: leading outputs whose strides the user sees.
        device: the device whose bytes are counted.
        strides: how inputs really lie, where that is known.
        static: inputs of a forward that stay at one address; of a backward, all that is saved does.
        donated: inputs that the code may overwrite once nobody reads them any more.
        elsewhere: the device, if it is not here: then the code is generated in a process that takes
            it for present, and what its libraries allocate inside is by their sources.

    Raises:
        WrapperError: if the generated source cannot be followed.
        ApartError: if no code is generated for a device that is not here.
    """
    given: dict[str, Any] = {
        "is_backward": is_backward,
        "owned": owned,
        "num_visible_outputs": num_visible_outputs,
        "device": device,
        "strides": strides,
        "static": static,
        "donated": donated,
    }
    if elsewhere is None:
        return _generated(
            module, library_calls, functools.partial(loops_us, device=device), **given
        )
    return done_apart(functools.partial(_generated_for, elsewhere, module, **given))


def _generated_for(spec: DeviceSpec, module: fx.GraphModule, **given: Any) -> Generated:
    """The same in a process that does nothing else."""
    torch.set_num_threads(1)  # a pool of threads is not there in a fork
    calls = functools.partial(library_calls_elsewhere, spec)
    loops = functools.partial(gpu_loops_us, spec=spec)
    with standing_in(spec):
        return _generated(module, calls, loops, **given)


def _generated(
    module: fx.GraphModule,
    library_calls: Callable[..., dict[str, Measured]],
    loops_us: Callable[[Collection[_torch.Loop]], float],
    *,
    is_backward: bool,
    owned: Mapping[str, tuple[int, int]],
    num_visible_outputs: int,
    device: torch.device,
    strides: Mapping[str, tuple[int, ...]] | None,
    static: Collection[str],
    donated: Collection[str],
) -> Generated:
    module = copy_module(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    output = module.graph.output_node()
    results = _torch.arg_tree_leaves(*output.args)
    visible = enumerate(results[:num_visible_outputs])
    _torch.mark_visible_outputs(output, [i for i, n in visible if isinstance(n, fx.Node)])
    for node in placeholders:
        value = _restrided(_torch.fake_value(node), (strides or {}).get(node.name))
        _torch.set_fake_value(node, value)
    donated_idxs = [i for i, node in enumerate(placeholders) if node.name in donated]
    saved = [i for i, node in enumerate(placeholders) if not _torch.is_tangent(node)]
    static_idxs = [i for i, node in enumerate(placeholders) if node.name in static]
    with _in_its_order(module):
        code = _torch.generated_code(
            module,
            [_torch.fake_value(node) for node in placeholders],
            is_backward=is_backward,
            static_input_idxs=saved if is_backward else static_idxs,
            donated=donated_idxs,
        )
    if code is None:  # nothing to compute: Inductor hands the inputs through
        live_nbytes = sum(dict(owned.values()).values())
        passed = tuple(owned.get(n.name) if isinstance(n, fx.Node) else None for n in results)
        return Generated(WrapperMemory((live_nbytes,), passed), 0.0, {})
    source, graph = code
    named = zip(results, _torch.inductor_output_strides(graph), strict=False)
    function = call_function(source)
    library = library_calls(function, lambda name: _layout(graph, name), device)
    memory = read_wrapper(source, _buffers(library, graph, placeholders, owned, device))
    calls_us = _calls_us(function, library, graph, loops_us)
    return Generated(
        memory,
        calls_us if calls_us is None else calls_us + fresh_us(memory.buffers_nbytes, device),
        {node.name: s for node, s in named if isinstance(node, fx.Node) and s is not None},
        source,
    )


def _calls_us(
    function: ast.AST,
    library: Mapping[str, Measured],
    graph: Any,
    loops_us: Callable[[Collection[_torch.Loop]], float],
) -> float | None:
    """What the kernels of generated code take; it is told, and no plan may be lost to it."""
    library_time_us = library_us(function, library)
    if library_time_us is None:
        return None
    try:
        return library_time_us + loops_us(_torch.generated_loops(graph))
    except Exception:  # torch asks its nodes for bytes and FLOPs only to log them
        return None


def _restrided(value: Any, stride: tuple[int, ...] | None) -> Any:
    """The fake input as it really lies: a copy of the way AOTAutograd restrides saved values."""
    if stride is None or not isinstance(value, torch.Tensor) or len(stride) != value.dim():
        return value
    if tuple(_torch.size_hint(extent) for extent in value.stride()) == stride:
        return value
    with _torch.fake_mode_of(value):
        return value.as_strided(value.size(), stride)


def _buffers(
    library: Mapping[str, Measured],
    graph: Any,
    placeholders: Sequence[fx.Node],
    owned: Mapping[str, tuple[int, int]],
    device: torch.device,
) -> Buffers:
    first_in: dict[int, int] = {}  # by storage, the position of its first input
    shared: dict[int, int] = {}
    input_nbytes: list[int] = []
    input_values: list[int | None] = []
    for position, node in enumerate(placeholders):
        value = _torch.fake_value(node)
        is_number = isinstance(value, _NUMBERS)  # else a tensor, or an opaque group of processes
        input_values.append(_torch.size_hint(value) if is_number else None)
        storage, nbytes = owned.get(node.name, (None, 0))
        input_nbytes.append(nbytes)
        if storage is not None and first_in.setdefault(storage, position) != position:
            shared[position] = first_in[storage]
    allocated = {text: (found.peak_nbytes, found.kept_nbytes) for text, found in library.items()}
    return Buffers(
        input_nbytes=input_nbytes,
        input_values=input_values,
        result_nbytes=_torch.inductor_result_nbytes(graph, device),
        library_nbytes=allocated.get,
        round_nbytes=lambda nbytes: rounded_nbytes(nbytes, device),
        device_type=device.type,
        shared_inputs=shared,
        input_layouts=[_input_layout(_torch.fake_value(node)) for node in placeholders],
    )


def _input_layout(value: Any) -> Layout | None:
    """Sizes and strides of a fake input, symbols at their hints; None if it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    size, stride = (
        tuple(_torch.size_hint(extent) for extent in extents)
        for extents in (value.size(), value.stride())
    )
    return size, stride


def _layout(graph: Any, name: str) -> TensorSpec | None:
    found = _torch.inductor_layout(graph, name)
    return TensorSpec(*found) if found is not None else None
