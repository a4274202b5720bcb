"""Inputs of the graph that Inductor lays out anew for convolutions.

Enters: a lowered graph. Leaves: the same, in which the first convolution that reads an image or a
weight makes a copy of it besides. Inductor gives convolutions what they read with the channels
last; what lies in another way is copied in the forward, and the backward is handed that copy. Other
values are made the way they are read. Like `inlining` it is a forecast.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from autoremat_solver import Op, Value
from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.problem.lower import Lowered

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def with_laid_out_inputs(lowered: Lowered, joint: JointGraph) -> Lowered:
    """The same graph, with the copies of its inputs; they are live until the end."""
    if not _torch.prefers_channels_last(joint.module):
        return lowered
    copies: dict[fx.Node, Value] = {}

    def op(known: Op) -> Op:
        node = lowered.node_of[known.name]
        is_convolution = node.target is torch.ops.aten.convolution.default
        read = [source for source in node.args[:2] if isinstance(source, fx.Node)]
        new = {
            source: Value(f"{source.name} with channels last", _nbytes(source))
            for source in (read if is_convolution else ())
            if source not in copies and _is_laid_out_anew(source)
        }
        copies.update(new)
        return replace(known, outputs=(*known.outputs, *(value.name for value in new.values())))

    forward = tuple(map(op, lowered.graph.forward))
    made = {value.name: value for value in copies.values()}
    graph = replace(
        lowered.graph,
        forward=forward,
        values={**lowered.graph.values, **made},
        outputs=(*lowered.graph.outputs, *made),
    )
    return replace(lowered, graph=graph)


def _is_laid_out_anew(source: fx.Node) -> bool:
    value = _torch.fake_value(source)
    if source.op != "placeholder" or not isinstance(value, torch.Tensor):
        return False
    memory_format = CHANNELS_LAST.get(value.dim())
    return memory_format is not None and not value.is_contiguous(memory_format=memory_format)


def _nbytes(source: fx.Node) -> int:
    value = _torch.fake_value(source)
    return _torch.size_hint(value.numel()) * value.element_size()
