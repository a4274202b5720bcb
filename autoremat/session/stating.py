"""A graph that was handed over, stated beside what its step holds.

Enters: a graph, and what is held whatever its plan. Leaves: a `Subject`, and what there is before
the graph: what earlier graphs hand over to it, and what code holds that no plan of these counts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import sympy
import torch

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.graph.collectives import late_nbytes
from autoremat.memory.residents import Resident
from autoremat.memory.storage_sizes import rounded_nbytes, same_device, storage_identities
from autoremat.planning.part import Part
from autoremat.planning.pipeline import Graph, state
from autoremat.planning.ranges import names_of
from autoremat.planning.sizes import Symbols
from autoremat.problem.lower import shell_of
from autoremat.problem.subject import Subject
from autoremat.session.at_hand import AtHand
from autoremat.watch.eager_code import Results, held_nbytes


class Before(NamedTuple):
    """What there is before a graph of a step.

    Attributes:
        handed_over: as of `Subject`.
        between_nbytes: what code holds that no plan of an earlier graph counts.
        grown_nbytes: what the batch takes more at the sizes that are planned for than as it is.
        absent: as of `Subject`.
    """

    handed_over: frozenset[str] = frozenset()
    between_nbytes: int = 0
    grown_nbytes: int = 0
    absent: tuple[Any, ...] = ()


def stated(
    graph: Graph, setting: Setting, resident: Resident, before: Before, *, is_first: bool
) -> Subject:
    """A graph of a step.

    Args:
        graph: the graph.
        setting: how it is planned.
        resident: what the step holds whatever the plan.
        before: what there is before the graph.
        is_first: whether it is the first one of its step that is planned.
    """
    shell = shell_of(
        graph.joint,
        graph.storages,
        resident_nbytes=resident.nbytes + before.between_nbytes,
        optimizer_nbytes=resident.transient_nbytes,
    )
    found = state(graph, shell, setting, is_first=is_first)
    return replace(found, handed_over=before.handed_over, absent=before.absent)


def found_before(
    graph: Graph,
    at_hand: AtHand,
    corner: Symbols,
    resident: Resident,
    results: Results,
    earlier: Sequence[Part],
) -> Before:
    """What there is before a graph.

    Args:
        graph: the graph.
        at_hand: how it is handed over.
        corner: the largest sizes that it is planned for; empty for those at hand.
        resident: what the step holds whatever the plan, beside a batch as it is.
        results: of layers in eager mode.
        earlier: graphs that ran before it.
    """
    joint, storages, inputs = graph.joint, graph.storages, at_hand.inputs
    made = _handed_over(graph, inputs, resident)
    absent, absent_nbytes = _absent(at_hand, corner, graph.device) if made is not None else ((), 0)
    grown_nbytes = _grown_nbytes(graph, made) + absent_nbytes
    counted_nbytes = sum(part.figures.outputs_nbytes for part in earlier)
    if made is None:
        handed_in = [node for node in joint.primals if node not in joint.static_inputs]
        handed_in_nbytes = storages.total_nbytes(handed_in, resident=True)
        if at_hand.is_in_first_frame:  # later ones get what the code in between made
            counted_nbytes += resident.parts.batch_nbytes + grown_nbytes
    else:
        handed_in_nbytes = sum(storages.nbytes[name] for name in made)
    held = held_nbytes(inputs, resident.storages, graph.device, results)
    results.note_inputs(inputs)
    held += late_nbytes(joint, storages)
    more_nbytes = max(0, handed_in_nbytes - counted_nbytes)
    handed_over = made if made and not more_nbytes else frozenset[str]()  # else code made some
    return Before(handed_over, more_nbytes + held, grown_nbytes, absent)


def _absent(at_hand: AtHand, corner: Symbols, device: torch.device) -> tuple[tuple[Any, ...], int]:
    """Of the batch, what a graph is not given: by its sizes, and how much it grows to these."""
    given = [one for one in at_hand.absent if corner and same_device(one.device, device)]
    symbols = {name: symbol for symbol, name in names_of(at_hand.ranges).items()}
    found = [sympy.sympify(one.nbytes_at(symbols)) for one in given]
    most_nbytes = (rounded_nbytes(int(nbytes.xreplace(corner)), device) for nbytes in found)
    now_nbytes = sum(rounded_nbytes(one.nbytes, device) for one in given)
    return tuple(found), max(0, sum(most_nbytes) - now_nbytes)


def _handed_over(graph: Graph, inputs: Sequence[Any], resident: Resident) -> frozenset[str] | None:
    """Storages among a graph's inputs that are not resident; None if nobody can tell.

    Args:
        graph: the graph.
        inputs: its inputs.
        resident: what the step holds whatever the plan.
    """
    joint, of_node = graph.joint, graph.storages.of_node
    if len(joint.primals) != len(inputs) or any(isinstance(v, _torch.FakeTensor) for v in inputs):
        return None
    made: set[str] = set()
    for node, value in zip(joint.primals, inputs, strict=True):
        is_known = isinstance(value, torch.Tensor)
        if is_known and resident.storages.isdisjoint(storage_identities([value])):
            if node in joint.static_inputs:
                return None  # what is resident is known by other tensors
            made.update(of_node[node])
    return frozenset(made)


def _grown_nbytes(graph: Graph, made: Set[str] | None) -> int:
    """What the batch takes more at the sizes that are planned for than as it is.

    Args:
        graph: one that is given the batch.
        made: as `_handed_over` tells it: no part of the batch.
    """
    storages = graph.storages
    handed_in = {n for node in graph.joint.primals for n in storages.of_node[node]}
    now_nbytes = {}
    with _torch.sizes_as({}):
        for name in handed_in - (made or set()):
            size = _torch.size_hint(storages.sizes[name])
            now_nbytes[name] = rounded_nbytes(size, graph.device)
    return sum(max(0, storages.fake_nbytes[name] - n) for name, n in now_nbytes.items())
