"""What may not be recomputed, or must be: the rules that keep gradients the same.

Enters: a `JointGraph` and its storages. Leaves: `Constraints`, each with its reason.
Guarantees: an operation that is random, depends on data, has effects, communicates, makes a
discrete routing decision, reads an input that the step overwrites, or is not known to be
repeatable, runs once. What users ask for with `torch.utils.checkpoint` is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoremat import _torch
from autoremat.capture import JointGraph
from autoremat.draws import Replays, has_own_generator, is_random, is_seeded, makes_seeds
from autoremat.storage import Storages

aten = torch.ops.aten

# A tie between router scores may fall differently when they are computed twice: the decision,
# not the scores, must stay.
_DECISIONS = frozenset(
    {
        aten.topk.default,
        aten.sort.default,
        aten.sort.stable,
        aten.argsort.default,
        aten.argsort.stable,
        aten.kthvalue.default,
        aten.unique_consecutive.default,
    }
)
_REPEATABLE_NAMESPACES = frozenset({"aten", "prims", "quantized", "inductor", "_inductor_test"})
RUNNING_STATISTICS = (3, 4)  # elements of a batch norm that its recompute does not return
_POLICY = _torch.CheckpointPolicy


@dataclass(frozen=True)
class Constraints:
    """Rules for nodes of one joint graph.

    Attributes:
        run_once: nodes that may not be recomputed, with the reason.
        replayed: random nodes whose recompute must run under the saved generator state.
        must_save: storages that the backward may only read as the forward made them.
        must_recompute: storages that the forward may not keep for the backward.
    """

    run_once: dict[fx.Node, str]
    replayed: frozenset[fx.Node]
    must_save: frozenset[str]
    must_recompute: frozenset[str]


def find_constraints(joint: JointGraph, storages: Storages, *, replays: Replays) -> Constraints:
    """The rules for a joint graph.

    Args:
        joint: the graph.
        storages: its storages.
        replays: how random numbers may be drawn again; draws that no way covers run once.
    """
    run_once: dict[fx.Node, str] = {}
    replayed: set[fx.Node] = set()
    must_save: set[str] = set()
    must_recompute: set[str] = set()
    for node in joint.nodes:
        if node.op != "call_function" or node in joint.backward or _torch.is_getitem(node):
            _tagged(node, storages, must_save, must_recompute)
            continue
        if is_random(node) and replays.states and not has_own_generator(node):
            replayed.add(node)
        elif is_random(node) or (is_seeded(node) and not replays.seeds):
            run_once[node] = "draws random numbers"
        reason = _reason_to_run_once(node, joint)
        if reason is not None:
            run_once[node] = reason
            replayed.discard(node)
        _tagged(node, storages, must_save, must_recompute)
    fixed = {name for node in run_once for name in storages.made_by[node]}
    return Constraints(
        run_once=run_once,
        replayed=frozenset(replayed),
        must_save=frozenset(must_save),
        must_recompute=frozenset(must_recompute - must_save - fixed),
    )


def _tagged(
    node: fx.Node, storages: Storages, must_save: set[str], must_recompute: set[str]
) -> None:
    """Sort the storages of a node that carries a checkpoint policy."""
    policy = node.meta.get("recompute")
    if policy is None or node.op == "output":
        return
    names = storages.of_node[node]
    if policy in (_POLICY.MUST_SAVE, _POLICY.PREFER_SAVE):
        must_save.update(names)
    elif policy in (_POLICY.MUST_RECOMPUTE, _POLICY.PREFER_RECOMPUTE):
        must_recompute.update(names)


def is_batch_norm_update(node: fx.Node) -> bool:
    """A batch norm whose new running statistics go nowhere but into its buffers.

    They do not touch its output, so it can run again without them.
    """
    target = aten._native_batch_norm_legit_functional.default
    if node.target is not target or node.args[5] is not True:
        return False
    statistics = [user for user in node.users if user.args[1] in RUNNING_STATISTICS]
    return all(
        reader.op == "output" or reader.target is aten.copy_.default
        for element in statistics
        for reader in element.users
    )


def _reason_to_run_once(node: fx.Node, joint: JointGraph) -> str | None:
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return None if _is_symbol_arithmetic(node) else "is a higher-order operator"
    if target.namespace not in _REPEATABLE_NAMESPACES:
        return "is a custom operator that is not known to be repeatable"
    if makes_seeds(node):
        return "makes the seeds that dropout masks are replayed from"
    tags = target.tags
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "has an output whose shape depends on data"
    if target._schema.is_mutable or node.is_impure(impure_random=False):
        return "has side effects"
    if target in _DECISIONS:
        return "makes a discrete decision that a tie could turn"
    reads_overwritten = any(source in joint.overwritten for source in node.all_input_nodes)
    if reads_overwritten and node not in joint.overwritten and not is_batch_norm_update(node):
        return "reads an input that the step overwrites"
    return None


def _is_symbol_arithmetic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))
