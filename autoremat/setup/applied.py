"""A training run as it is planned: a copy of the model that holds what the run would hold.

Enters: a model, a batch, an optimizer or its name, a `TrainingSetup`. Leaves: a `Run`, and what was
assumed, in sentences with bytes. Guarantees: nothing of the user's is changed, no memory of the
model's size is taken; a run that is planned as it is keeps the user's own model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.fake_twin import without_contents
from autoremat.memory.optimizer_memory import optimizer_footprint
from autoremat.memory.optimizers import layers_of
from autoremat.memory.window import Window, window_of
from autoremat.setup.adapters import adapt, freeze
from autoremat.setup.asked import AUTOCAST, TrainingSetup
from autoremat.setup.chunked_loss import chunk_loss
from autoremat.setup.optimizers import optimizer_of
from autoremat.setup.sharded import shard
from autoremat.units import format_nbytes

Optimizer = torch.optim.Optimizer | str | None
_NARROW = torch.bfloat16  # what autocast casts to


@dataclass(frozen=True)
class Run:
    """What is planned.

    Attributes:
        model: the user's, or a copy on the meta device that holds what the run would.
        inputs: the batch, positional and by keyword.
        optimizer: of the model's parameters, or None.
        has_gradients: whether gradients exist when the step begins.
        autocast: type to which the forward is under autocast, or None.
        window_nbytes: held by a GPU beside what tensors show, where parameters are divided.
        assumed: one sentence each.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    optimizer: torch.optim.Optimizer | None
    has_gradients: bool = False
    autocast: torch.dtype | None = None
    window_nbytes: int = 0
    assumed: tuple[str, ...] = ()


def run_of(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    optimizer: Optimizer,
    setup: TrainingSetup | None,
    home: torch.device,
) -> Run:
    """The run that a user describes.

    Args:
        model: the user's.
        inputs: the batch.
        optimizer: of the model's parameters, or the name of one.
        setup: beside them; None, and a setup that says nothing, for the model as it is.
        home: where the step would run.

    Raises:
        ValueError: naming what no run can have, or what this model has not.
    """
    if setup is not None and not isinstance(setup, TrainingSetup):
        raise ValueError(
            f"setup is a TrainingSetup, not {type(setup).__name__}: give "
            'autoremat.TrainingSetup(precision="bf16", shards=8), say.'
        )
    if setup is None or setup == TrainingSetup():
        made = optimizer_of(model, optimizer) if isinstance(optimizer, str) else optimizer
        found = Run(model, inputs, made)
        return replace(found, assumed=(*_held(found, home), *_attention(model)))
    if optimizer is not None and not isinstance(optimizer, str):
        raise ValueError(
            f"setup= changes a copy of the model, which this {type(optimizer).__name__} is not an "
            f'optimizer of: give its name, optimizer="{type(optimizer).__name__}".'
        )
    return _set_up(without_contents(model), inputs, optimizer, setup, home)


def _set_up(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    optimizer: str | None,
    setup: TrainingSetup,
    home: torch.device,
) -> Run:
    autocast = _NARROW if setup.precision == AUTOCAST else None
    if setup.precision is not None:
        dtype = torch.float32 if autocast else getattr(torch, setup.precision)
        model, inputs = model.to(dtype), _torch.tree_map(lambda v: _cast(v, dtype), inputs)
    if setup.attention is not None:
        _take_attention(model, setup.attention)
    adapted = adapt(model, setup.lora, setup.lora_rank) if setup.lora else []
    if setup.freeze:
        freeze(model, setup.freeze)
    if setup.loss_chunks > 1:
        chunk_loss(model, setup.loss_chunks)
        _require_labels(model, inputs, setup.loss_chunks)
    divided: list[str] = []
    window_nbytes = 0
    if setup.shards > 1:
        _require_room(model, setup.shards)
        window = window_of(model, autocast)
        window_nbytes = window.nbytes
        divided = [*_divided(setup.shards, window, autocast)]
        shard(model, setup.shards, autocast)
    made = None if optimizer is None else optimizer_of(model, optimizer)
    found = Run(model, inputs, made, setup.accumulate > 1, autocast, window_nbytes)
    sentences = (
        *_held(found, home),
        *divided,
        *_of_adapters(adapted, setup),
        *_of_batches(setup),
        *_attention(model),
    )
    return replace(found, assumed=sentences)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """An input in the type of the parameters, as the user has to hand it over."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
    return made.requires_grad_(value.requires_grad)


def _take_attention(model: Any, name: str) -> None:
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"attention={name!r} is for models of transformers: {type(model).__name__} has no "
            "set_attn_implementation."
        )
    try:
        model.set_attn_implementation(name)
    except Exception as error:
        raise ValueError(
            f"attention={name!r} cannot be had for {type(model).__name__}: {error}"
        ) from error


def _require_labels(
    model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], chunks: int
) -> None:
    args, keywords = inputs
    try:
        given = inspect.signature(model.forward).bind_partial(*args, **keywords).arguments
    except TypeError:
        return  # the call says better what is wrong
    if given.get("labels", given.get("kwargs", {}).get("labels")) is None:
        raise ValueError(
            f"loss_chunks={chunks} is of the loss that the model computes from labels, and its "
            "batch has none: give it labels=, or leave loss_chunks out."
        )


def _require_room(model: nn.Module, shards: int) -> None:
    most = max(p.shape[0] if p.dim() else 1 for p in model.parameters())
    if shards > most:
        raise ValueError(
            f"shards={shards} is more than the {most} rows of the longest parameter: there is "
            "nothing to divide."
        )


# --- sentences -----------------------------------------------------------------------------------


def _held(run: Run, home: torch.device) -> Iterator[str]:
    """Parameters, gradients and the optimizer: bytes of this GPU."""
    parameters = list(run.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    share = f" of {format_nbytes(_nbytes(parameters))}" if len(trained) < len(parameters) else ""
    yield (
        f"parameters take {format_nbytes(_nbytes(parameters))} ({_types(parameters)}); trained are "
        f"{format_nbytes(_nbytes(trained))}{share} ({_types(trained)})"
    )
    when = "are there when the backward begins" if run.has_gradients else "are made by the backward"
    whole = format_nbytes(_nbytes(trained))
    yield f"gradients, in the parameters' types, {when}: {whole} at its end"
    if run.autocast is not None:
        yield (
            f"the forward is under autocast to {_name(run.autocast)}, which casts as on the CPU; "
            "no scaling of the loss"
        )
    layers = layers_of(run.optimizer)
    if not layers:
        yield "no optimizer: no state of one"
        return
    footprint = optimizer_footprint(layers[-1], home if home.type == "cuda" else None)
    state, passing = map(format_nbytes, (footprint.state_nbytes, footprint.transient_nbytes))
    yield (
        f"{type(layers[-1]).__name__} makes {state} of state in its first step, and takes "
        f"{passing} for itself after the backward"
    )


def _divided(shards: int, window: Window, dtype: torch.dtype | None) -> Iterator[str]:
    cast = f" in {_name(dtype)}" if dtype else ""
    yield (
        f"parameters, gradients and the optimizer's state are divided among {shards} GPUs: bytes "
        "are those of one, and so is the batch"
    )
    yield (
        f"held beside are {format_nbytes(window.nbytes)}: the "
        f"largest unit gathered{cast} ({format_nbytes(window.unit_nbytes)}), "
        f"{'another one gathered ahead of it, ' if window.ahead_nbytes else ''}and "
        f"one unit's gradients until they are reduced ({format_nbytes(window.gradients_nbytes)}); "
        "a matrix counts beside them while it is used"
    )
    yield (
        "each use gathers a parameter again, also of the embedding and the head, which are taken "
        "to be wrapped by themselves; gathering and reducing take as long as a copy does"
    )


def _of_adapters(adapted: list[str], setup: TrainingSetup) -> Iterator[str]:
    if adapted:
        yield (
            f"{len(adapted)} linear layers have adapters of rank {setup.lora_rank} in their own "
            f"type, without dropout ({adapted[0]}, ...); all else is frozen"
        )
    if setup.freeze:
        yield f"frozen: {', '.join(setup.freeze)}"


def _of_batches(setup: TrainingSetup) -> Iterator[str]:
    if setup.accumulate > 1:
        yield (
            f"{setup.accumulate} micro-batches of this size for each step of the optimizer; "
            "planned is one after the first, whose gradients are added to those that exist"
        )
    if setup.loss_chunks > 1:
        yield f"the loss is computed in {setup.loss_chunks} parts, each with its own logits"


def _attention(model: Any) -> Iterator[str]:
    """Of a model of transformers, which attention it has."""
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(found, str):
        yield f"attention is transformers' {found!r}"


def _nbytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() * p.dtype.itemsize for p in parameters)


def _types(parameters: Iterable[torch.Tensor]) -> str:
    return ", ".join(dict.fromkeys(_name(p.dtype) for p in parameters)) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
