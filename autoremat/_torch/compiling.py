"""Private names of Dynamo, AOTAutograd and its partitioners, and of fx."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any

import torch
import torch._functorch.partitioners as _partitioners
import torch._subclasses.fake_tensor as _fake_tensor
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import (
    CompileContext,
    TracingContext,
    compile_context,
    detect_fake_mode,
    tracing,
)
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutput
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShape
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import arg_tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from autoremat._torch.ambient import Ambient
from autoremat._torch.known_sizes import KnownSizes

__all__ = [
    "BackendCompilerFailed",
    "BoxedCodeGen",
    "CheckpointPolicy",
    "DataDependentOutput",
    "DynamicOutputShape",
    "DynamoGraph",
    "activation_memory_budget",
    "aot_autograd",
    "as_boxed",
    "code_at_hand",
    "compile_name",
    "compile_number",
    "default_partition",
    "donated_inputs",
    "donates_saved_values",
    "dynamo_counters",
    "extract_forward_and_backward",
    "failing_quietly",
    "fake_mode_of",
    "force_recompile",
    "force_save_what_torch_demands",
    "frame_name",
    "fx_graph_cse",
    "invoke_subgraph",
    "is_backward_seed",
    "is_compiling",
    "is_primal",
    "is_symbolic",
    "is_tangent",
    "min_cut",
    "must_run_in_backward",
    "passing_through",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "tangents_are_freed",
    "thread_rng_states",
    "with_backwards_ahead",
    "without_cached_partitions",
]

default_partition = _partitioners.default_partition
is_primal = _partitioners._is_primal
is_tangent = _partitioners._is_tangent
is_backward_seed = _partitioners._is_bwd_seed_offset
is_symbolic = _partitioners.is_sym_node
must_run_in_backward = _partitioners._must_be_in_backward
invoke_subgraph = torch.ops.higher_order.invoke_subgraph
force_recompile = _LazyGraphModule.force_recompile


def is_compiling() -> bool:
    """Whether Dynamo compiles a frame in this context."""
    return CompileContext.current_compile_id() is not None


def code_at_hand() -> CodeType | None:
    """Of the function that Dynamo compiles; after a graph break, of what resumes it.

    It is compiled before anything of it runs.
    """
    try:
        code: CodeType = InstructionTranslator.current_tx().f_code
    except AttributeError:  # none is compiled
        return None
    return code


def frame_name() -> str:
    """The Dynamo frame that is being compiled: a recompile of it has the same name."""
    compile_id = CompileContext.current_compile_id()
    return f"graph {compile_id.frame_id if compile_id is not None else 0}"


def compile_name() -> str:
    """The compile of the frame: a recompile has another name."""
    number = compile_number()
    return f"{frame_name()}/{number}" if number else frame_name()


def compile_number() -> int:
    """How often the frame was compiled before."""
    compile_id = CompileContext.current_compile_id()
    return int(compile_id.frame_compile_id or 0) if compile_id is not None else 0


class DynamoGraph:
    """A graph that Dynamo compiles now, kept so that it can be compiled again without Dynamo.

    It holds no tensor of the user's: inputs are fakes, with the symbols that Dynamo's guards know.

    Attributes:
        inputs: such fakes, in their order.
        is_broken_off: whether the function that it is of goes on behind it, in eager mode at first.
    """

    def __init__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], *, runs: bool = True
    ) -> None:
        """Of the compile in progress, before anything changes the module.

        Args:
            module: the graph.
            example_inputs: its inputs.
            runs: whether it is going to run; else its inputs are fake already.
        """
        self._ambient = Ambient.now()
        context = TracingContext.try_get()
        self._fake_mode = context.fake_mode if context is not None else None
        self._compile_context = CompileContext.try_get()
        self._module = _copied(module)
        reason = getattr(module, "compile_subgraph_reason", None)
        self.is_broken_off = bool(reason is not None and reason.graph_break)
        # What does not run is fake already, without symbols: Dynamo keeps those in the graph.
        faked = map(self._faked, example_inputs) if runs else _traced(module, example_inputs)
        self.inputs = list(faked)
        env = self._fake_mode.shape_env if self._fake_mode is not None else None
        self._sizes = KnownSizes(env) if env is not None else None  # those of the inputs included

    def _faked(self, value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake_mode.from_tensor(value) if is_real and self._fake_mode else value

    def copy(self) -> fx.GraphModule:
        """The graph, to be compiled again with its `inputs` while the compile is `resumed`."""
        return _copied(self._module)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """The compile goes on as it began; what is compiled within may depend on no more.

        Raises:
            RuntimeError: at the end, if it has asked for guards that Dynamo does not have.
        """
        with (
            self._ambient.again(),
            compile_context(self._compile_context),
            tracing(TracingContext(self._fake_mode)),
            self._sizes.again() if self._sizes is not None else contextlib.nullcontext(),
        ):
            yield


def _traced(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    """The inputs of a graph as Dynamo has traced them."""
    for node, given in zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        yield node.meta.get("example_value", given)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Dynamo's graph over a copy of its nodes, with all that AOTAutograd reads off it."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output: Any = graph.graph_copy(module.graph, nodes, return_output_node=True)
    results, original = output
    graph.output(results).meta = dict(original.meta)
    for before, after in nodes.items():
        after.meta = dict(before.meta)
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source  # type: ignore[attr-defined]
    copied = fx.GraphModule(module, graph)
    copied.meta = dict(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copied._param_name_to_source = module._param_name_to_source
    return copied


def _is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is a torch-bind or other opaque object, not a tensor or symbol."""
    test: Callable[[fx.Node], bool] | None = getattr(_partitioners, "is_opaque_node", None)
    return test is not None and test(node)


def force_save_what_torch_demands(module: fx.GraphModule) -> set[fx.Node]:
    """Tag effects and sources of mutations as saved, and close checkpoint regions.

    Collectives are not among them, as they are with torch: which may run again is ruled by
    `graph.collectives`. Returns the nodes that are tagged only because another region begins right
    behind theirs.
    """
    _partitioners.force_save_effectful_ops(module)
    _partitioners.force_save_bw_mutation_src(module)
    inside = {node for node in module.graph.nodes if _partitioners.must_recompute(node)}
    if inside:
        _partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    return {
        node
        for node in inside
        if not _partitioners.must_recompute(node) and not node.meta.get("has_backward_hook", False)
    }


def extract_forward_and_backward(
    joint: fx.GraphModule, saved: Sequence[fx.Node], *, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph at the given saved nodes (tensors, symbols and opaque objects)."""
    symbols = [n for n in saved if is_symbolic(n) and not _is_only_asserted(n)]
    opaque = [n for n in saved if _is_opaque(n)]
    tensors = [n for n in saved if not is_symbolic(n) and n not in opaque]
    extract = _partitioners._extract_fwd_bwd_modules
    keywords: dict[str, Any] = {}
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:
        keywords["saved_opaque_nodes"] = opaque
    forward, backward = extract(
        joint, tensors, saved_sym_nodes=symbols, num_fwd_outputs=num_fwd_outputs, **keywords
    )
    return forward, backward


def donates_saved_values() -> bool:
    """Whether compiled backwards may write over saved values that nobody else holds."""
    return bool(torch._functorch.config.donated_buffer)


def donated_inputs(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int
) -> frozenset[str]:
    """Names of the backward's inputs that its compiled code may overwrite.

    AOTAutograd's own rule: saved tensors that share no storage with inputs of the forward nor with
    results.
    """
    if not donates_saved_values() or any(
        map(graph_compile.contain_metadata_mutation_ops, (forward, backward))
    ):
        return frozenset()
    first = arg_tree_leaves(*forward.graph.output_node().args)
    saved = first[num_fwd_outputs:]
    donated = graph_compile.collect_fw_donated_buffer_idxs(
        _fake_values(forward.graph.find_nodes(op="placeholder")),
        _fake_values(first[:num_fwd_outputs]),
        _fake_values(arg_tree_leaves(*backward.graph.output_node().args)),
        _fake_values(saved),
    )
    return frozenset(saved[position].name for position in donated)


def _fake_values(nodes: Sequence[Any]) -> list[Any]:
    """Those of tensors; in 2.11 the rule does not know that symbols are handed over as well."""
    values = (node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes)
    return [value if isinstance(value, torch.Tensor) else None for value in values]


def _is_only_asserted(node: fx.Node) -> bool:
    """Whether a truth about sizes is nothing but checked: the forward has checked it."""
    checks = (user.target is torch.ops.aten._assert_scalar.default for user in node.users)
    return isinstance(node.meta.get("val"), torch.SymBool) and bool(node.users) and all(checks)


def activation_memory_budget(share: float) -> contextlib.AbstractContextManager[None]:
    """Let what compiles within use torch's own memory budget, a share of what it would save."""
    config: Any = torch._functorch.config
    return config.patch(activation_memory_budget=share)


def without_cached_partitions() -> contextlib.AbstractContextManager[None]:
    """Let what compiles within split each joint graph: AOTAutograd's cache is left out."""
    config: Any = torch._functorch.config
    return config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def with_backwards_ahead() -> contextlib.AbstractContextManager[None]:
    """Let what compiles within compile a graph's backward with its forward, not as it first runs.

    What fails there fails before anything has run.
    """
    config: Any = torch._functorch.config
    return config.patch(force_non_lazy_backward_lowering=True)


def min_cut(
    joint: fx.GraphModule, *, num_fwd_outputs: int, budget: float = 1.0
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's default partition for Inductor; changes the joint graph that it is given.

    Args:
        joint: the graph.
        num_fwd_outputs: how many of its outputs belong to the forward.
        budget: torch's memory budget, a share of what it would save; 1 for none.
    """
    with activation_memory_budget(budget):
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


@functools.cache
def tangents_are_freed() -> bool:
    """Whether a compiled backward frees each incoming gradient after its last use.

    From 2.12 on it takes them over; before, their caller held them until the backward ended. This
    is measured, in a thread of its own: it does not see the compile or fake mode in progress here.
    """
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_frees_tangent).result()


def _frees_tangent() -> bool:
    freed: list[bool] = []

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            latest = StorageWeakRef(arguments[-1].untyped_storage())
            results = gm(*arguments)
            arguments.clear()
            freed.append(latest.expired())
            return results

        return as_boxed(run)

    x = torch.ones(2, requires_grad=True)
    aot_function(torch.sin, compiler)(x).exp().sum().backward()
    return freed[-1]  # of the backward, whose last argument is the tangent


def as_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The same call, of which AOTAutograd knows that it takes one list and may empty it."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def fake_mode_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """The fake mode that a fake value, or any in a list, belongs to."""
    return detect_fake_mode(value) or contextlib.nullcontext()


@contextlib.contextmanager
def failing_quietly() -> Iterator[None]:
    """Within it, torch logs nothing of an operator that raises as fake values do not fit."""
    log = logging.getLogger(_fake_tensor.__name__)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def passing_through(error: Exception) -> Exception:
    """The same error in a form that Dynamo lets through without wrapping it.

    It is an instance of the error's own class with the same attributes and text.
    """
    kind = type(error)

    def __init__(self: Any) -> None:
        built_in = OSError if isinstance(error, OSError) else Exception
        built_in.__init__(self, *error.__reduce__()[1])  # of an OSError, `args` lack the file
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
    return through()
