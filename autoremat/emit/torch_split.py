"""A joint graph split by torch's own partitioner: what runs where no plan of ours can.

Enters: a joint graph. Leaves: a forward and a backward module. Guarantees: the backward reads no
input that the forward overwrites, and draws no random number again without the state or the seed
of its first run.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import fx

from autoremat import _torch
from autoremat.errors import FallbackError
from autoremat.fallbacks import fallback
from autoremat.graph.joint_graph import copy_module, prepare
from autoremat.graph.random_draws import drawn_again, keep_draws

Modules = tuple[fx.GraphModule, fx.GraphModule]


def split_as_torch(
    module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    op_by_op: bool,
    replays_seeds: bool,
    graph: str,
) -> Modules:
    """Torch's own split, with every draw saved where torch would draw again.

    Args:
        module: the joint graph; it may be changed.
        joint_inputs: its inputs.
        num_fwd_outputs: how many of its outputs belong to the forward.
        op_by_op: whether the modules run operation by operation, not by Inductor.
        replays_seeds: whether Inductor's code may draw again from a seed.
        graph: its name in messages.

    Raises:
        FallbackError: if the backward would draw again all the same.
    """
    with contextlib.suppress(Exception):  # as it is, where even cleaning it fails
        joint = prepare(module, num_fwd_outputs=num_fwd_outputs, static_indices=None)
        if joint.overwritten:
            module = joint.module

    def split(given: fx.GraphModule) -> Modules:
        if op_by_op:
            with _torch.activation_memory_budget(1.0):  # below, torch draws again [pytorch#190758]
                return _torch.default_partition(
                    given, joint_inputs, num_fwd_outputs=num_fwd_outputs
                )
        return _torch.min_cut(given, num_fwd_outputs=num_fwd_outputs)

    kept = copy_module(module)
    if not (op_by_op or replays_seeds):
        keep_draws(module)
    forward, backward = split(module)
    if drawn_again(forward, backward) is None:
        return forward, backward
    keep_draws(kept, unseeded=True)
    forward, backward = split(kept)
    again = drawn_again(forward, backward)
    if again is not None:
        raise FallbackError.of(fallback("AR111", graph=graph, node=again))
    return forward, backward
