"""What Inductor lays out anew for convolutions.

Enters: a lowered graph. Leaves: the same, with the copies. Inductor gives convolutions of images
what they read with the channels last. An image or a weight that comes in another way is copied by
the first convolution that reads it; the backward is handed the copy in place of the input that it
would read, and a copy that it does not read ends with the convolution. What a loop makes by groups
of channels is copied where a convolution reads it as an image. Other values are made the way they
are read. Like `inlining` it is a forecast, a little too high: what the backward is handed counts
until it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from autoremat_solver import Op, Value
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import Call, TensorSpec, tensor_spec
from autoremat.graph.joint_graph import JointGraph
from autoremat.problem.lower import Lowered

aten = torch.ops.aten

IMAGE_DIMENSIONS = 4  # batch, channels, height and width

_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})

LAID_OUT = " with channels last"
"""What follows the name of an input's storage in the name of the copy."""


def with_copies(lowered: Lowered, joint: JointGraph) -> Lowered:
    """The same graph, with what is copied for convolutions."""
    if not _torch.prefers_channels_last(joint.forward):
        return lowered
    storages, graph = lowered.storages, lowered.graph
    copies: dict[str, Value] = {}

    def op(known: Op) -> Op:
        node = lowered.node_of[known.name]
        kept: list[str] = []
        workspace_nbytes = known.workspace_nbytes
        for source, spec in _copied_inputs(node).items():
            (storage,) = storages.of_node[source]
            name, nbytes = f"{storage}{LAID_OUT}", math.prod(spec.shape) * spec.dtype.itemsize
            if not any(user in joint.backward for user in source.users):
                workspace_nbytes += nbytes
            elif name not in copies:
                copies[name] = Value(name, nbytes)
                kept.append(name)
        return replace(known, outputs=(*known.outputs, *kept), workspace_nbytes=workspace_nbytes)

    forward, backward = (tuple(map(op, ops)) for ops in (graph.forward, graph.backward))
    values, outputs = {**graph.values, **copies}, (*graph.outputs, *copies)
    found = replace(graph, forward=forward, backward=backward, values=values, outputs=outputs)
    return replace(lowered, graph=found)


def _copied_inputs(node: fx.Node) -> dict[fx.Node, TensorSpec]:
    """What is copied of what a convolution of the forward reads, and how it lies."""
    read = dict.fromkeys(node.args[:2]) if node.target is aten.convolution.default else ()
    found = {source: _laid_out_anew(source) for source in read if isinstance(source, fx.Node)}
    return {source: spec for source, spec in found.items() if spec is not None}


def as_laid_out(call: Call) -> Call:
    """A convolution as Inductor calls it: images and weights with the channels last."""
    if call.target not in _CONVOLUTIONS:
        return call
    args, outputs = ((*map(_with_channels_last, specs),) for specs in (call.args, call.outputs))
    return replace(call, args=args, outputs=outputs)


def _with_channels_last(value: Any) -> Any:
    if not isinstance(value, TensorSpec) or len(value.shape) != IMAGE_DIMENSIONS:
        return value
    like = torch.empty(value.shape, device="meta").to(memory_format=torch.channels_last)
    return replace(value, stride=like.stride())


def laid_out_nbytes(values: Iterable[Value]) -> int:
    """Of values, the bytes of copies that cross to the backward."""
    return sum(value.nbytes for value in values if value.name.endswith(LAID_OUT))


def _laid_out_anew(source: fx.Node) -> TensorSpec | None:
    """How an input lies that is copied; in numbers, since asking sizes that vary guards them."""
    value = _torch.fake_value(source)
    is_image = isinstance(value, torch.Tensor) and value.dim() == IMAGE_DIMENSIONS
    if source.op != "placeholder" or not is_image:
        return None
    spec = tensor_spec(value)
    like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return None if like.is_contiguous(memory_format=torch.channels_last) else spec
