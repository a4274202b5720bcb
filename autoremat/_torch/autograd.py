"""Private names of autograd's graph: its nodes, what they keep, and its backwards.

Guarantees: importing this imports nothing that compiles.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._C import _autograd

__all__ = [
    "accumulates",
    "base_of",
    "compiled_backward_of",
    "gradient_nbytes_into",
    "is_compiled_backward",
    "is_in_backward",
    "is_second_backward",
    "keeps_graph",
    "raw_saved",
    "saved_by",
    "saved_names",
    "sequence_number",
    "watch_backwards",
]

BackwardWatcher = Callable[[Any, Any, bool], None]
BackwardFailed = Callable[[RuntimeError], None]
_VIEWS_OF_VIEWS = 4  # nodes between an output and its graph's


def is_in_backward() -> bool:
    """Whether a backward is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_second_backward(error: RuntimeError) -> bool:
    """Whether a backward failed since it went through the backward of a compiled graph."""
    return "does not currently support double backward" in str(error)


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


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of autograd's graph is the backward of a graph that AOTAutograd compiled."""
    return type(node).__name__ == "CompiledFunctionBackward"


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
    own = (name for name in getattr(node, "__dict__", ()) if name.startswith("_saved_"))
    return [*_saved_names(type(node)), *own]


def _saved_names(kind: type) -> list[str]:
    """Those that all nodes of a kind have: each compiled graph and function has its own kind."""
    if kind not in _names_of_kinds:  # looks ask thousands of nodes
        names = ["saved_tensors"] if hasattr(kind, "saved_tensors") else []
        _names_of_kinds[kind] = names + [name for name in dir(kind) if name.startswith("_saved_")]
    return _names_of_kinds[kind]


_names_of_kinds = weakref.WeakKeyDictionary[type, list[str]]()


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


_backward_watchers: list[tuple[BackwardWatcher, Callable[[], None], BackwardFailed]] = []


def watch_backwards(
    watcher: BackwardWatcher,
    ended: Callable[[], None] = lambda: None,
    failed: BackwardFailed = lambda _: None,
) -> None:
    """Tell of every backward of this process that Python code begins.

    Args:
        watcher: given the tensors (or edges) that it begins at, their gradients, and whether
            it keeps the graph.
        ended: called once it is over, unless it has failed.
        failed: given the error that it has failed with, which is raised then.
    """
    if not _backward_watchers:
        run = torch.autograd._engine_run_backward

        @functools.wraps(run)
        def watched(roots: Any, gradients: Any, keep: Any, *args: Any, **kwargs: Any) -> Any:
            for watch, _, _ in _backward_watchers:
                watch(roots, gradients, bool(keep))
            try:
                found = run(roots, gradients, keep, *args, **kwargs)
            except RuntimeError as error:
                for _, _, tell in _backward_watchers:
                    tell(error)
                raise
            for _, tell_end, _ in _backward_watchers:
                tell_end()
            return found

        torch.autograd._engine_run_backward = watched
    _backward_watchers.append((watcher, ended, failed))
