"""Private names of Inductor's compile of one module: from the module to the source of its wrapper.

Enters: a module. Leaves: the source and Inductor's graph, no kernel compiled. Guarantees: what is
generated while a step is compiled is not generated again when Inductor comes to the same module: it
is then in Inductor's own cache, under Inductor's own key.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._dynamo.utils import count_calls
from torch._inductor import compile_fx as inductor_compile
from torch._inductor import graph as inductor_graph
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import BoxedBool
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = [
    "backward_results_are_visible",
    "compile_inner",
    "generated_code",
    "handing_over",
    "loading_kernels_by",
    "may_overwrite",
]

_Loading = Callable[[Any], Any]

_STATIC = "_is_inductor_static"  # how Inductor marks inputs on a GPU that stay at one address

# What replaces the step to loaded kernels, and positions of what may be overwritten.
_stopped: ContextVar[tuple[_Loading, list[int]] | None] = ContextVar("stopped", default=None)


# Whether a compile goes on that will come to what is generated.
_is_handed_over: ContextVar[bool] = ContextVar("is handed over", default=False)


# What a backward that is compiled in this context may overwrite: Inductor's key lacks it.
_overwritten: ContextVar[tuple[int, ...] | None] = ContextVar("overwritten", default=None)


class _Unclaimed:
    """What was generated and not asked for yet, by Inductor's key; the oldest gives way.

    Each belongs to a compile's symbols: what their guards say holds for no other compile.
    """

    MOST = 32

    def __init__(self) -> None:
        self._of_symbols: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def keep(self, key: str, compiled: Any) -> None:
        with self._lock:
            by_key = self._here()
            by_key.pop(key, None)
            by_key[key] = compiled
            while len(by_key) > self.MOST:
                del by_key[next(iter(by_key))]

    def take(self, key: str) -> Any:
        with self._lock:
            return self._here().pop(key, None)

    def drop(self) -> None:
        """What the compile in progress has not come to, which is over."""
        with self._lock:
            self._here().clear()

    def _here(self) -> dict[str, Any]:
        symbols = FxGraphCache._get_shape_env()
        return {} if symbols is None else self._of_symbols.setdefault(symbols, {})


_unclaimed = _Unclaimed()


class _Generated(Exception):
    """Stops a compile once its wrapper's source is there."""


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """While open, what is generated is kept for the compile that goes on in this context.

    Forward and backward are compiled in it.
    """
    _install()
    token = _is_handed_over.set(True)
    try:
        yield
    finally:
        _is_handed_over.reset(token)
        _unclaimed.drop()


def compile_inner(module: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
    """Inductor's inner compile of a module, whose key does not depend on how the module came about.

    Else it is of the code that the module had when it was last asked for it, and of the order in
    which its attributes were set.
    """
    module.recompile()
    _LazyGraphModule.force_recompile(module)
    attributes = sorted(module.__dict__.items())
    module.__dict__.clear()
    module.__dict__.update(attributes)
    donated = inductor_graph.get_donated_idxs() if keywords.get("is_backward") else None
    token = _overwritten.set(tuple(donated or ()))
    try:
        return inductor_compile.compile_fx_inner(module, inputs, **keywords)
    finally:
        _overwritten.reset(token)


def may_overwrite() -> tuple[int, ...] | None:
    """Positions of inputs that what `compile_inner` compiles now may overwrite; None outside of it.

    Whoever is in Inductor's configuration can say so in its key, which does not tell such code
    from other code.
    """
    return _overwritten.get()


def backward_results_are_visible() -> bool:
    """Whether gradients keep the strides that the graph gives them."""
    return bool(torch._inductor.config.bw_outputs_user_visible)


def generated_code(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool,
    static_input_idxs: Sequence[int],
    donated: Sequence[int] = (),
) -> tuple[str, Any] | None:
    """The wrapper's source and Inductor's graph, scheduled; None where there is nothing to compute.

    While code is handed over it is what Inductor would load. Else, loops are written without
    vectors, which takes less time: what they allocate, and what is fused, was decided before.

    Args:
        module: a forward or backward, which is changed.
        inputs: its inputs as fakes, under whose mode it is compiled.
        is_backward: which of the two it is.
        static_input_idxs: positions of inputs that stay at one address.
        donated: positions of inputs that the code may overwrite.

    Raises:
        RuntimeError: if Inductor generates code in another process.
    """
    seen: list[tuple[str, Any]] = []
    is_kept = _is_kept()

    def stop(graph: Any) -> Any:
        code = graph.codegen()[0]
        seen.append((getattr(code, "value", code), graph))
        if is_kept:
            return _not_loaded(graph, code)
        raise _Generated

    options: dict[str, Any] = {"is_backward": is_backward, "cudagraphs": BoxedBool(False)}
    if "get_decomp_fn" in inductor_compile._CompileFxKwargs.__annotations__:  # from 2.13 on
        options["get_decomp_fn"] = select_decomp_table
    config = torch._inductor.config
    patches = {} if is_kept else _without_cache_or_vectors()
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    unmarked = [value for value in tensors if not hasattr(value, _STATIC)]
    with loading_kernels_by(stop, donated), config.patch(patches):
        try:
            compile_inner(
                module,
                inputs,
                static_input_idxs=list(static_input_idxs),
                graph_id=None,
                boxed_forward_device_index=BoxedDeviceIndex(None),
                **options,
            )
        except Exception:
            if not seen:  # Inductor wraps `_Generated` into an exception of its own
                raise
        finally:
            for value in unmarked:  # it may be given to another graph
                vars(value).pop(_STATIC, None)
    if not seen and count_calls(module.graph):
        raise RuntimeError("Inductor generates code where it cannot be read: in another process.")
    return seen[0] if seen else None


def _is_kept() -> bool:
    """Whether a compile goes on that can find what is generated, source and all."""
    config = torch._inductor.config
    return (
        _is_handed_over.get()
        and bool(config.fx_graph_cache)
        and not config.force_disable_caches
        and not torch._functorch.config.bundled_autograd_cache
        and not (config.cpp_wrapper or config.fx_wrapper)
        and not config.triton.autotune_at_compile_time
        and not _is_elsewhere()
    )


def _is_elsewhere() -> bool:
    """Whether modules are compiled in other processes."""
    modes = ("fx_compile_async", "fx_compile_progressive")
    is_normal = inductor_compile.fx_compile_mode is inductor_compile.FxCompileMode.NORMAL
    return not is_normal or any(getattr(inductor_compile, mode, False) for mode in modes)


def _without_cache_or_vectors() -> dict[str, Any]:
    """Options; templates of matrix products are chosen by vectors, so those stay."""
    patches: dict[str, Any] = {
        "custom_partitioner_fn": None,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
    }
    config = torch._inductor.config
    if config.cpp.simdlen is None and not (config.max_autotune or config.max_autotune_gemm):
        patches["cpp.simdlen"] = 1
    return patches


def _not_loaded(graph: Any, code: Any) -> Any:
    """What Inductor's compile goes on with instead of a loaded module."""
    graph.cache_key, graph.cache_path = PyCodeCache.write(code.value)
    graph.cache_linemap = [(line, node.stack_trace) for line, node in code.line_map]
    return SimpleNamespace(call=None, __file__=graph.cache_path)


@contextlib.contextmanager
def loading_kernels_by(replacement: _Loading, donated: Sequence[int] = ()) -> Iterator[None]:
    """Replace Inductor's step from a scheduled graph to loaded kernels, in this context only.

    What other threads compile meanwhile is loaded as ever.

    Args:
        replacement: is given the scheduled graph.
        donated: positions of inputs that Inductor may overwrite in backwards compiled here. It asks
            AOTAutograd's account of the graph, which is not there before the graph is split.
    """
    _install()
    token = _stopped.set((replacement, list(donated)))
    try:
        yield
    finally:
        _stopped.reset(token)


@functools.cache
def _install() -> None:
    """Let Inductor ask the context first; for the rest of the process."""
    load, account = GraphLowering.compile_to_module, inductor_graph.get_donated_idxs

    @functools.wraps(load)
    def compile_to_module(self: GraphLowering) -> Any:
        found = None if self.name is not None else _stopped.get()  # what is tuned has a name
        return load(self) if found is None else found[0](self)

    @functools.wraps(account)
    def get_donated_idxs() -> list[int] | None:
        found = _stopped.get()
        return account() if found is None else found[1]

    GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign]
    inductor_graph.get_donated_idxs = get_donated_idxs
    _install_cache()


def _install_cache() -> None:
    """Let Inductor's cache keep what was not loaded, and have it when it is asked for."""
    find, save = FxGraphCache.load_with_key, FxGraphCache._save_graph

    @functools.wraps(save)
    def _save_graph(key: str, compiled_graph: Any, *rest: Any, **keywords: Any) -> None:
        if _stopped.get() is None:
            save(key, compiled_graph, *rest, **keywords)
            return
        compiled_graph._time_taken_ns = None  # else it would count as time that a cache has saved
        _unclaimed.keep(key, compiled_graph)
        raise _Generated

    @functools.wraps(find)
    def load_with_key(
        key: str,
        debug_lines: list[str],
        example_inputs: Sequence[Any],
        local: bool,
        remote_cache: Any,
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        if _stopped.get() is not None:
            facts = {"key": key, "components": debug_lines, "cache_event_time": time.time_ns()}
            return None, {**facts, "cache_state": "miss"}
        given = (key, debug_lines, example_inputs, local, remote_cache, *rest)
        compiled = _unclaimed.take(key)
        if compiled is None:
            return find(*given, **keywords)
        save(key, compiled, example_inputs, local, remote_cache)
        try:
            return find(*given, **keywords)
        except Exception as error:  # of a kernel that does not compile: torch stores none
            shutil.rmtree(FxGraphCache._get_tmp_dir_for_key(key), ignore_errors=True)
            frame = inspect.currentframe()
            raise InductorError(error, frame).with_traceback(error.__traceback__) from None

    FxGraphCache._save_graph = staticmethod(_save_graph)  # type: ignore[method-assign]
    FxGraphCache.load_with_key = staticmethod(load_with_key)  # type: ignore[method-assign]
