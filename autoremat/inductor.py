"""Inductor: the partitioner hook, and what its generated code will allocate.

Enters: a planned forward and backward module. Leaves: the live bytes of the wrappers that
Inductor generates for them, before any kernel is compiled; and a compiled step.
The hook object that Inductor copies, pickles and hashes holds a key only: plans stay outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoremat import _torch
from autoremat.capture import copy_module
from autoremat.storage import find_storages, round_to_allocator
from autoremat.wrapper_memory import Buffers, WrapperMemory, read_wrapper, sizes_by_name

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

WORKSPACE_KEY = "autoremat_workspace_nbytes"

_partitions: dict[str, Partition] = {}


class PartitionerHook(_torch.CustomPartitionerFn):  # type: ignore[misc]
    """What Inductor calls for each joint graph: looks the real partitioner up by its key."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __deepcopy__(self, memo: object) -> PartitionerHook:
        return self

    def uuid(self) -> tuple[str, str]:
        """A key of this process and session: a cached result would come without a report."""
        return ("autoremat", self.key)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        return _partitions[self.key](gm, joint_inputs, **keywords)


def compile_with_partition(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    key: str,
    partition: Partition,
    config: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor, splitting its joint graphs with `partition`."""
    _partitions[key] = partition
    patches = {**config, "custom_partitioner_fn": PartitionerHook(key)}
    compiled: Callable[..., Any] = _torch.compile_fx(module, example_inputs, config_patches=patches)
    return compiled


class _Generated(Exception):
    """Stops a compile once its wrapper's source is there."""


def generated_memory(
    module: fx.GraphModule,
    *,
    is_backward: bool,
    owned: frozenset[str],
    num_visible_outputs: int,
    device: torch.device,
) -> WrapperMemory:
    """What the wrapper that Inductor generates for a module allocates.

    Args:
        module: a forward or backward module as the partitioner returns it; not changed.
        is_backward: which of the two it is.
        owned: names of inputs that the call frees after their last use: saved values that
            nobody else holds. The others count as nothing: they are live anyway.
        num_visible_outputs: leading outputs whose strides the user sees.
        device: the device whose bytes are counted.

    Raises:
        WrapperError: if the generated source cannot be followed.
    """
    module = copy_module(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    output = module.graph.output_node()
    results = pytree.arg_tree_leaves(*output.args)
    output.meta["user_visible_output_idxs"] = [
        i for i in range(min(num_visible_outputs, len(results))) if isinstance(results[i], fx.Node)
    ]
    with _stop_at_source() as seen, contextlib.suppress(_Generated):
        _torch.compile_without_cache(
            module,
            [node.meta["val"] for node in placeholders],
            is_backward=is_backward,
            static_input_idxs=_not_tangents(placeholders) if is_backward else (),
        )
    source, graph = seen[0]
    return read_wrapper(source, _buffers(graph, placeholders, owned, device))


@contextlib.contextmanager
def _stop_at_source() -> Iterator[list[tuple[str, Any]]]:
    """While open, a compile ends with its wrapper's source instead of with kernels."""
    seen: list[tuple[str, Any]] = []

    def stop(graph: Any) -> Any:
        code = graph.codegen()[0]
        seen.append((getattr(code, "value", code), graph))
        raise _Generated

    with _torch.patched_compile_to_module(stop):
        try:
            yield seen
        except Exception:
            if not seen:  # Inductor wraps `_Generated` into an exception of its own
                raise


def _not_tangents(placeholders: Sequence[fx.Node]) -> list[int]:
    return [i for i, node in enumerate(placeholders) if not _torch.is_tangent(node)]


def _buffers(
    graph: Any, placeholders: Sequence[fx.Node], owned: frozenset[str], device: torch.device
) -> Buffers:
    storages = find_storages(placeholders, device)
    counted: set[str] = set()
    input_nbytes: list[int] = []
    input_values: list[int | None] = []
    for node in placeholders:
        value = node.meta["val"]
        symbol = None if isinstance(value, torch.Tensor) else _torch.size_hint(value)
        input_values.append(symbol)
        names = [n for n in storages.of_node[node] if n not in counted]
        if node.name not in owned:
            names = []
        counted.update(names)
        input_nbytes.append(sum(storages.nbytes[n] for n in names))
    workspace = {
        buffer.get_name(): buffer.origin_node.meta.get(WORKSPACE_KEY, 0)
        for buffer in graph.buffers
        if getattr(buffer, "origin_node", None) is not None
    }
    return Buffers(
        input_nbytes=input_nbytes,
        input_values=input_values,
        result_nbytes=sizes_by_name(_torch.inductor_result_nbytes(graph, device)),
        workspace_nbytes=lambda name: workspace.get(name, 0),
        round_nbytes=lambda nbytes: round_to_allocator(nbytes, device),
        device_type=device.type,
    )
