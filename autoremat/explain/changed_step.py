"""A step as it would be if the user changed the model: for the figures of advice.

Enters: a stated graph, and a problem and a plan of it. Leaves: another problem, and the plan that
runs the same operations of it in the same order. Guarantees: what a changed model would not run is
not run, what it would not hold is not held; a change that cannot be made of a graph by these rules
raises `CannotChange`, and nothing is told of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from autoremat_solver import Op, Phase, Plan, Problem, Value, simulate
from torch import fx

from autoremat import _torch
from autoremat.graph.joint_graph import JointGraph
from autoremat.planning.figures import gradients_by_input
from autoremat.problem.shell import GRADIENTS_LAID_OUT, LOSS_BOUNDARY, MARKERS
from autoremat.problem.subject import Subject

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
# These work row by row, beside what works number by number, and what reduces along rows.
_BY_ROWS = frozenset(
    {
        "_to_copy", "_unsafe_view", "alias", "clone", "constant_pad_nd", "convert_element_type",
        "detach", "gather", "nll_loss_forward", "reshape", "slice", "squeeze", "unsqueeze", "view",
    }
)  # fmt: skip
_ALONG = frozenset({"_log_softmax", "_softmax", "amax", "logsumexp", "max", "mean", "sum"})


class CannotChange(ValueError):
    """The graph has something that these rules do not know."""


@dataclass(frozen=True)
class Step:
    """A problem, and a plan of it."""

    problem: Problem
    plan: Plan

    @cached_property
    def peak_nbytes(self) -> int:
        """By the simulator."""
        return simulate(self.problem, self.plan).peak_nbytes


@dataclass(frozen=True)
class Head:
    """The product that a loss is computed from.

    Attributes:
        node: the product.
        shape: of it: rows and columns.
    """

    node: fx.Node
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Such as tokens."""
        return self.shape[0]


# --- only the loss is returned --------------------------------------------------------------------


def results_beside_loss(subject: Subject) -> list[fx.Node]:
    """What the forward returns beside one loss; nothing where it has none, or several."""
    if _loss(subject) is None:
        return []
    resident = subject.lowered.storages.resident
    return [
        node
        for node in dict.fromkeys(subject.joint.fwd_outputs)
        if (shape := _shape(node)) and math.prod(shape) > 1
        if resident.isdisjoint(subject.lowered.storages.of_node[node])
    ]


def only_loss(subject: Subject, step: Step) -> Step:
    """The step of a model that returns nothing but its loss.

    A gradient that depends on the loss's alone stays; one that depends on others' alone is zero, as
    every backward is linear in them; and where one of each is added, the sum is the first.
    """
    storages = subject.lowered.storages
    loss = _loss(subject)
    assert loss is not None, "results are beside one"
    zero = {n for t in subject.joint.tangents if t is not loss[0] for n in storages.of_node[t]}
    dropped = {n for node in results_beside_loss(subject) for n in storages.of_node[node]}
    kept_as: dict[str, str] = {}
    ops: list[Op] = []
    for op in step.problem.ops:
        op = replace(op, inputs=_renamed(op.inputs, kept_as))
        op = replace(op, overwrites=tuple(n for n in op.overwrites if n in op.inputs))
        if op.name in MARKERS:
            ops.append(_without(op, zero, subject))
            continue
        rest = tuple(name for name in op.inputs if name not in zero)
        if len(rest) == len(op.inputs):
            ops.append(op)
        elif not any(step.problem.producer_of[n].phase is Phase.BACKWARD for n in rest):
            zero.update(op.outputs)
        elif _is_sum(subject, op) and len(rest) == 1:
            kept_as[op.outputs[0]] = rest[0]
        else:  # zeros that are read all the same
            overwrites = tuple(n for n in op.overwrites if n in rest)
            ops.append(replace(op, inputs=rest, overwrites=overwrites))
    outputs = _renamed(step.problem.outputs, kept_as)
    outputs = tuple(n for n in outputs if n not in zero and n not in dropped)
    return _alive(step, ops, outputs)


def _without(marker: Op, zero: set[str], subject: Subject) -> Op:
    """What stands between forward and backward, without gradients that are not handed in."""
    if marker.name == LOSS_BOUNDARY:
        return replace(marker, outputs=tuple(n for n in marker.outputs if n not in zero))
    if marker.name == GRADIENTS_LAID_OUT:
        return replace(marker, workspace_nbytes=0)  # a loss's is contiguous
    return marker


def _is_sum(subject: Subject, op: Op) -> bool:
    return subject.lowered.node_of[op.name].target in (aten.add.Tensor, aten.add_.Tensor)


def _renamed(names: Iterable[str], kept_as: Mapping[str, str]) -> tuple[str, ...]:
    def final(name: str) -> str:
        return final(kept_as[name]) if name in kept_as else name

    return tuple(dict.fromkeys(map(final, names)))


def _alive(step: Step, ops: list[Op], outputs: tuple[str, ...]) -> Step:
    """The step of these operations, without those whose results nobody reads."""
    read, kept = set(outputs), []
    for op in reversed(ops):
        if op.name in MARKERS or not op.outputs or not read.isdisjoint(op.outputs):
            kept.append(op)
            read.update(op.inputs)
    kept.reverse()
    made = {name for op in kept for name in op.outputs}
    problem = replace(
        step.problem,
        ops=tuple(kept),
        values=tuple(value for value in step.problem.values if value.name in made),
        outputs=outputs,
    )
    names = {op.name for op in kept}
    return Step(problem, Plan.of(name for name in step.plan.schedule if name in names))


# --- the loss by chunks ---------------------------------------------------------------------------


def head_of(subject: Subject) -> Head | None:
    """The largest product that the loss is computed from."""
    loss = _loss(subject)
    if loss is None:
        return None
    before, stack = set[fx.Node](), [loss[1]]
    while stack:
        node = stack.pop()
        if node not in before:
            before.add(node)
            stack.extend(node.all_input_nodes)
    products = [node for node in before if node.target in _PRODUCTS]
    if not products:
        return None
    node = max(products, key=numel)
    return Head(node, _shape(node) or ())


def chunked(subject: Subject, step: Step, head: Head, chunks: int, *, is_fused: bool) -> Step:
    """The step of a model that computes its head and its loss for some rows at a time.

    Each chunk is a checkpointed region: its forward runs once more, right before its backward. One
    chunk stands for all, as all take the same; beside it are the gradients of the head's weight and
    of its input that the chunks before have left.

    Args:
        subject: the graph.
        step: the step to change.
        head: what `head_of` finds in it.
        chunks: how many.
        is_fused: whether a compiler adds all chunks' gradients of the weight in one kernel, as
            Inductor does: then all are there. Else each is added to the sum of those before it.

    Raises:
        CannotChange: if rows depend on each other.
    """
    storages, wide = subject.lowered.storages, numel(head.node) // 2
    forward = _rows_after(subject, head)
    backward, readers = _backward_of(subject, forward, wide)
    narrowed = {
        name
        for node in (*forward, *backward)
        if numel(node) >= wide
        for name in storages.of_node[node]
    }
    of_weight, of_input = _gradients(subject, head, readers)
    weight_nbytes, hidden_nbytes = (
        storages.total_nbytes([node] if node else []) for node in (of_weight, of_input)
    )
    left_nbytes = hidden_nbytes * (chunks - 1) // chunks
    left_nbytes += weight_nbytes * (chunks - 1 if is_fused else 1)
    is_of = {node.name: node for node in (*forward, *backward, *readers)}
    chunk_nbytes = -(-storages.total_nbytes([head.node]) // chunks)

    def op_of(op: Op) -> Op:
        node = is_of.get(op.name)
        if node is None:
            return op
        workspace_nbytes = -(-op.workspace_nbytes // chunks) + left_nbytes
        if node is of_weight and not is_fused:
            # The sum of what is there and what comes is made beside both.
            workspace_nbytes += max(0, weight_nbytes - chunk_nbytes)
        return replace(op, workspace_nbytes=workspace_nbytes)

    def value_of(value: Value) -> Value:
        is_narrow = value.name in narrowed
        return replace(value, nbytes=-(-value.nbytes // chunks)) if is_narrow else value

    problem = replace(
        step.problem,
        ops=tuple(map(op_of, step.problem.ops)),
        values=tuple(map(value_of, step.problem.values)),
    )
    again = {node.name for node in forward}
    after = {node.name for node in (*backward, *readers)}
    return Step(problem, Plan.of(_with_rerun(problem, step.plan, again, after)))


def _with_rerun(problem: Problem, plan: Plan, again: set[str], after: set[str]) -> Iterator[str]:
    """A schedule in which operations run once more right before the first that reads them."""
    wanted = {name for op in problem.ops if op.name in after for name in op.inputs}
    rerun = []
    for op in reversed(problem.ops):
        if op.name in again and not wanted.isdisjoint(op.outputs):
            rerun.append(op.name)
            wanted.update(op.inputs)
    rerun.reverse()
    seen: set[str] = set()
    for name in plan.schedule:
        if name in after:
            yield from rerun
            rerun = []
        if name not in again or name not in seen:
            yield name
        seen.add(name)


def _rows_after(subject: Subject, head: Head) -> list[fx.Node]:
    """The head and what the forward computes from it, if all of that goes row by row."""
    joint = subject.joint
    found, wide = {head.node: None}, numel(head.node) // 2
    for node in joint.nodes:
        if node in joint.backward or node.op != "call_function":
            continue
        sources = [source for source in node.all_input_nodes if source in found]
        if not sources or node is head.node:
            continue
        reads_wide = any(numel(source) >= wide for source in sources)
        if reads_wide and not _is_by_rows(node):
            raise CannotChange(f"{node.name} reads more than a row at a time")
        found[node] = None
    handed_out = set(joint.fwd_outputs) & found.keys()
    if any(numel(node) >= wide and node not in results_beside_loss(subject) for node in handed_out):
        raise CannotChange("what the loss is computed from is a result of its own")
    return list(found)


def _is_by_rows(node: fx.Node) -> bool:
    """Whether rows of what a node gives come from the same rows, or from all of them summed."""
    target = node.target
    if _torch.is_getitem(node):
        return True
    if not isinstance(target, _torch.OpOverload):
        return False
    if torch.Tag.pointwise in target.tags:
        return True
    name = target.name().split("::")[-1].split(".")[0]
    if name not in _ALONG:
        return name in _BY_ROWS
    last = len(_shape(node.all_input_nodes[0]) or ()) - 1
    given: Any = node.args[1] if len(node.args) > 1 else []
    dimensions = [given] if isinstance(given, int) else list(given or [])
    if not dimensions:
        return name in ("sum", "mean")  # of all rows
    return all(dimension in (-1, last) for dimension in dimensions)


def _backward_of(
    subject: Subject, forward: list[fx.Node], wide: int
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Backward nodes from the loss's gradient to the head's, and those that read that."""
    joint, loss = subject.joint, _loss(subject)
    assert loss is not None
    inside: dict[fx.Node, None] = {loss[0]: None}
    readers: dict[fx.Node, None] = {}
    for node in joint.nodes:
        sources = [source for source in node.all_input_nodes if source in inside]
        if node not in joint.backward or not sources or node.op != "call_function":
            continue
        is_wide = numel(node) >= wide
        if not is_wide and any(numel(source) >= wide for source in sources):
            readers[node] = None
        else:
            inside[node] = None
    del inside[loss[0]]
    return list(inside), list(readers)


def _gradients(
    subject: Subject, head: Head, readers: list[fx.Node]
) -> tuple[fx.Node | None, fx.Node | None]:
    """Of the products of the head's gradient, that with its input and that with its weight.

    Raises:
        CannotChange: if more is made of that gradient.
    """
    storages = subject.lowered.storages
    weight = {*storages.of_node[head.node.all_input_nodes[-1]]}
    found: dict[bool, fx.Node] = {}
    products = [node for node in readers if node.target in _PRODUCTS]
    for node in products:
        found[weight.isdisjoint(storages.read_by(node))] = node
    if not found or len(found) < len(products):
        raise CannotChange("more is computed from the head's gradient than two products")
    return found.get(True), found.get(False)


# --- of single nodes ------------------------------------------------------------------------------


def _loss(subject: Subject) -> tuple[fx.Node, fx.Node] | None:
    """The only incoming gradient that is one floating-point number, and its result.

    A number from which the gradients of few parameters come, such as a temperature, is no loss.
    """
    results = _torch.results_of_tangents(subject.joint.module.graph)
    losses = [node for node in subject.joint.tangents if _is_number(node) and node in results]
    if len(losses) != 1 or not _trains_most(subject.joint, losses[0]):
        return None
    return losses[0], results[losses[0]]


def _trains_most(joint: JointGraph, tangent: fx.Node) -> bool:
    made = {tangent}
    for node in joint.nodes:
        if not made.isdisjoint(node.all_input_nodes):
            made.add(node)
    gradients = gradients_by_input(joint)
    trained = [node for node in gradients if node in joint.static_inputs]
    count = sum(numel(node) for node in trained if gradients[node] in made)
    return 2 * count >= sum(map(numel, trained))


def _is_number(node: fx.Node) -> bool:
    value = _torch.fake_value(node)
    return isinstance(value, torch.Tensor) and not value.shape and value.is_floating_point()


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    """By hints; None of what is no tensor."""
    value = _torch.fake_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(map(_torch.size_hint, value.shape))


def numel(node: fx.Node) -> int:
    """How many numbers a node gives, by hints; 0 of what is no tensor."""
    shape = _shape(node)
    return 0 if shape is None else math.prod(shape)
