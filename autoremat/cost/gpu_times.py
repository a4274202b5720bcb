"""What kernels take on a GPU by its data sheet: a roofline, with what of it kernels reach.

Enters: a `Call`, a node or a loop of generated code, and a `DeviceSpec`. Leaves: microseconds.
Guarantees: nothing is allocated or run, and a real operator is never priced at zero.

Products fill the multiprocessors in waves of tiles, fused attention has a throughput of its own,
convolutions another, and all else moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import replace

from torch import fx

from autoremat._torch import Loop, fake_value, is_collective, size_hint, tensor_leaves
from autoremat.cost.calls import FREE, Call, OpCost, call_of, is_free, tensor_spec
from autoremat.cost.device_specs import DeviceSpec
from autoremat.cost.estimates import communication_us
from autoremat.cost.work import (
    FusedAttention,
    Product,
    bytes_moved,
    flop_count,
    fused_attention,
    is_convolution,
    is_lookup,
    matmul_dtype,
    product,
)

# A multiprocessor computes a tile of the result at a time: rows, columns, and what of the
# throughput that tiles of this size reach, as each element that is read serves fewer products.
_TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.65))
_MOST_SPLITS = 16  # of the depth, where there are fewer tiles than multiprocessors
_LEAST_DEPTH = 512  # of what a split leaves

# Of the data sheet's narrow throughput, forward and backward: within the ranges of their authors.
# Flash-attention 2 on an A100: up to 0.73 and 0.63 (arXiv 2307.08691), on an H100 about 0.35
# (arXiv 2407.08608); there cuDNN's is taken to lie between it and flash-attention 3. The
# memory-efficient kernel is of flash-attention 1: 0.3 to 0.5, and 0.25 to 0.35.
_ATTENTION = {
    ("flash", False): (0.62, 0.52),
    ("flash", True): (0.36, 0.30),
    ("cudnn", False): (0.62, 0.52),
    ("cudnn", True): (0.52, 0.42),
    ("efficient", False): (0.38, 0.28),
    ("efficient", True): (0.20, 0.15),
}
_HOPPER = 9
_QUERIES = 128  # queries that a multiprocessor takes at a time
_CONVOLUTION_SHARE = 0.5


def call_us(call: Call, spec: DeviceSpec) -> float:
    """What a call takes on a GPU by its data sheet.

    Products fill the multiprocessors in waves of tiles, attention has a throughput of its own, and
    all else moves bytes.
    """
    if is_collective(call.target):
        return communication_us(call)
    moving_us = bytes_moved(call) / (spec.copy_gbps * 1e3)
    return spec.launch_us + max(_computing_us(call, spec), moving_us)


def _computing_us(call: Call, spec: DeviceSpec) -> float:
    dtype, multiprocessors = matmul_dtype(call), spec.chip.multiprocessors
    attention, factors = fused_attention(call), product(call)
    if attention is not None:
        gflops = _attention_share(attention, spec) * spec.gflops(dtype)
        tasks = attention.batch_heads * -(-attention.rows // _QUERIES)
        return attention.flops / (gflops * _wave_share(tasks, multiprocessors) * 1e3)
    if factors is not None:
        reached = spec.product_share * _filled(factors, multiprocessors)
        return factors.flops / (reached * spec.gflops(dtype) * 1e3)
    if is_convolution(call):
        gflops = spec.gflops(dtype, is_convolution=True)
        return flop_count(call) / (_CONVOLUTION_SHARE * gflops * 1e3)
    return 0.0


def _computes(call: Call) -> bool:
    """Whether it is a call of a library that computes more than it moves."""
    return is_convolution(call) or any((product(call), fused_attention(call)))


def _filled(factors: Product, multiprocessors: int) -> float:
    """What of the throughput is reached: the last wave of tiles leaves multiprocessors idle."""
    best = 0.0
    for rows, columns, share in _TILES:
        down, across = -(-factors.rows // rows), -(-factors.columns // columns)
        covered = factors.rows * factors.columns / (down * rows * across * columns)
        for split in range(1, _MOST_SPLITS + 1):
            tiles = factors.batch * down * across
            is_filled = tiles * (split - 1) >= multiprocessors
            if split > 1 and (is_filled or factors.depth // split < _LEAST_DEPTH):
                break
            best = max(best, share * covered * _wave_share(tiles * split, multiprocessors))
    return best


def _wave_share(tasks: int, multiprocessors: int) -> float:
    """What of the multiprocessors work if each takes one task after the other."""
    return tasks / (-(-tasks // multiprocessors) * multiprocessors)


def _attention_share(attention: FusedAttention, spec: DeviceSpec) -> float:
    is_new = spec.chip.capability[0] >= _HOPPER and spec.chip.capability[0] < 12
    forward, backward = _ATTENTION[attention.kernel, is_new]
    return backward if attention.is_backward else forward


def estimate_nodes(
    nodes: Sequence[fx.Node], spec: DeviceSpec, inlined: Set[fx.Node] = frozenset()
) -> dict[fx.Node, OpCost]:
    """Price every node by its shapes alone: for a GPU that is not here.

    Args:
        nodes: nodes of a joint graph, which have fake values.
        spec: the GPU's data sheet.
        inlined: nodes that the compiler computes inside their consumers, which read their inputs.
    """
    costs = dict.fromkeys(nodes, FREE)
    for node in nodes:
        if not is_free(node):
            costs[node] = replace(FREE, time_us=_node_us(node, spec, inlined))
    return costs


def _node_us(node: fx.Node, spec: DeviceSpec, inlined: Set[fx.Node]) -> float:
    call = call_of(node)
    if call is not None and (_computes(call) or inlined.isdisjoint(node.all_input_nodes)):
        return call_us(call, spec)
    moved = sum(map(_nbytes, (node, *_read_by(node, inlined))))
    return spec.launch_us + moved / (spec.copy_gbps * 1e3)


def _read_by(node: fx.Node, inlined: Set[fx.Node]) -> Iterator[fx.Node]:
    """What a loop reads that computes inlined nodes on its way; of a table as much as it takes."""
    seen = set[fx.Node]()
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if source not in inlined or is_lookup(source.target):
            yield source
        else:
            todo += source.all_input_nodes


def _nbytes(node: fx.Node) -> int:
    nbytes = 0
    for tensor in tensor_leaves(fake_value(node)):
        try:
            nbytes += tensor_spec(tensor).distinct_nbytes
        except TypeError:  # not strided
            nbytes += size_hint(tensor.numel()) * tensor.dtype.itemsize
    return nbytes


def gpu_loops_us(loops: Collection[Loop], spec: DeviceSpec) -> float:
    """What loops of generated code take, one after the other: they compute while they move."""
    return math.fsum(_loop_us(loop, spec) for loop in loops)


def _loop_us(loop: Loop, spec: DeviceSpec) -> float:
    moving_us = loop.moved_nbytes / (spec.copy_gbps * 1e3)
    computing_us = loop.flops / (spec.product_share * spec.gflops(loop.dtype) * 1e3)
    return spec.launch_us + max(moving_us, computing_us)
