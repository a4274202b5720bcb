"""A graph that was handed over, stated beside what its step holds.

Enters: a graph, and what is held whatever its plan. Leaves: a `Subject`, and bytes of what code
before the graph holds that no plan of an earlier graph counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.graph.collectives import late_nbytes
from autoremat.memory.residents import Resident
from autoremat.memory.storage_sizes import rounded_nbytes
from autoremat.planning.part import Part
from autoremat.planning.pipeline import Graph, state
from autoremat.problem.lower import shell_of
from autoremat.problem.subject import Subject
from autoremat.session.steps import Steps
from autoremat.watch.eager_code import held_nbytes


def stated(
    graph: Graph, setting: Setting, resident: Resident, between_nbytes: int, *, is_first: bool
) -> Subject:
    """A graph of a step.

    Args:
        graph: the graph.
        setting: how it is planned.
        resident: what the step holds whatever the plan.
        between_nbytes: what code before the graph holds.
        is_first: whether it is the first one of its step that is planned.
    """
    shell = shell_of(
        graph.joint,
        graph.storages,
        resident_nbytes=resident.nbytes + between_nbytes,
        optimizer_nbytes=resident.transient_nbytes,
    )
    return state(graph, shell, setting, is_first=is_first)


def grown_nbytes(graph: Graph) -> int:
    """What the batch takes more at the sizes that are planned for than as it is."""
    storages = graph.storages
    handed_in = {n for node in graph.joint.primals for n in storages.of_node[node]}
    now_nbytes = {}
    with _torch.sizes_as({}):
        for name in handed_in:
            size = _torch.size_hint(storages.sizes[name])
            now_nbytes[name] = rounded_nbytes(size, graph.device)
    return sum(max(0, storages.fake_nbytes[name] - n) for name, n in now_nbytes.items())


def between_nbytes(
    graph: Graph, inputs: Sequence[Any], steps: Steps, earlier: Sequence[Part], *, is_first: bool
) -> int:
    """What the code before a graph holds that no plan of an earlier graph counts.

    Args:
        graph: the graph.
        inputs: its inputs.
        steps: that it is part of; what they hold whatever the plan is known.
        earlier: graphs that ran before it.
        is_first: whether its frame is the first of its model's.
    """
    joint, storages, resident = graph.joint, graph.storages, steps.resident
    handed_in = [node for node in joint.primals if node not in joint.static_inputs]
    known_nbytes = sum(part.figures.outputs_nbytes for part in earlier)
    if is_first:  # later ones get what the code in between made
        known_nbytes += resident.parts.batch_nbytes
    handed_in_nbytes = storages.total_nbytes(handed_in, resident=True)
    made = steps.surroundings.eager_results
    held = held_nbytes(inputs, resident.storages, steps.device, made)
    made.note_inputs(inputs)
    held += late_nbytes(joint, storages)
    return max(0, handed_in_nbytes - known_nbytes) + held
