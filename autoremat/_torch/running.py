"""Private names of tensors, operators, modes, optimizers and the profiler.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import getitem
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._C import _autograd
from torch._C._profiler import _ExtraFields_Allocation
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.optim import optimizer as _optimizer
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "MemoryEvent",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "accumulates",
    "address_of",
    "arg_tree_leaves",
    "arguments_of",
    "base_of",
    "bounded_at",
    "can_be_bounded",
    "compiled_backward_of",
    "compiled_call",
    "extent",
    "fixed_at",
    "foreach_by_default",
    "getitem",
    "gradient_nbytes_into",
    "has_results",
    "is_compiled_backward",
    "is_getitem",
    "is_in_backward",
    "is_mutable",
    "keeps_graph",
    "memory_events",
    "module_calls",
    "own_call",
    "profiler_is_active",
    "raw_saved",
    "real_execution",
    "recording_memory",
    "restores_rng_state",
    "rng_state_nbytes",
    "saved_by",
    "saved_names",
    "sequence_number",
    "set_compiled_call",
    "size_expression",
    "size_hint",
    "size_symbols",
    "sized",
    "sizes_as",
    "sparse_parts",
    "step_hooks",
    "storage_identity",
    "storage_key",
    "symbol_range",
    "symbol_source",
    "tensor_leaves",
    "tree_leaves",
    "tree_map",
    "version_of",
    "watch_backwards",
]


_NO_BOUND = 1 << 48  # torch writes a bound at the end of its numbers where there is none
_VIEWS_OF_VIEWS = 4  # nodes between an output and its graph's

BackwardWatcher = Callable[[Any, bool], None]


def real_execution() -> AbstractContextManager[Any]:
    """Suspend fake-tensor, proxy and functional modes: what runs inside really runs."""
    return _disable_current_modes()


def module_calls() -> list[tuple[nn.Module, Any]]:
    """The calls of modules that run on this thread, the outermost first, with what each is given.

    What a hook has put in its place is left out.
    """
    calls, frame = [], sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            known = frame.f_locals  # of no frame that outlives the call: Python may keep them in it
            calls.append((known["self"], (known["args"], known["kwargs"])))
    return calls[::-1]


def is_in_backward() -> bool:
    """Whether a backward is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def profiler_is_active() -> bool:
    """Whether some torch profiler session is recording; a second one would end it."""
    return _autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


@contextmanager
def recording_memory() -> Iterator[torch.profiler.profile]:
    """A session of the profiler that records what is allocated and freed on the CPU.

    Torch 2.13 tells the terminal of the start and end of every session, 2.11 that there is no GPU.
    The profiler reads how much it shall say when the process first uses it: nothing, unless the
    user has set `KINETO_LOG_LEVEL`.
    """
    silenced = "KINETO_LOG_LEVEL" not in os.environ
    if silenced:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # 2.11 warns of the events of earlier cycles; there are none
        ) as session:
            yield session
    finally:
        if silenced:
            os.environ.pop("KINETO_LOG_LEVEL", None)


@dataclass(frozen=True)
class MemoryEvent:
    """What a session of the profiler has recorded: memory on the CPU, or the span of a function.

    Attributes:
        name: of the function; "" of memory.
        start_ns: when it happened or began.
        end_ns: when it ended.
        nbytes: allocated, or less than 0 where freed; 0 where memory from before the session is
            freed, for which the profiler may tell the size of what once was at its address.
        address: of the memory.
    """

    name: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    address: int = 0


def memory_events(session: torch.profiler.profile, prefix: str) -> list[MemoryEvent]:
    """What a finished session has recorded, in order of time.

    Args:
        session: it recorded memory.
        prefix: of the names of the functions that are asked for.
    """
    inner = session.profiler
    if inner is None or inner.kineto_results is None:
        return []
    found, rest = [], inner.kineto_results.experimental_event_tree()[::-1]
    while rest:
        node = rest.pop()
        rest.extend(reversed(node.children))
        what = node.extra_fields
        if not isinstance(what, _ExtraFields_Allocation):
            if node.name.startswith(prefix):
                found.append(MemoryEvent(node.name, node.start_time_ns, node.end_time_ns))
        elif what.device.type == "cpu":
            when = node.start_time_ns
            found.append(MemoryEvent("", when, when, what.alloc_size, what.ptr))
    found.sort(key=lambda event: event.start_ns)
    return list(_completed(found))


def _completed(events: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
    """The events, with what they leave unsaid.

    Memory that another thread than the step's has freed, as those of process groups do, is freed
    when its address is used again.
    """
    live: dict[int, int] = {}
    for event in events:
        before_nbytes = 0 if event.name else live.pop(event.address, 0)
        if event.name:
            yield event
        elif event.nbytes < 0:
            yield replace(event, nbytes=-before_nbytes)
        else:
            live[event.address] = event.nbytes
            if before_nbytes:
                yield replace(event, nbytes=-before_nbytes)
            yield event


def storage_identity(storage: torch.UntypedStorage) -> int:
    """A number that two live storages share exactly if they are one."""
    return storage._cdata


def address_of(storage: torch.UntypedStorage) -> int:
    """Where its memory begins, which copies on write may share; 0 if it has none."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return int(torch._C._data_address(view))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place; of one that counts nothing, 0."""
    return 0 if tensor.is_inference() else tensor._version


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of a storage from the first to the last that a tensor of this layout reaches."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor (COO) as it holds them, also while fakes are traced."""
    with _disable_current_modes():
        return tensor._indices(), tensor._values()


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in a nest of lists, tuples, dicts and registered containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_mutable(operator: OpOverload) -> bool:
    """Whether the operator's schema says that it writes to an argument."""
    return operator._schema.is_mutable


def arguments_of(operator: Any) -> list[Any]:
    """The arguments in an operator's schema (`name`, `default_value`), in their order."""
    return list(operator._schema.arguments)


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, past what it is compiled to."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What runs when a module is called, if that is not its own call."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Let something run when a module is called, as `nn.Module.compile` does; None: its own."""
    module._compiled_call_impl = call


def has_results(operator: OpOverload) -> bool:
    """Whether the operator's schema says that it returns anything."""
    return bool(operator._schema.returns)


def foreach_by_default(params: list[torch.Tensor], differentiable: bool) -> bool:
    """Whether torch's optimizers use their multi-tensor form for these parameters unasked."""
    _, foreach = _optimizer._default_to_fused_or_foreach(params, differentiable, use_fused=False)
    return foreach


def step_hooks() -> tuple[str, ...]:
    """Names of the attributes in which an optimizer keeps the user's hooks around `step`."""
    return ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


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


def can_be_bounded(size: torch.SymInt, most: int) -> bool:
    """Whether a guard may keep a symbolic size from being larger than a number.

    Not where the size is known only when the code runs, where the user has given it bounds, which
    torch insists on, and where it could not be smaller either, if the user has marked it as one
    that varies: it would become a constant.
    """
    if not isinstance(getattr(size.node, "hint", None), int):
        return False
    asked = [found for found in _user_constraints(size) if not found.warn_only]
    if any(isinstance(constraint, StrictMinMaxConstraint) for constraint in asked):
        return False
    lower = size.node.shape_env.bound_sympy(size.node.expr).lower
    return not asked or bool(lower < most)


def _user_constraints(size: torch.SymInt) -> Iterator[Any]:
    """What the user has demanded of a symbolic size (`torch._dynamo.mark_dynamic`)."""
    for tracked in size.node.shape_env.tracked_fakes or ():
        demanded = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for extent, constraint in zip(getattr(tracked.fake, "shape", ()), demanded, strict=False):
            if constraint is None or not isinstance(extent, torch.SymInt):
                continue
            if extent.node.expr.free_symbols & size.node.expr.free_symbols:
                yield constraint


_NO_SIZES: Mapping[Any, Any] = MappingProxyType({})
_sizes: ContextVar[Mapping[Any, Any]] = ContextVar("sizes", default=_NO_SIZES)  # by symbol


@contextmanager
def sizes_as(numbers: Mapping[Any, int]) -> Iterator[None]:
    """Let symbolic sizes stand for other numbers than while tracing, in this context.

    Args:
        numbers: by symbol, as `size_symbols` gives them.
    """
    token = _sizes.set({symbol: sympy.Integer(n) for symbol, n in numbers.items()})
    try:
        yield
    finally:
        _sizes.reset(token)


def sized(expression: Any) -> Any:
    """An expression of sympy's over sizes, with the numbers of `sizes_as` in place of symbols."""
    numbers = _sizes.get()
    return (
        expression.xreplace(numbers) if numbers and hasattr(expression, "xreplace") else expression
    )


def size_symbols(size: int | torch.SymInt) -> dict[Any, int]:
    """The symbols in a size that inputs decide, with the numbers they stood for while tracing."""
    if isinstance(size, int):
        return {}
    env = size.node.shape_env
    found = getattr(env, "backed_var_to_val", None) or env.var_to_val
    return {s: int(found[s]) for s in size.node.expr.free_symbols if s in found}


def size_expression(size: int | torch.SymInt) -> Any:
    """The size as an expression of sympy's over the symbols that `size_symbols` gives."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def symbol_source(size: torch.SymInt, symbol: Any) -> str:
    """Where a symbol comes from, as guards write it: "L['x'].size()[0]"; "" if nobody says."""
    env = size.node.shape_env
    sources = getattr(env, "var_to_sources", None) or getattr(env, "source_to_var", {})
    found = sources.get(symbol) or ()
    return next((_source_name(source) for source in found), "")


def _source_name(source: Any) -> str:
    name = source.name  # a property since torch 2.13, a method before
    return str(name() if callable(name) else name)


def symbol_range(size: torch.SymInt, symbol: Any) -> tuple[int, int | None]:
    """The least and the greatest number that a symbol stands for; None where nothing bounds it."""
    found = size.node.shape_env.bound_sympy(symbol)
    high = int(found.upper) if isinstance(found.upper, sympy.Integer) else None  # or an infinity
    return int(found.lower), None if high is None or high > _NO_BOUND else high


def bounded_at(size: torch.SymInt) -> str:
    """The user's line that bounded a symbol from above: code, file and line; "" if nobody says."""
    bounds = size.node.shape_env.var_to_range_sloc.get(size.node.expr)
    return "" if bounds is None else _users_line(bounds.upper)


def fixed_at(fake: torch.Tensor, dimension: int) -> str:
    """The same of a line that made a size of an input a constant."""
    env = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
    for symbol, number in () if env is None else env.replacements.items():
        source = next(iter(env.var_to_sources.get(symbol, ())), None)
        is_size = source is not None and _source_name(source).endswith(f".size()[{dimension}]")
        if is_size and number.is_number and number == fake.shape[dimension]:
            return _users_line(env.replacements_slocs.get(symbol))
    return ""


def _users_line(place: Any) -> str:
    """Such as "model.py:18: assert ids.shape[1] <= 100"."""
    code, _, where = str(getattr(place, "maybe_user_loc", None) or "").rpartition("  # ")
    file = where.split(" in ")[0].rpartition("/")[2]
    return f"{file}: {code}" if code else file


def size_hint(size: int | torch.SymInt) -> int:
    """The number that a symbolic size stands for (4096 if it has none)."""
    if isinstance(size, int):
        return size
    node = size.node
    if node.expr.free_symbols & _sizes.get().keys():
        as_traced = {symbol: sympy.Integer(n) for symbol, n in size_symbols(size).items()}
        expression = node.expr.xreplace({**as_traced, **_sizes.get()})
        if expression.is_number:
            return int(expression)
    hint = getattr(node, "hint", None)
    if isinstance(hint, int):
        return hint
    shape_env = node.shape_env
    ask = getattr(shape_env, "optimization_hint", None)
    if ask is not None:
        return int(ask(node.expr, fallback=4096))
    return int(shape_env.size_hint(node.expr, allow_none=True) or 4096)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identity of a (fake) tensor's storage; None where it has none (sparse tensors)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes an element of a tuple of results."""
    return node.op == "call_function" and node.target is getitem


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was made from by autograd's account; else the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def compiled_backward_of(outputs: Iterable[torch.Tensor]) -> Any | None:
    """The node of autograd's graph through which a compiled graph's outputs are differentiated.

    Outputs that are views of others have nodes of their own in front of it.
    """
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    for _ in range(_VIEWS_OF_VIEWS):
        found = next((node for node in nodes if is_compiled_backward(node)), None)
        if found is not None:
            return found
        nodes = {source for node in nodes for source, _ in node.next_functions if source}
    return None


def accumulates(node: Any) -> bool:
    """Whether a node of autograd's graph is where a leaf takes its gradient."""
    return type(node).__name__ == "AccumulateGrad"


def saved_by(node: Any) -> list[Any]:
    """What a node of autograd's graph keeps for its backward; what is freed is left out.

    A tensor that a hook has packed is given as the hook left it: unpacking is the backward's.
    """
    found: list[Any] = []
    for name in saved_names(node):
        with suppress(RuntimeError):  # freed, or overwritten since
            found += _as_kept(node, name)
    return found


def saved_names(node: Any) -> list[str]:
    """Attributes of a node of autograd's graph that give what it keeps for its backward."""
    names = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
    return names + [name for name in dir(node) if name.startswith("_saved_")]


def raw_saved(node: Any, name: str) -> Sequence[Any]:
    """What is behind such an attribute, as autograd keeps it; empty where it is no tensor."""
    raw = getattr(node, f"_raw_{name.removeprefix('_')}", ())
    return raw if isinstance(raw, (tuple, list)) else (raw,)


def _as_kept(node: Any, name: str) -> list[Any]:
    kept = raw_saved(node, name)
    if all(saved.unpack_hook is None for saved in kept):
        return [getattr(node, name)]
    return [saved.data for saved in kept if saved.unpack_hook is not None]


def keeps_graph() -> bool:
    """Whether the backward that runs here was asked to keep what was saved for it."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def sequence_number(node: Any) -> int:
    """The engine runs the ready node with the highest one first."""
    return int(node._sequence_nr())


def gradient_nbytes_into(node: Any) -> list[int]:
    """Bytes of the gradient that a node takes for each of its results; 0 where they are ragged."""
    return [
        math.prod(_plain_size(n) for n in found.shape) * found.dtype.itemsize
        for found in node._input_metadata
    ]


def _plain_size(size: int | torch.SymInt) -> int:
    return 0 if isinstance(size, torch.SymInt) and size.node.is_nested_int() else int(size)


_backward_watchers: list[BackwardWatcher] = []


def watch_backwards(watcher: BackwardWatcher) -> None:
    """Tell of every backward of this process that Python code begins.

    Args:
        watcher: given the tensors (or edges) that it begins at and whether it keeps the graph.
    """
    if not _backward_watchers:
        run = torch.autograd._engine_run_backward

        @functools.wraps(run)
        def watched(roots: Any, gradients: Any, keep: Any, *args: Any, **kwargs: Any) -> Any:
            for watch in _backward_watchers:
                watch(roots, bool(keep))
            return run(roots, gradients, keep, *args, **kwargs)

        torch.autograd._engine_run_backward = watched
    _backward_watchers.append(watcher)


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"
