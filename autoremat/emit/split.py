"""The forward and the backward module of a rewritten joint graph.

Enters: a `Rewritten` joint graph. Leaves: two graph modules that keep AOTAutograd's contract for
outputs and saved values. Guarantees: the backward computes forward values only where the plan
says so, and every output is the joint graph's, of the same random draws (else `PartitionError`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoremat import _torch
from autoremat.emit.equivalence import first_difference
from autoremat.emit.rewrite import Rewritten


class PartitionError(RuntimeError):
    """The two modules do not follow the plan. A defect of autoremat, never of the user."""


def partition(
    rewritten: Rewritten, *, num_fwd_outputs: int, overwritten: Collection[str] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a rewritten joint graph.

    Args:
        rewritten: the graph.
        num_fwd_outputs: how many of its outputs belong to the forward.
        overwritten: names of inputs that the forward overwrites.

    Raises:
        PartitionError: if the backward would compute something that the plan saved, read an input
            after the forward has overwritten it, or if an output is not the joint graph's.
    """
    forward, backward = _torch.extract_forward_and_backward(
        rewritten.module, rewritten.saved, num_fwd_outputs=num_fwd_outputs
    )
    _drop_unread(forward, _tagged_backward(forward))
    in_forward = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    _drop_unread(backward, in_forward)
    for node in backward.graph.nodes:
        if _makes_tensors(node) and node.name in in_forward:
            raise PartitionError(
                f"{node.name} runs in the forward and, unplanned, in the backward."
            )
    require_unread(backward, overwritten)
    difference = first_difference(rewritten.source, forward, backward, num_fwd_outputs)
    if difference is not None:
        raise PartitionError(difference)
    return _torch.thread_rng_states(forward, backward)


def _tagged_backward(forward: fx.GraphModule) -> set[str]:
    """Names of operations in the forward that are tagged as the backward's."""
    calls = [node for node in forward.graph.nodes if node.op == "call_function"]
    return {node.name for node in calls if _torch.traced_in_backward(node)}


def _drop_unread(module: fx.GraphModule, names: Collection[str]) -> None:
    """Take out what belongs into the other part and is read by nobody here.

    Torch leaves what it takes for impure in both parts, and with it what that reads: the forward's
    assertions, and recomputed attention, which might draw random numbers.
    """
    for node in reversed(module.graph.nodes):
        if node.name in names and not node.users:
            module.graph.erase_node(node)
    module.recompile()


def require_unread(backward: fx.GraphModule, overwritten: Collection[str]) -> None:
    """Refuse a backward that reads an input after the forward has overwritten it.

    Raises:
        PartitionError: naming the input and a reader.
    """
    for node in backward.graph.find_nodes(op="placeholder"):
        readers = [user for user in node.users if user.target is not torch.ops.aten.copy_.default]
        if node.name in overwritten and readers:
            raise PartitionError(f"{readers[0].name} reads {node.name} after it is overwritten.")


def _makes_tensors(node: fx.Node) -> bool:
    """Symbols and assertions on them take no memory and may stand in both parts."""
    return node.op == "call_function" and bool(_torch.tensor_leaves(_torch.fake_value(node)))
