"""What Inductor lays out anew for convolutions.

Enters: a lowered graph. Leaves: the same, in which the first convolution that reads an image or a
weight makes a copy of it besides; and calls as they are then made. Inductor gives convolutions of
images what they read with the channels last; what comes in another way is copied in the forward.
The backward is handed the copy in place of the input that it would read; a copy that it does not
read ends with the convolution. Other values are made the way they are read. Like `inlining` it is a
forecast, a little too high: what the backward is handed counts until it ends, and once more where
the convolution is repeated.
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


def with_laid_out_inputs(lowered: Lowered, joint: JointGraph) -> Lowered:
    """The same graph, with the copies of its inputs."""
    if not _torch.prefers_channels_last(joint.forward):
        return lowered
    copies: dict[str, Value] = {}

    def op(known: Op) -> Op:
        node = lowered.node_of[known.name]
        read = dict.fromkeys(node.args[:2]) if node.target is aten.convolution.default else ()
        found = {source: _laid_out_anew(source) for source in read if isinstance(source, fx.Node)}
        kept: list[str] = []
        workspace_nbytes = known.workspace_nbytes
        for source, spec in found.items():
            if spec is None:
                continue
            (storage,) = lowered.storages.of_node[source]
            name, nbytes = f"{storage}{LAID_OUT}", math.prod(spec.shape) * spec.dtype.itemsize
            if not any(user in joint.backward for user in source.users):
                workspace_nbytes += nbytes
            elif name not in copies:
                copies[name] = Value(name, nbytes)
                kept.append(name)
        return replace(known, outputs=(*known.outputs, *kept), workspace_nbytes=workspace_nbytes)

    forward = tuple(map(op, lowered.graph.forward))
    graph = replace(
        lowered.graph,
        forward=forward,
        values={**lowered.graph.values, **copies},
        outputs=(*lowered.graph.outputs, *copies),
    )
    return replace(lowered, graph=graph)


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
