"""What may not be recomputed, or must be: the rules that keep gradients the same.

Enters: a `JointGraph` and its storages. Leaves: `Constraints`, each with its reason.
Guarantees: an operation that is random, depends on data, has effects, communicates, makes a
discrete routing decision, reads an input that the step overwrites, or is not known to be
repeatable, runs once. What users ask for with `torch.utils.checkpoint` is kept; what communicates,
or is somebody's own operator, may run again where they say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.cost.grouped import is_grouped
from autoremat.errors import SteeringError
from autoremat.graph.collectives import may_communicate_again
from autoremat.graph.gathering import is_gather
from autoremat.graph.joint_graph import BOUNDARY, JointGraph
from autoremat.graph.modules import module_calls, module_path
from autoremat.graph.random_draws import (
    Replays,
    has_own_generator,
    is_random,
    is_seeded,
    makes_seeds,
)
from autoremat.graph.selectors import KNOWN_NAMESPACES, Selector, no_match
from autoremat.graph.storages import Storages

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
RUNNING_STATISTICS = (3, 4)  # elements of a batch norm that its recompute does not return
_MASKS = (torch.bool, torch.uint8)
_POLICY = _torch.CheckpointPolicy


@dataclass(frozen=True)
class Constraints:
    """Rules for nodes of one joint graph.

    Attributes:
        run_once: nodes that may not be recomputed, with the reason.
        replayed: random nodes whose recompute must run under the saved generator state.
        must_save: storages that the backward may only read as the forward made them.
        must_recompute: storages that the forward may not keep for the backward.
        asked: what the user asked for with `save=` and `recompute=`, one sentence each.
        allowed: what the user lets run again with `repeatable=`, likewise.
        checkpointed: of `must_recompute`, what is so only since the user's own checkpoints say it.
    """

    run_once: dict[fx.Node, str]
    replayed: frozenset[fx.Node]
    must_save: frozenset[str]
    must_recompute: frozenset[str]
    asked: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    checkpointed: frozenset[str] = frozenset()

    @property
    def sentences(self) -> tuple[str, ...]:
        """All that the user has said."""
        return self.allowed + self.asked


def find_constraints(
    joint: JointGraph,
    storages: Storages,
    *,
    replays: Replays,
    repeatable: Set[fx.Node] = frozenset(),
) -> Constraints:
    """The rules for a joint graph.

    Args:
        joint: the graph.
        storages: its storages.
        replays: how random numbers may be drawn again; draws that no way covers run once.
        repeatable: what the user says may communicate, or run as a custom operator, again.
    """
    run_once: dict[fx.Node, str] = {}
    replayed: set[fx.Node] = set()
    must_save: set[str] = set()
    must_recompute: set[str] = set()
    for node in joint.nodes:
        _tagged(node, storages, must_save, must_recompute)
        if node.op != "call_function" or node in joint.backward or _torch.is_getitem(node):
            continue
        if is_random(node) and replays.states and not has_own_generator(node):
            replayed.add(node)
        elif is_random(node) or (is_seeded(node) and not replays.seeds):
            run_once[node] = "draws random numbers"
        reason = _reason_to_run_once(node, joint, repeatable)
        if reason is not None:
            run_once[node] = reason
            replayed.discard(node)
    _settle_boundaries(joint, storages, must_save, must_recompute)
    fixed = {name for node in run_once for name in storages.made_by[node]}
    again = frozenset(must_recompute - must_save - fixed)
    gathered = {name for node in joint.nodes if is_gather(node) for name in storages.of_node[node]}
    return Constraints(
        run_once=run_once,
        replayed=frozenset(replayed),
        must_save=frozenset(must_save),
        must_recompute=again,
        checkpointed=again - gathered,
    )


def _tagged(
    node: fx.Node, storages: Storages, must_save: set[str], must_recompute: set[str]
) -> None:
    """Sort the storages of a node that carries a checkpoint policy."""
    policy = _torch.recompute_policy(node)
    if policy is None or node.op == "output" or node.meta.get(BOUNDARY, False):
        return
    names = storages.of_node[node]
    if policy in (_POLICY.MUST_SAVE, _POLICY.PREFER_SAVE):
        must_save.update(names)
    elif policy in (_POLICY.MUST_RECOMPUTE, _POLICY.PREFER_RECOMPUTE):
        must_recompute.update(names)


def _settle_boundaries(
    joint: JointGraph, storages: Storages, must_save: set[str], must_recompute: set[str]
) -> None:
    """Save what one checkpointed region hands to the next, so that the next need not repeat it.

    Where the operation that makes it has other results that the user wants recomputed, it runs
    again: there it is left to the plan.
    """
    handed = {
        name
        for node in joint.nodes
        if node.meta.get(BOUNDARY, False)
        for name in storages.of_node[node]
    }
    must_recompute -= handed
    for node in joint.nodes if handed else ():
        made = storages.made_by.get(node, ())
        if must_recompute.isdisjoint(made) or not must_save.isdisjoint(made):
            must_save.update(handed.intersection(made))


def is_training_batch_norm(node: fx.Node) -> bool:
    """Whether it returns new running statistics beside its output."""
    target = aten._native_batch_norm_legit_functional.default
    return node.target is target and node.args[5] is True


def is_batch_norm_update(node: fx.Node) -> bool:
    """A batch norm whose new running statistics go nowhere but into its buffers.

    They do not touch its output, so it can run again without them.
    """
    if not is_training_batch_norm(node):
        return False
    statistics = [user for user in node.users if user.args[1] in RUNNING_STATISTICS]
    return all(
        reader.op == "output" or reader.target is aten.copy_.default
        for element in statistics
        for reader in element.users
    )


def _reason_to_run_once(node: fx.Node, joint: JointGraph, repeatable: Set[fx.Node]) -> str | None:
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return None if _is_symbol_arithmetic(node) else "is a higher-order operator"
    if _torch.is_collective(target):
        again = may_communicate_again(node, repeatable)
        return None if again else "communicates with other processes"
    is_known = target.namespace in KNOWN_NAMESPACES or is_grouped(target)
    if not is_known and node not in repeatable:
        return "is a custom operator that is not known to be repeatable"
    if makes_seeds(node):
        return "makes the seeds that dropout masks are replayed from"
    tags = target.tags
    may_depend = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    if may_depend and not _indexes_by_numbers(node):
        return "has an output whose shape depends on data"
    if _torch.is_mutable(target) or node.is_impure(impure_random=False):
        return "has side effects"
    if target in _DECISIONS:
        return "makes a discrete decision that a tie could turn"
    reads_overwritten = any(source in joint.overwritten for source in node.all_input_nodes)
    is_view = node in joint.overwritten and not _torch.in_place_results(node)
    if reads_overwritten and not is_view and not is_batch_norm_update(node):
        return "reads an input that the step overwrites"
    return None


def _indexes_by_numbers(node: fx.Node) -> bool:
    """An index.Tensor whose shape follows from its indices' shapes: none of them is a mask."""
    if node.target is not aten.index.Tensor:
        return False
    indices: Any = node.args[1]
    return all(index is None or _torch.fake_value(index).dtype not in _MASKS for index in indices)


def _is_symbol_arithmetic(node: fx.Node) -> bool:
    return isinstance(_torch.fake_value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def marked_repeatable(
    joint: JointGraph, storages: Storages, selectors: Iterable[Selector]
) -> tuple[frozenset[fx.Node], tuple[str, ...]]:
    """Operations that the user lets run again with `repeatable=`, and what it holds for, in words.

    They are collectives and custom operators: only the user knows that those may.
    """
    candidates = [
        node
        for node in joint.nodes
        if isinstance(node.target, _torch.OpOverload)
        and node.target.namespace not in KNOWN_NAMESPACES
        and not _torch.is_wait(node.target)
        and _is_of_forward(node, joint, storages)
    ]
    matched = {s: [node for node in candidates if s.matches(node)] for s in selectors}
    sentences = (f"{s} holds for {len(found)} operations" for s, found in matched.items())
    return frozenset(node for found in matched.values() for node in found), tuple(sentences)


def with_selected(
    constraints: Constraints,
    joint: JointGraph,
    storages: Storages,
    selectors: Iterable[Selector],
    *,
    must_match: Iterable[Selector] = (),
    inlined: frozenset[fx.Node] = frozenset(),
) -> Constraints:
    """The constraints with what the user selected.

    Args:
        constraints: those of the graph.
        joint: the graph.
        storages: its storages.
        selectors: what to save and what to recompute.
        must_match: those of them that have to match something in this graph.
        inlined: nodes that the compiler computes inside their consumers. They are no values, and
            a module's are left so; an operator that is named gets a value to save.

    Raises:
        SteeringError: if one of those matches nothing, if a value is to be both saved and
            recomputed, or if all that is to be recomputed may run only once.
    """
    makers = [node for node in joint.nodes if _is_of_forward(node, joint, storages)]
    by: dict[str, dict[fx.Node, Selector]] = {"save": {}, "recompute": {}}
    asked = []
    for selector in selectors:
        matched = [node for node in makers if selector.matches(node)]
        if not matched and selector in must_match:
            raise no_match(selector, _names(makers, selector))
        chosen = [n for n in matched if n not in inlined or selector.is_operator]
        sentence = f"{selector} holds for {len(chosen)} operations"
        if selector.keyword == "recompute":
            kept = {n: why for n in matched if (why := _obstacle(n, constraints, storages))}
            reasons = "; ".join(dict.fromkeys(f"{n.target} {why}" for n, why in kept.items()))
            if matched and len(kept) == len(matched):
                raise SteeringError(
                    f"{selector} cannot be done: {reasons}. Drop it, or select something else."
                )
            chosen = [node for node in chosen if node not in kept]
            sentence = f"{selector} holds for {len(chosen)} operations"
            sentence += f", not for {len(kept)} that run once: {reasons}" if kept else ""
        by[selector.keyword].update(dict.fromkeys(chosen, selector))
        asked.append(sentence)
    for node in by["save"].keys() & by["recompute"].keys():
        raise SteeringError(
            f"{by['save'][node]} and {by['recompute'][node]} both select {node.name} "
            f"({node.target}, module {module_path(node) or 'of the model itself'}): a value is "
            "saved or recomputed, not both. Narrow one of the patterns."
        )
    save = {name for node in by["save"] for name in storages.made_by[node]}
    recompute = {name for node in by["recompute"] for name in storages.made_by[node]}
    return replace(
        constraints,
        must_save=constraints.must_save | save,
        must_recompute=(constraints.must_recompute | recompute) - save,
        checkpointed=constraints.checkpointed - recompute - save,
        asked=tuple(asked),
    )


def _is_of_forward(node: fx.Node, joint: JointGraph, storages: Storages) -> bool:
    """Whether the user's forward makes a value there."""
    if node.op != "call_function" or node in joint.backward or not storages.made_by[node]:
        return False
    return node in joint.forward or bool(module_calls(node))


def _obstacle(node: fx.Node, constraints: Constraints, storages: Storages) -> str | None:
    """Why a node cannot run again; None if it can."""
    if node in constraints.run_once:
        return constraints.run_once[node]
    if not constraints.must_save.isdisjoint(storages.made_by[node]):
        return "makes a value that torch, or the model's own checkpoint policy, has to save"
    return None


def _names(nodes: Iterable[fx.Node], selector: Selector) -> list[str]:
    if selector.is_operator:
        return [str(node.target) for node in nodes]
    return [call.path for node in nodes for call in module_calls(node)]
