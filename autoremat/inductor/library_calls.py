"""What the library calls in a generated wrapper take inside, measured on the device at hand.

Enters: the wrapper's source and the layout of its buffers. Leaves: bytes for each call's text.
Inductor lays tensors out anew (channels last, padding), so the operators are run here as the
wrapper calls them, once per distinct call; what cannot run on made-up inputs counts as nothing.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from autoremat import _torch
from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, Measured
from autoremat.cost.calls import TensorSpec
from autoremat.cost.machine import quiet_execution, settings_key
from autoremat.cost.made_up_inputs import OPAQUE
from autoremat.cost.runs import peaks_of_runs

_LIBRARIES = ("torch.ops.", "extern_kernels.", "aten.")


def library_workspaces(
    function: ast.AST, layout_of: Callable[[str], TensorSpec | None], device: torch.device
) -> dict[str, Measured]:
    """Peak and kept bytes of each library call in a wrapper, by the call's text.

    Args:
        function: the wrapper's `call`.
        layout_of: layout of a buffer or input, None for names that are no tensors.
        device: where the wrapper runs.
    """
    calls = dict(_calls(function, layout_of))
    key_of = {text: _key(text, layouts, device) for text, layouts in calls.items()}
    with CostCache.open() as cache, quiet_execution({device}):
        known = agreed(set(key_of.values()), Measured)
        stored = cache.read(set(key_of.values()) - known.keys(), Measured)
        draws = {
            key: functools.partial(_draw, text, calls[text])
            for text, key in key_of.items()
            if key not in known and key not in stored
        }
        found = {k: Measured(0.0, *both) for k, both in peaks_of_runs(draws, device).items()}
        cache.write(found)
        known |= agree(stored | found | cache.read(found, Measured), Measured)
    return {text: known[key] for text, key in key_of.items() if key in known}


def _calls(
    function: ast.AST, layout_of: Callable[[str], TensorSpec | None]
) -> Iterator[tuple[str, Mapping[str, TensorSpec]]]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        function_name = ast.unparse(node.func)
        if not function_name.startswith(_LIBRARIES) or any(p in function_name for p in OPAQUE):
            continue
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        layouts = {name: layout for name in sorted(names) if (layout := layout_of(name))}
        yield ast.unparse(node), layouts


def _key(text: str, layouts: Mapping[str, TensorSpec], device: torch.device) -> str:
    """Equal for calls that differ in the names of their buffers only."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in layouts:
            node.id = repr(layouts[node.id])
    return f"wrapper|{ast.unparse(tree)}|{settings_key(device)}"


def _draw(text: str, layouts: Mapping[str, TensorSpec]) -> Callable[[], object]:
    """The call on made-up inputs."""
    code = compile(text, "<wrapper>", "eval")
    names = _torch.wrapper_namespace()
    names.update({name: _tensor(layout) for name, layout in layouts.items()})
    return lambda: eval(code, names)


def _tensor(layout: TensorSpec) -> torch.Tensor:
    """Random numbers, or zeros, which are valid as indices."""
    tensor = torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
    )
    if layout.dtype.is_floating_point:
        return tensor.uniform_(0.1, 1.0)
    return tensor.zero_()
