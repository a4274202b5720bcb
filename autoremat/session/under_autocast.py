"""A graph as it would be under autocast: for the figures of advice, once somebody asks for them.

Enters: a graph as Dynamo handed it over, and its state without autocast. Leaves: its state under
autocast to bfloat16. Guarantees: nothing is compiled, measured or agreed upon by ranks, so that a
report of one of them may ask; what an operation takes for itself is taken to be what it takes as it
is, a cast to take nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.cost.calls import FREE
from autoremat.elsewhere.moved import moved_to
from autoremat.elsewhere.present import DEVICE
from autoremat.explain.advice import Narrowed
from autoremat.explain.narrow_step import images
from autoremat.graph.gathering import mark_gathered
from autoremat.inductor.hook import configured
from autoremat.planning.pipeline import graph_of, state
from autoremat.problem.lower import shell_of
from autoremat.problem.subject import Subject
from autoremat.session.capturing import Capturing
from autoremat.session.code import TracedOnly

_NARROW = torch.bfloat16


def narrowed_by(graph: _torch.DynamoGraph, options: Options) -> Narrowed:
    """What states a graph under autocast.

    Args:
        graph: as Dynamo has handed it over; it may be the one that is being compiled.
        options: what the session was asked for.
    """
    return functools.partial(_narrowed, graph, options)


def _narrowed(graph: _torch.DynamoGraph, options: Options, before: Subject) -> Subject:
    setting = options.setting

    def stated(
        module: fx.GraphModule, num_fwd_outputs: int, static: Sequence[int] | None
    ) -> Subject:
        mark_gathered(module)
        seen = moved_to(module, DEVICE) if setting.stands_in else module
        with _torch.sizes_as(before.sizes):
            found = graph_of(
                seen, before.device, num_fwd_outputs=num_fwd_outputs, static_indices=static
            )
            around = before.lowered.shell
            shell = shell_of(
                found.joint,
                found.storages,
                resident_nbytes=around.resident_nbytes,
                optimizer_nbytes=around.optimizer_nbytes,
            )
            costs = dict.fromkeys(found.joint.nodes, FREE)
            for old, new in images(before.joint, found.joint):
                costs[new] = before.costs.get(old, FREE)
            after = state(found, shell, setting, is_first=False, costs=costs)
        return replace(after, sizes=before.sizes)

    tracing = TracedOnly(stated)
    capturing = Capturing(options, runs=False)
    place = "cpu" if setting.stands_in else before.device.type
    with configured(options.inductor), graph.resumed(), torch.autocast(place, _NARROW):
        return tracing.run(
            functools.partial(capturing.compile, graph.copy(), graph.inputs, tracing)
        )
