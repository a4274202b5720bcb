"""Parameters that are divided among GPUs, in a graph that one of them runs.

Enters: shards. Leaves: two operators: `gather` makes a parameter from its shards, and its backward,
`scatter`, leaves of a gradient this GPU's share. Guarantees: nothing communicates: they state what
is allocated, for graphs that do not run. A gathered parameter is not kept: each use gathers it
again, as where FSDP reshards after the forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autoremat import _torch


@torch.library.custom_op("autoremat::gather", mutates_args=())
def gather(shard: Tensor, size: list[int]) -> Tensor:
    """A whole parameter from the shard that this GPU holds, one-dimensional and padded."""
    raise RuntimeError("autoremat::gather stands for communication in plans; it does not run.")


@gather.register_fake
def _(shard: Tensor, size: list[int]) -> Tensor:
    return shard.new_empty(size)


@torch.library.custom_op("autoremat::scatter", mutates_args=())
def scatter(gradient: Tensor, numel: int) -> Tensor:
    """This GPU's share of a gradient, summed over all of them."""
    raise RuntimeError("autoremat::scatter stands for communication in plans; it does not run.")


@scatter.register_fake
def _(gradient: Tensor, numel: int) -> Tensor:
    return gradient.new_empty(numel)


def _note_share(ctx: Any, inputs: tuple[Tensor, list[int]], output: Tensor) -> None:
    ctx.numel = inputs[0].numel()


def _scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return scatter(gradient, ctx.numel), None


gather.register_autograd(_scatter_gradient, setup_context=_note_share)


def is_gather(node: fx.Node) -> bool:
    """Whether a node makes a whole parameter from a shard."""
    return node.target is torch.ops.autoremat.gather.default


def mark_gathered(module: fx.GraphModule) -> None:
    """Let no partition of a joint graph keep gathered parameters for the backward."""
    for node in module.graph.find_nodes(
        op="call_function", target=torch.ops.autoremat.gather.default
    ):
        _torch.set_recompute_policy(node, _torch.CheckpointPolicy.MUST_RECOMPUTE)
