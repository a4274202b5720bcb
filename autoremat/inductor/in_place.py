"""What the loops take that Inductor generates: no workspace, and what they read for their results.

Enters: a lowered graph. Leaves: the same, whose operations say which of their inputs their results
may take the memory of, and whose loops have no workspace: what was measured is that of torch's own
kernel. A loop that reads each element where it leaves the result of it may do both in the same
memory, once nobody else reads what was there. Inductor does so where both have one type and size,
also with the saved values that AOTAutograd donates to the backward, unless the user's configuration
has no writes in place or no donation. Like `inlining` it is a forecast: what counts is what
`wrapper` reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from autoremat_solver import Op, Phase
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import TensorSpec, tensor_spec
from autoremat.inductor.inlining import is_by_element, is_fusible
from autoremat.problem.lower import Lowered


def as_loops(lowered: Lowered) -> Lowered:
    """The same graph, in which loops write over what they are the last to read.

    What comes in as a gradient is the caller's; so is what the forward made if it is not donated.
    """
    graph = lowered.graph
    made = {name for known in graph.forward for name in known.outputs}
    others = {*lowered.shell.tangents, *(() if _torch.donates_saved_values() else made)}
    may_write = _torch.writes_in_place()

    def op(known: Op) -> Op:
        node = lowered.node_of[known.name]
        is_loop = may_write and is_by_element(node) and _is_strided(_torch.fake_value(node))
        found = _read_in_place(lowered, node, known.inputs) if is_loop else ()
        own = (name for name in found if known.phase is Phase.FORWARD or name not in others)
        is_generated = is_fusible(node) or _torch.generates_loops(node.target)
        workspace_nbytes = 0 if is_generated else known.workspace_nbytes
        overwrites = tuple(dict.fromkeys(own))
        return replace(known, workspace_nbytes=workspace_nbytes, overwrites=overwrites)

    forward, backward = (tuple(map(op, ops)) for ops in (graph.forward, graph.backward))
    return replace(lowered, graph=replace(graph, forward=forward, backward=backward))


def _read_in_place(lowered: Lowered, result: fx.Node, reads: Collection[str]) -> Iterator[str]:
    """Storages of which a node reads each element where it leaves the result of that."""
    storages = lowered.storages
    sizes = {storages.nbytes[name] for name in storages.made_by[result]}
    spec = tensor_spec(_torch.fake_value(result))
    seen: set[fx.Node] = set()
    waiting = list(result.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source in seen or not _lies_like(source, spec):
            continue
        seen.add(source)
        names = storages.of_node[source]
        if len(names) == 1 and names[0] in reads:
            yield from (name for name in names if storages.nbytes[name] in sizes)
        elif source in lowered.derived and (is_by_element(source) or not storages.made_by[source]):
            waiting += source.all_input_nodes  # computed on the way


def _is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _lies_like(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether a node has elements of one type in the same places."""
    value = _torch.fake_value(node)
    if not _is_strided(value):
        return False
    own = tensor_spec(value)
    if (own.dtype, own.device) != (spec.dtype, spec.device):
        return False
    if (own.shape, own.stride) == (spec.shape, spec.stride):
        return True
    is_as_long = math.prod(own.shape) == math.prod(spec.shape)
    return is_as_long and own.is_contiguous and spec.is_contiguous
