"""The parts of a model that strategies are named after: repeated layers, and attention's core.

Enters: a lowered joint graph. Leaves: which operations belong to which segment of layers, and
which values are attention's score matrices. A layer is a child of a container (`ModuleList`,
`Sequential`) that has two children of one class, the outermost such container; each call of it
counts for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.modules import ModuleCall, module_calls
from autoremat.graph.storages import Storages
from autoremat.problem.lower import Lowered

aten = torch.ops.aten

_BATCHED_PRODUCTS = frozenset({aten.bmm.default, aten.baddbmm.default})
_PRODUCTS = _BATCHED_PRODUCTS | {aten.mm.default, aten.addmm.default, aten.convolution.default}
_ATTENTION = "_scaled_dot_product_"  # how the operators of fused kernels are called
_SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default, aten.exp.default})


def segments(joint: JointGraph, lowered: Lowered, layers: int) -> dict[str, int]:
    """The segment of each operation that lies in one.

    Operations between the layers of one segment belong to it: a user who checkpoints several
    layers at once checkpoints what lies between them too.

    Args:
        joint: the graph.
        lowered: its lowering.
        layers: how many layers of one container make a segment.
    """
    names = [op.name for op in lowered.problem.ops]
    nodes = [lowered.node_of.get(name) for name in names]
    early = [node if node is not None and _is_early(node, joint) else None for node in nodes]
    layer_of = _layers([node for node in early if node is not None])
    segment_of_layer = _grouped(dict.fromkeys(layer_of.values()), layers)
    places: dict[int, list[int]] = {}
    found: dict[str, int] = {}
    for place, node in enumerate(early):
        if node in layer_of:
            segment = segment_of_layer[layer_of[node]]
            found[names[place]] = segment
            places.setdefault(segment, []).append(place)
    for segment, taken in places.items():
        for place in range(taken[0], taken[-1]):
            if early[place] is not None:
                found.setdefault(names[place], segment)
    return found


def _is_early(node: fx.Node, joint: JointGraph) -> bool:
    return node in joint.forward or (node not in joint.backward and bool(module_calls(node)))


def _layers(nodes: Sequence[fx.Node]) -> dict[fx.Node, ModuleCall]:
    """The layer of each node that lies in one."""
    calls = {node: module_calls(node) for node in nodes}
    seen = dict.fromkeys(call for stack in calls.values() for call in stack)
    kinds: dict[str, Counter[str]] = {}
    for call in seen:
        container, _, child = call.path.rpartition(".")
        if child.isdecimal():
            kinds.setdefault(container, Counter())[call.kind] += 1
    repeated = {name for name, count in kinds.items() if max(count.values()) > 1}
    found = {}
    for node, stack in calls.items():
        for call in stack:
            container, _, child = call.path.rpartition(".")
            if child.isdecimal() and container in repeated:
                found[node] = call
                break
    return found


def _grouped(layers: Iterable[ModuleCall], count: int) -> dict[ModuleCall, int]:
    """So many layers of one container in a row make a segment."""
    segment, members, before = -1, 0, ""
    found = {}
    for layer in layers:
        container = layer.path.rpartition(".")[0]
        if segment < 0 or members == count or container != before:
            segment, members = segment + 1, 0
        found[layer] = segment
        members, before = members + 1, container
    return found


def products(joint: JointGraph, storages: Storages) -> frozenset[str]:
    """Values that matrix products, convolutions and fused attention make in the forward.

    They are what selective checkpoints save: the rest of a layer is cheap to make again.
    """
    made = (node for node in joint.nodes if node not in joint.backward and _is_product(node))
    return frozenset(name for node in made for name in storages.made_by[node])


def _is_product(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.target in _PRODUCTS or name.startswith(_ATTENTION)


def attention_cores(joint: JointGraph, storages: Storages) -> list[frozenset[str]]:
    """What each attention makes between its two batched products: scores, softmax, dropout.

    Selective recomputation makes them again [Korthikanti2023]. Fused kernels have no such values.
    """
    found: list[frozenset[str]] = []
    for node in joint.nodes:
        if node.target in _BATCHED_PRODUCTS and node not in joint.backward:
            core = _core_from(node, joint)
            if any(inner.target in _SOFTMAX for inner in core):
                found.append(frozenset(n for inner in core for n in storages.made_by[inner]))
    return found


def _core_from(first: fx.Node, joint: JointGraph) -> set[fx.Node]:
    """The nodes on the ways from one batched product to the next, the first one included."""
    reached = {first}
    ends: set[fx.Node] = set()
    stack = [first]
    while stack:
        for user in stack.pop().users:
            if user in joint.backward or user in reached or user.op != "call_function":
                continue
            if user.target in _BATCHED_PRODUCTS:
                ends.add(user)
            if user.target not in _PRODUCTS:
                reached.add(user)
                stack.append(user)
    core: set[fx.Node] = set()
    back = [source for end in ends for source in end.all_input_nodes if source in reached]
    while back:
        node = back.pop()
        if node not in core:
            core.add(node)
            back.extend(source for source in node.all_input_nodes if source in reached)
    return core
