"""A model's repeated layers, and checkpoints around them as users write by hand.

Enters: a model and its batch. Leaves: the same model, whose layers (or runs of several) are
replaced in place by modules that save their inputs only. Guarantees: a model whose layers do not
simply follow each other is refused where several are to share a checkpoint, since their joint
call would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autoremat import _torch
from autoremat.comparison.variants import segment_length

Contexts = Callable[[], Any]

_SAVED_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
)


class NotApplicable(Exception):
    """The model has no layers of the kind that a strategy needs; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a layer hangs in a model."""

    parent: nn.Module
    name: str
    path: str

    @property
    def layer(self) -> nn.Module:
        """What hangs there now."""
        return self.parent.get_submodule(self.name)

    def put(self, module: nn.Module) -> None:
        """Hang another module there."""
        setattr(self.parent, self.name, module)


def repeated_layers(model: nn.Module) -> list[list[Place]]:
    """Runs of at least two neighbours of one class in a `ModuleList` or `Sequential`.

    Only the outermost, since a layer may hold lists of its own, and only those of layers that have
    parts, if there are any.
    """
    runs = list(_runs(model, ""))
    composite = [run for run in runs if any(True for _ in run[0].layer.children())]
    return composite or runs


def _runs(module: nn.Module, path: str) -> Iterator[list[Place]]:
    children = [
        (Place(module, name, f"{path}{name}"), child) for name, child in module.named_children()
    ]
    taken: set[str] = set()
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for _, group in groupby(children, key=lambda pair: type(pair[1])):
            run = [place for place, child in group if any(True for _ in child.parameters())]
            if len(run) > 1:
                taken |= {place.name for place in run}
                yield run
    for place, child in children:
        if place.name not in taken:
            yield from _runs(child, f"{place.path}.")


def checkpoint_layers(
    model: nn.Module,
    run_once: Callable[[], object],
    *,
    segment: int = 1,
    selective: bool = False,
) -> None:
    """Put the repeated layers of a model under checkpoints, in place.

    Args:
        model: whose layers are found by `repeated_layers`.
        run_once: one forward of the model, which shows how its layers follow each other.
        segment: layers in one checkpoint; 0 takes the square root of a run's length.
        selective: save matrix products, convolutions and attention; recompute what is between.

    Raises:
        NotApplicable: if there are no such layers, or they cannot share a checkpoint.
    """
    runs = repeated_layers(model)
    if not runs:
        raise NotApplicable("no repeated layers found")
    contexts = selective_contexts if selective else None
    segments = [part for run in runs for part in _parts(run, segment)]
    calls = _observed(segments, run_once) if any(len(part) > 1 for part in segments) else {}
    for part in segments:
        _put_under_checkpoint(part, calls, contexts)


def checkpoint_module(model: nn.Module, path: str) -> None:
    """Put one submodule under a checkpoint, in place."""
    parent, _, name = path.rpartition(".")
    place = Place(model.get_submodule(parent), name, path)
    place.put(Checkpointed(place.layer))


def selective_contexts() -> Any:
    """What `checkpoint` needs to save the expensive operations only."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    saved = operation in _SAVED_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _parts(run: list[Place], segment: int) -> Iterator[list[Place]]:
    length = segment_length(segment, len(run))
    return (run[start : start + length] for start in range(0, len(run), length))


def _put_under_checkpoint(
    part: list[Place], calls: dict[str, _Call], contexts: Contexts | None
) -> None:
    head, *rest = part
    layers = [place.layer for place in part]
    if rest:
        results = {_shape_of_result(calls.get(place.path), place) for place in part}
        if len(results) > 1:
            raise NotApplicable(f"{head.path} and its neighbours return different things")
        for one, other in pairwise(part):
            _require_handed_on(one, other, calls)
        (count,) = results
        head.put(Checkpointed(layers[0], Chain(layers), contexts))
        for place, layer in zip(rest, layers[1:], strict=True):
            place.put(HandedOn(layer, count))
    else:
        head.put(Checkpointed(layers[0], None, contexts))


# --- how layers follow each other ----------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """What a layer was called with, and what it returned."""

    args: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


def _observed(
    segments: Sequence[Sequence[Place]], run_once: Callable[[], object]
) -> dict[str, _Call]:
    """The calls of one forward, by path; a layer that is called twice or never has none."""
    seen: dict[str, list[_Call]] = {place.path: [] for part in segments for place in part}

    def record(
        path: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        seen[path].append(_Call(args, keywords, output))

    hooks = [
        place.layer.register_forward_hook(partial(record, place.path), with_kwargs=True)
        for part in segments
        for place in part
    ]
    try:
        with torch.no_grad():
            run_once()
    finally:
        for hook in hooks:
            hook.remove()
    return {path: calls[0] for path, calls in seen.items() if len(calls) == 1}


def _shape_of_result(call: _Call | None, place: Place) -> int | None:
    """None for a tensor, or the length of a tuple of which only the first holds anything."""
    if call is None:
        raise NotApplicable(f"{place.path} is not called exactly once in a forward")
    if isinstance(call.output, torch.Tensor):
        return None
    if type(call.output) is tuple and call.output:
        first, *others = call.output
        if isinstance(first, torch.Tensor) and all(other is None for other in others):
            return len(call.output)
    raise NotApplicable(f"{place.path} returns more than one tensor")


def _require_handed_on(one: Place, other: Place, calls: dict[str, _Call]) -> None:
    """The other layer reads what the one returned, and all else as the one did."""
    first, second = calls[one.path], calls[other.path]
    result = first.output if isinstance(first.output, torch.Tensor) else first.output[0]
    follows = bool(first.args and second.args) and second.args[0] is result
    if not (
        follows and _same((first.args[1:], first.keywords), (second.args[1:], second.keywords))
    ):
        raise NotApplicable(
            f"between {one.path} and {other.path} the model does more than hand a result on, so "
            "they cannot share one checkpoint"
        )


def _same(one: Any, other: Any) -> bool:
    mine, theirs = _torch.tree_leaves(one), _torch.tree_leaves(other)
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return isinstance(one, bool | int | float | str) and type(one) is type(other) and one == other


# --- what takes the layers' places ---------------------------------------------------------------


class _InPlaceOf(nn.Module):
    """A module in a layer's place; the layer's attributes stay reachable."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        """Fall back to the layer, for models that read attributes of their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


class Checkpointed(_InPlaceOf):
    """Runs a layer, or a chain that begins with it, and saves only its inputs."""

    def __init__(
        self,
        wrapped: nn.Module,
        chain: nn.Module | None = None,
        contexts: Contexts | None = None,
    ) -> None:
        """Take the layer's place."""
        super().__init__(wrapped)
        # In a tuple it is no submodule: the other layers keep their names where they hang.
        self.run = (wrapped if chain is None else chain,)
        self.contexts = contexts

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """What the layer, or the chain's last one, returns."""
        if self.contexts is not None:  # Dynamo refuses torch's own default if it is passed
            keywords["context_fn"] = self.contexts
        return checkpoint(self.run[0], *args, use_reentrant=False, **keywords)


class Chain(nn.Module):
    """Layers that read each other's result."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Keep the layers in their order."""
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any, *args: Any, **keywords: Any) -> Any:
        """What the last one returns."""
        output = None
        for layer in self.layers:
            output = layer(x, *args, **keywords)
            x = output[0] if isinstance(output, tuple) else output
        return output


class HandedOn(_InPlaceOf):
    """In the place of a layer that has run in an earlier one's checkpoint: hands its input on."""

    def __init__(self, wrapped: nn.Module, count: int | None) -> None:
        """Take the layer's place; `count` is the length of the tuple that it returns, if any."""
        super().__init__(wrapped)
        self.count = count

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """The input, as the layer returns its result."""
        return x if self.count is None else (x, *[None] * (self.count - 1))
