"""What the library calls in a generated wrapper take, in time and inside, measured here.

Enters: the wrapper's source and the layout of its buffers. Leaves: time and bytes of each call.
Inductor lays tensors out anew (channels last, padding), so the operators are run here as the
wrapper calls them, once per distinct call; what cannot run on made-up inputs counts as nothing.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from autoremat import _torch
from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, Measured
from autoremat.cost.calls import TensorSpec
from autoremat.cost.machine import quiet_execution, settings_key
from autoremat.cost.made_up_inputs import OPAQUE
from autoremat.cost.runs import Draw, attempt, peaks_of_runs, time_us

_ROUNDS = 3
_LIBRARIES = ("torch.ops.", "extern_kernels.", "aten.")


def library_calls(
    function: ast.AST, layout_of: Callable[[str], TensorSpec | None], device: torch.device
) -> dict[str, Measured]:
    """Time, peak and kept bytes of each library call in a wrapper, by the call's text.

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
        taken = _times(draws, device)
        peaks = peaks_of_runs({key: draws[key] for key in taken}, device)
        found = {key: Measured(taken[key], *both) for key, both in peaks.items()}
        cache.write(found)
        known |= agree(stored | found | cache.read(found, Measured), Measured)
    return {text: known[key] for text, key in key_of.items() if key in known}


def library_us(function: ast.AST, measured: Mapping[str, Measured]) -> float:
    """What all library calls in a wrapper take together."""
    texts = (ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Call))
    return math.fsum(measured[text].time_us for text in texts if text in measured)


def _times(draws: Mapping[str, Draw], device: torch.device) -> dict[str, float]:
    """Of the quietest of a few rounds, which lie apart: load comes in bursts."""
    taken: dict[str, float] = {}
    for _ in range(_ROUNDS):
        for key, draw in draws.items():
            found = attempt(draw, functools.partial(time_us, device=device))
            if found is not None:
                taken[key] = min(found, taken.get(key, found))
    return taken


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
    return f"wrapper call|{ast.unparse(tree)}|{settings_key(device)}"


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
