"""`simulate.measure` for schedules of many thousand steps: the same numbers by sorting events.

Enters: an `Indexed` problem and a schedule in which every read finds an instance. Leaves: the
`Timeline` that `simulate` defines, bit for bit, and its spans (a test compares them). Each step is
a group of events, its reads and then its writes; sorted by value, an instance is a write and the
reads up to the next write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoremat_solver.model.indexed import Indexed
from autoremat_solver.plan import Timeline
from autoremat_solver.simulate import measure

EXACT_NBYTES = 1 << 50  # totals below this stay exact in the floats of `numpy.bincount`
FEW_VALUES = 1 << 16  # value numbers that fit 16 bits are sorted in linear time

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Events:
    """What one run of each operation reads and writes, back to back.

    Attributes:
        value: per event; reads of pinned values are left out, they end no span.
        writes: per event, whether it is a write.
        first: per operation, its first event.
        count: per operation.
        nbytes: per value.
        pinned: per value.
        workspace_nbytes: per operation.
        overwrites: pairs of a value and an operation that may write over it, each as one number,
            sorted; only of values that the operation's results have room for.
    """

    value: NDArray[np.integer[Any]]
    writes: Bools
    first: Ints
    count: Ints
    nbytes: Ints
    pinned: Bools
    workspace_nbytes: Ints
    overwrites: Ints


def events_of(indexed: Indexed) -> Events:
    """The events of a problem's operations."""
    values: list[int] = []
    writes: list[bool] = []
    first: list[int] = []
    for op, inputs in enumerate(indexed.inputs):
        first.append(len(values))
        reads = [v for v in inputs if not indexed.pinned[v]]
        values += [*reads, *indexed.outputs[op]]
        writes += [False] * len(reads) + [True] * len(indexed.outputs[op])
    ends = np.array([*first, len(values)], dtype=np.int64)
    few = len(indexed.nbytes) <= FEW_VALUES
    return Events(
        value=np.array(values, dtype=np.uint16 if few else np.int64),
        writes=np.array(writes, dtype=np.bool_),
        first=ends[:-1],
        count=np.diff(ends),
        nbytes=np.array(indexed.nbytes, dtype=np.int64),
        pinned=np.array(indexed.pinned, dtype=np.bool_),
        workspace_nbytes=np.array(indexed.workspace_nbytes, dtype=np.int64),
        overwrites=np.array(sorted(_overwrites(indexed)), dtype=np.int64),
    )


def _overwrites(indexed: Indexed) -> Iterator[int]:
    count = len(indexed.inputs)
    for op, values in enumerate(indexed.overwrites):
        room_nbytes = sum(indexed.nbytes[v] for v in indexed.outputs[op])
        for v in values:
            if indexed.nbytes[v] <= room_nbytes and not indexed.pinned[v]:
                yield v * count + op


def fast_measure(indexed: Indexed, steps: list[int]) -> Timeline:
    """`simulate.measure`, five to ten times as fast on large problems.

    Sizes too large to be exact here go to `measure`.
    """
    if not steps or indexed.total_nbytes >= EXACT_NBYTES:
        return measure(indexed, steps)
    events = indexed.derived(events_of)
    ops = np.array(steps, dtype=np.int64)
    live = live_nbytes(events, ops, spans(events, ops)) + indexed.problem.resident_nbytes
    return Timeline(tuple(live.tolist()), math.fsum(map(indexed.time_us.__getitem__, steps)))


def fast_spans(indexed: Indexed, steps: list[int]) -> Spans:
    """The instances that `simulate.spans_of` finds, in another order."""
    return spans(indexed.derived(events_of), np.array(steps, dtype=np.int64))


def fast_saved(indexed: Indexed, steps: list[int], found: Spans) -> list[int]:
    """`simulate.saved_of`, from the spans of the schedule."""
    backward = indexed.is_backward
    start = next((step for step, op in enumerate(steps) if backward[op]), len(steps))
    crossing = found.value[(found.born < start) & (found.last >= start)].tolist()
    pinned = {v for v in crossing if indexed.pinned[v]}
    read = {v for op in steps[start:] for v in indexed.inputs[op]} if pinned else set()
    return sorted(v for v in crossing if v not in pinned or v in read)


@dataclass(frozen=True)
class Spans:
    """Every instance of a value, by value and then in the order of their making.

    Attributes:
        value, born, last: per instance, its value, the step that makes it and the last step at
            which it is live.
        step: the steps of all events in the same order: of an instance first that of its making,
            then those of its reads; those of pinned values are left out.
        made: per instance, where in `step` it begins.
        all_made: whether every read that is noted finds an instance.
    """

    value: Ints
    born: Ints
    last: Ints
    step: Ints
    made: Ints
    all_made: bool


def live_nbytes(events: Events, ops: Ints, spans: Spans) -> Ints:
    """Bytes of the instances that are live at each step, and of its workspace."""
    size = events.nbytes[spans.value].astype(np.float64)
    change = np.bincount(spans.born, weights=size, minlength=len(ops) + 1)
    change -= np.bincount(spans.last + 1, weights=size, minlength=len(ops) + 1)
    live: Ints = change[:-1].cumsum().astype(np.int64) + events.workspace_nbytes[ops]
    if len(events.overwrites):
        ends_here = np.isin(spans.value * len(events.count) + ops[spans.last], events.overwrites)
        taken = np.zeros(len(ops), dtype=np.int64)
        np.maximum.at(taken, spans.last[ends_here], events.nbytes[spans.value[ends_here]])
        live -= taken
    return live


def spans(events: Events, ops: Ints) -> Spans:
    """The instances of a schedule of operation numbers."""
    count = events.count[ops]
    ends = count.cumsum()
    which = (events.first[ops] - (ends - count)).repeat(count) + np.arange(ends[-1])
    value = events.value[which]
    order = value.argsort(kind="stable")
    value = value[order].astype(np.int64)
    step = np.arange(len(ops)).repeat(count)[order]
    writes = events.writes[which][order]
    (made,) = writes.nonzero()
    all_made = bool(writes[_begins(value)].all())
    final = np.empty_like(made)
    final[:-1], final[-1:] = made[1:] - 1, len(value) - 1
    value, born, last = value[made], step[made], step[final]
    last[_begins(value) & events.pinned[value]] = len(ops) - 1
    return Spans(value, born, last, step, made, all_made)


def _begins(value: Ints) -> Bools:
    """Where a run of equal numbers begins."""
    found = np.empty(len(value), dtype=np.bool_)
    found[:1] = True
    np.not_equal(value[1:], value[:-1], out=found[1:])
    return found
