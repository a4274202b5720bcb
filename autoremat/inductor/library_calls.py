"""What the library calls in a generated wrapper take, in time and inside, measured here.

Enters: the wrapper's source and the layout of its buffers. Leaves: time and bytes of each call.
Inductor lays tensors out anew (channels last, padding), so the operators are run here as the
wrapper calls them, once per distinct call. What cannot run on made-up inputs, or must not since it
communicates or is somebody's own, takes nothing inside, and its time is not known.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping

import torch

from autoremat import _torch
from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, Measured
from autoremat.cost.calls import TensorSpec
from autoremat.cost.grouped import OFFSETS, even_offsets, is_called_grouped
from autoremat.cost.machine import free_nbytes, quiet_execution, settings_key
from autoremat.cost.made_up_inputs import ADMITTED, OPAQUE, made_up
from autoremat.cost.runs import Draw, Run, attempt, peaks_of_runs, time_us
from autoremat.cost.timings import ROUNDS, is_settled
from autoremat.cost.wrapper_calls import layout_of_argument, library_nodes

_SLOW_US = 100_000.0  # such a call is taken once: its time is not of a burst of load
_AGREEMENT = 3.0  # between the two quietest rounds, or the time is not kept
# Beside those of `ADMITTED`, libraries that Inductor calls by operators of their own.
_NAMESPACES = {*ADMITTED, "mkldnn", "mkl", "onednn", "quantized"}


def library_calls(
    function: ast.AST, layout_of: Callable[[str], TensorSpec | None], device: torch.device
) -> dict[str, Measured]:
    """Time, peak and kept bytes of each library call in a wrapper, by the call's text.

    Args:
        function: the wrapper's `call`.
        layout_of: layout of a buffer or input, None for names that are no tensors.
        device: where the wrapper runs.
    """
    calls = {
        ast.unparse(node): _layouts(node, layout_of)
        for node in library_nodes(function)
        if _runs_alone(ast.unparse(node.func))
    }
    key_of = {text: _key(text, layouts, device) for text, layouts in calls.items()}
    with CostCache.open() as cache, quiet_execution({device}):
        known = agreed(set(key_of.values()), Measured)
        stored = cache.read(set(key_of.values()) - known.keys(), Measured)
        draws = {
            key: functools.partial(_draw, text, calls[text], device)
            for text, key in key_of.items()
            if key not in known and key not in stored
        }
        found, sound = _torch.apart_from_profilers(lambda: _measured(draws, device))
        cache.write({key: found[key] for key in sound})
        known |= agree(stored | found | cache.read(found, Measured), Measured)
    return {text: known[key] for text, key in key_of.items() if key in known}


def library_us(function: ast.AST, measured: Mapping[str, Measured]) -> float | None:
    """What all library calls in a wrapper take together; None if that is not known of one."""
    texts = [ast.unparse(node) for node in library_nodes(function)]
    if not measured.keys() >= set(texts):
        return None
    total_us = math.fsum(measured[text].time_us for text in texts)
    return None if math.isnan(total_us) else total_us


def _measured(
    draws: Mapping[str, Draw], device: torch.device
) -> tuple[dict[str, Measured], set[str]]:
    """What runs, by key, and of which the times agree."""
    rounds: dict[str, list[float]] = {key: [] for key in draws}
    todo = dict(draws)
    for _ in range(ROUNDS):  # which lie apart: load comes in bursts
        for key, draw in list(todo.items()):
            found = attempt(draw, functools.partial(time_us, device=device))
            if found is not None:
                rounds[key].append(found)
            if found is None or found > _SLOW_US or is_settled(rounds[key]):
                del todo[key]
    taken = {key: sorted(times) for key, times in rounds.items() if times}
    peaks = peaks_of_runs({key: draws[key] for key in taken}, device)
    sound = {key for key in peaks if taken[key][:2][-1] <= _AGREEMENT * taken[key][0]}
    return {key: Measured(taken[key][0], *both) for key, both in peaks.items()}, sound


def _runs_alone(name: str) -> bool:
    """Whether a function may run on made-up inputs: it neither communicates nor asserts."""
    is_admitted = (
        not name.startswith("torch.ops.")
        or name.split(".")[2] in _NAMESPACES
        or is_called_grouped(name)
    )
    return is_admitted and not any(part in name for part in (*OPAQUE, "_assert"))


def _layouts(
    node: ast.Call, layout_of: Callable[[str], TensorSpec | None]
) -> dict[str, TensorSpec]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return {name: layout for name in sorted(names) if (layout := layout_of(name))}


def _key(text: str, layouts: Mapping[str, TensorSpec], device: torch.device) -> str:
    """Equal for calls that differ in the names of their buffers only, or in which GPU of a host."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in layouts:
            node.id = repr(layouts[node.id])
    key = f"wrapper call|{ast.unparse(tree)}|{settings_key(device)}"
    return re.sub(r", index=\d+", "", key)


def _draw(text: str, layouts: Mapping[str, TensorSpec], device: torch.device) -> Run:
    """The call on made-up inputs, where they leave most of the device's memory free."""
    taken_nbytes = sum(layout.span_nbytes for layout in layouts.values())
    if taken_nbytes > free_nbytes(device) // 3:
        raise MemoryError(f"{text} is too large to be run beside the model")
    code = compile(text, "<wrapper>", "eval")
    names = _torch.wrapper_namespace()
    names.update({name: made_up(layout, unit=True) for name, layout in layouts.items()})
    names.update(group_ends(text, layouts))
    return lambda: eval(code, names)


def group_ends(text: str, layouts: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Where groups end that a call could be given, by the name of that; none if it has no groups.

    Raises:
        ValueError: if it has, and what it is given is not read: on other values it would do
            nothing, or harm.
    """
    call = ast.parse(text, mode="eval").body
    if not (isinstance(call, ast.Call) and is_called_grouped(ast.unparse(call.func))):
        return {}
    layout_of = layouts.get
    found = [layout_of_argument(node, layout_of) for node in call.args[: OFFSETS + 1]]
    left, right, ends = (*found, None, None, None)[: OFFSETS + 1]
    if left and right and len(left.shape) == len(right.shape) == 3:
        return {}  # as many products as there are matrices
    name = call.args[OFFSETS] if len(call.args) > OFFSETS else None
    if not (left and right and ends and isinstance(name, ast.Name)):
        raise ValueError(f"nobody knows what groups {text} could have")
    return {name.id: even_offsets(ends, left.shape, right.shape)}
