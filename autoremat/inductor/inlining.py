"""Which nodes Inductor computes inside their consumers, so that they never take memory.

Enters: a joint graph after Inductor's decompositions. Leaves: the inlined nodes. Charge buffers,
not nodes: a pointwise result that only fusible operations read is recomputed in each of them.
The rules follow Inductor's lowering (a value with many readers and many reads is realised), with
the limits of its configuration; they are a forecast. What counts is what `wrapper` reads
from the generated code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoremat import _torch
from autoremat.graph.constraints import Constraints
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.random_draws import is_random, is_seeded
from autoremat.graph.storages import Storages

aten = torch.ops.aten

SMALL_SHARE = 0.25  # of a value's bytes: what it is made from is little

_POINTWISE_NAMES = frozenset(
    {
        "aten::_to_copy",
        "aten::_unsafe_index",
        "aten::_unsafe_masked_index",
        "aten::arange",
        "aten::clone",
        "aten::constant_pad_nd",
        "aten::embedding",
        "aten::empty_like",
        "aten::full",
        "aten::full_like",
        "aten::gather",
        "aten::index",
        "aten::new_zeros",
        "aten::ones",
        "aten::ones_like",
        "aten::repeat",
        "aten::scalar_tensor",
        "aten::select_scatter",
        "aten::slice_scatter",
        "aten::where",
        "aten::zeros",
        "aten::zeros_like",
        "inductor::inductor_lookup_seed",
        "inductor::inductor_random",
        "prims::broadcast_in_dim",
        "prims::convert_element_type",
        "prims::inductor_lookup_seed",
        "prims::inductor_random",
        "prims::iota",
    }
)
_REDUCTION_NAMES = frozenset(
    {
        "aten::all",
        "aten::amax",
        "aten::amin",
        "aten::any",
        "aten::argmax",
        "aten::argmin",
        "aten::max",
        "aten::mean",
        "aten::min",
        "aten::prod",
        "aten::sum",
        "aten::var",
        "aten::var_mean",
    }
)


@dataclass(frozen=True)
class _Expression:
    """What a loop does to have a value.

    Attributes:
        reads: storages that it reads.
        computes: nodes that it computes from them.
    """

    reads: frozenset[str] = frozenset()
    computes: frozenset[fx.Node] = frozenset()

    def is_materialised(self, device: torch.device, num_users: int) -> bool:
        """Whether Inductor gives the value memory, though all its users could compute it."""
        limits = _torch.inlining_limits(device)
        size = len(self.reads) + sum(1 + _num_constants(node) for node in self.computes)
        if num_users > 1 and (
            len(self.reads) > limits.shared_reads
            or size > limits.operations
            or any(is_heavy(node) for node in self.computes)
        ):
            return True
        is_large = len(self.reads) > limits.reads or size > limits.operations
        return is_large and len(self.reads) > 1


def inlined_nodes(
    joint: JointGraph, storages: Storages, constraints: Constraints
) -> frozenset[fx.Node]:
    """Nodes of a decomposed joint graph that Inductor is expected not to materialise."""
    kept = set(joint.fwd_outputs) | set(joint.bwd_outputs)
    outputs = {name for node in kept for name in storages.of_node[node]}
    inlined: set[fx.Node] = set()
    found: dict[fx.Node, _Expression] = {}
    kept_draws = {node for node in constraints.run_once if is_random(node) or is_seeded(node)}
    for node in joint.nodes:
        if node.op == "output":
            continue
        if _is_mask(node, kept_draws):
            kept_draws.add(node)
        made = storages.made_by[node]
        can = (
            bool(made)
            and is_pointwise(node)
            and node not in constraints.run_once
            and node not in kept_draws
            and not any(n in outputs or n in constraints.must_save for n in made)
        )
        behind = [found[source] for source in node.all_input_nodes]
        reads = frozenset().union(*(source.reads for source in behind))
        computes = frozenset().union(*(source.computes for source in behind))
        users = _readers(node, storages) if can else []
        if users and all(is_fusible(user) for user in users):
            expression = _Expression(reads, computes | {node})
            if not expression.is_materialised(_torch.fake_value(node).device, len(users)):
                inlined.add(node)
                found[node] = expression
                continue
        is_made_of_others = (reads or computes) and not _torch.is_getitem(node)
        own = frozenset(made or (() if is_made_of_others else storages.of_node[node]))
        found[node] = _Expression(own) if own else _Expression(reads, computes)
    return frozenset(inlined)


def shared_by_layers(
    joint: JointGraph, storages: Storages, inlined: frozenset[fx.Node]
) -> frozenset[str]:
    """Values that Inductor would make for all their readers at once if they were recomputed.

    An attention mask is cheap to make and read by every layer. Recomputed for each, its copies
    share their inputs, so Inductor fuses them into one loop and all of them live at once. One
    saved copy takes less. They are pointwise, have several readers, and are made from little.
    """
    found: set[str] = set()
    behind: dict[fx.Node, frozenset[str]] = {}
    for node in joint.nodes:
        if node.op == "output":
            continue
        sources = frozenset().union(*(behind[source] for source in node.all_input_nodes))
        made = storages.made_by[node]
        own = frozenset(storages.of_node[node]) - storages.resident
        behind[node] = own if made and node not in inlined else sources or own
        if not made or node in inlined or node in joint.backward or not is_pointwise(node):
            continue
        made_nbytes = sum(storages.nbytes[name] for name in made)
        source_nbytes = sum(storages.nbytes[name] for name in sources)
        readers = {reader for reader in _readers(node, storages) if reader not in joint.backward}
        if len(readers) > 1 and source_nbytes <= made_nbytes * SMALL_SHARE:
            found.update(made)
    return frozenset(found)


def _is_mask(node: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a node makes less of numbers that are drawn once: the backward should get that."""
    value = _torch.fake_value(node)
    return isinstance(value, torch.Tensor) and any(
        value.dtype.itemsize < _torch.fake_value(source).dtype.itemsize
        for source in kept.intersection(node.all_input_nodes)
        if isinstance(_torch.fake_value(source), torch.Tensor)
    )


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from a few elements of the inputs."""
    target = node.target
    is_one = isinstance(_torch.fake_value(node), torch.Tensor)
    if not isinstance(target, _torch.OpOverload) or not is_one:
        return False
    if target.name().split(".")[0] in _POINTWISE_NAMES:
        return True
    return torch.Tag.pointwise in target.tags and not is_random(node)


def is_by_element(node: fx.Node) -> bool:
    """Whether each element of the result is computed from those in the same place."""
    return is_pointwise(node) and torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_heavy(node: fx.Node) -> bool:
    """Whether Inductor would rather keep the result on the CPU than compute it twice."""
    target, value = node.target, _torch.fake_value(node)
    on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    if not on_cpu or not isinstance(target, _torch.OpOverload):
        return False
    return _torch.is_kept_for_reuse(target.overloadpacket.__name__)


def _num_constants(node: fx.Node) -> int:
    """Numbers that a node computes with: each is an operation to Inductor."""
    is_plain = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return sum(isinstance(argument, (int, float)) for argument in node.args) if is_plain else 0


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor generates the node's loop itself, so that its inputs can be inlined.

    A concatenation is no loop: those of its inputs write into its memory.
    """
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return False
    names = {"aten::cat", *_REDUCTION_NAMES}
    return is_pointwise(node) or target.name().split(".")[0] in names


def _readers(node: fx.Node, storages: Storages) -> list[fx.Node]:
    """Operations and outputs that read the node, seen through its views."""
    found: list[fx.Node] = []
    for user in node.users:
        is_view = user.op == "call_function" and not storages.made_by[user]
        if is_view and not _torch.is_getitem(user) and not user.is_impure():
            found.extend(_readers(user, storages))
        else:
            found.append(user)
    return found
