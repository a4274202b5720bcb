"""What a call costs that cannot be measured on the device at hand: a roofline of its ceilings.

Enters: calls and ceilings. Leaves: `OpCost`, microseconds. Guarantees: nothing is allocated or
run, and a real operator is never priced at zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autoremat._torch import fake_value, is_collective, size_hint, tensor_leaves
from autoremat.cost.cache import DeviceCeilings
from autoremat.cost.calls import FREE, Call, OpCost
from autoremat.cost.work import bytes_moved, flop_count

NOMINAL_CEILINGS = {
    "cpu": DeviceCeilings(copy_gbps=20.0, matmul_gflops=200.0, launch_us=3.0),
    "cuda": DeviceCeilings(copy_gbps=1500.0, matmul_gflops=60_000.0, launch_us=5.0),
}
"""Ceilings for a device that cannot be measured because it is not there."""


class Link(NamedTuple):
    """What connects processes: an estimate, since nothing communicates while a plan is made."""

    gbps: float
    latency_us: float


LINKS = {"cpu": Link(gbps=1.0, latency_us=150.0), "cuda": Link(gbps=50.0, latency_us=20.0)}
"""By the device of what is sent: gloo within a machine; between NVLink and a network."""


def estimate(node: fx.Node, call: Call | None, ceilings: DeviceCeilings) -> OpCost:
    """Roofline price of a node that is not free and not measured, on the device at hand.

    A collective has all of its time, though some of it may pass beside other operators: what waits
    for it is free. The workspace of an operator nobody ran is unknown and given as 0.
    """
    if call is not None and is_collective(call.target):
        return replace(FREE, time_us=communication_us(call))
    moved = bytes_moved(call) if call is not None else _edges_nbytes(node)
    flops = flop_count(call) if call is not None else moved // 4
    return replace(FREE, time_us=roofline_us(flops, moved, ceilings))


def roofline_us(flops: int, moved_nbytes: int, ceilings: DeviceCeilings) -> float:
    """How long it takes at least to compute or to move so much, and to launch it."""
    memory_us = moved_nbytes / (ceilings.copy_gbps * 1e3)
    compute_us = flops / (ceilings.matmul_gflops * 1e3)
    return ceilings.launch_us + max(memory_us, compute_us)


def communication_us(call: Call) -> float:
    """Of a collective: the larger side once; what is reduced and then spread goes both ways."""
    link = LINKS["cpu" if call.device.type == "cpu" else "cuda"]
    ways = 2 if "all_reduce" in str(call.target) else 1
    sides = (sum(spec.distinct_nbytes for spec in side) for side in (call.inputs, call.outputs))
    return link.latency_us + ways * max(sides) / (link.gbps * 1e3)


def _edges_nbytes(node: fx.Node) -> int:
    """Bytes of all tensors at a node's edges, for operators that are not one call."""
    tensors = tensor_leaves([fake_value(end) for end in (*node.all_input_nodes, node)])
    return sum(size_hint(tensor.numel()) * tensor.dtype.itemsize for tensor in tensors)
