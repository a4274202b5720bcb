"""Layers in eager mode that run again in the backward, and save nothing until then.

Enters: the forward of a layer, and what it is given. Leaves: its results. Guarantees: the rerun
computes what the run has, or there is an error: it goes by the layer as that was, has the same
random numbers, and what it is given has not been written into.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoremat import _torch
from autoremat.memory.storage_sizes import tensors_in

_overwritten = WeakSet[nn.Module]()  # layers: what they were given was written into after a run


def may_run_again(layer: nn.Module) -> bool:
    """Whether a layer that runs now can run again in the backward, and compute the same."""
    if not (torch.is_grad_enabled() and _torch.may_drop_saved()) or _torch.checkpoint_region():
        return False
    # cuDNN draws masks from a state of its own, which nobody can put back.
    draws = layer.training and bool(getattr(layer, "dropout", 0))
    is_elsewhere = any(parameter.device.type != "cpu" for parameter in layer.parameters())
    return layer not in _overwritten and not (draws and is_elsewhere)


def run_twice(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer by the forward of its class, now and again in the backward."""
    again: list[nn.Module] = []  # what runs again: others may change the layer until then
    given: list[tuple[torch.Tensor, int]] = []

    def run(*inputs: Any, **named: Any) -> Any:
        if again:
            _require_unwritten(given)
            return forward(again[0], *inputs, **named)
        results = forward(layer, *inputs, **named)
        again.append(_torch.as_it_is(layer))
        tensors = tensors_in([inputs, named, list(layer.parameters())])
        given.extend((tensor, tensor._version) for tensor in tensors if not tensor.is_inference())
        return results

    # By name, a checkpoint would not see what it is given, nor put its device's state back.
    bound = inspect.signature(forward).bind(layer, *args, **kwargs)
    return checkpoint(run, *bound.args[1:], use_reentrant=False, **bound.kwargs)


def _require_unwritten(given: list[tuple[torch.Tensor, int]]) -> None:
    """As autograd has it of what is saved."""
    for tensor, version in given:
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(tensor.shape)}, which a recurrent "
                "layer was given that runs again in the backward, is at version "
                f"{tensor._version}; expected version {version} instead. Write into no input or "
                "parameter of such a layer before the backward has run."
            )


def note_given(layer: nn.Module, results: Any, *given: Any) -> None:
    """See whether what a layer was given is written into before its backward.

    Some layers save copies, of which autograd allows that: they never run again.
    """
    nodes = [node for result in tensors_in(results) if (node := result.grad_fn) is not None]
    if nodes and layer not in _overwritten:
        counters = [_torch.version_counter(one) for one in tensors_in(given)]
        versions = [counter._version for counter in counters]
        check = functools.partial(_note_written, weakref.ref(layer), counters, versions)
        nodes[0].register_prehook(check)


@torch.compiler.disable  # where Dynamo traces a backward
def _note_written(
    layer: weakref.ref[nn.Module],
    counters: list[torch.Tensor],
    versions: list[int],
    _gradients: Any,
) -> None:
    alive = layer()
    if alive is not None and [counter._version for counter in counters] != versions:
        _overwritten.add(alive)
