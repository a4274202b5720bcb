"""From the joint graph to the solver's problem, and back from operation names to nodes.

Enters: a `JointGraph`, its storages, constraints and costs. Leaves: a `Lowered`: the torch-free
operations, the `Shell` around them, and which node each operation stands for. Nodes that allocate
nothing (views, symbols, elements of tuples; with Inductor also what it inlines into its consumers)
are no operations: the rewrite derives them again wherever they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from autoremat_solver import Op, Phase, Plan, Problem, Value
from torch import fx

from autoremat import _torch
from autoremat.cost.calls import OpCost, tensor_spec
from autoremat.graph.constraints import Constraints
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.storages import Storages
from autoremat.problem.shell import Operations, Shell

RNG_STATE = "#rng_state"  # ends the names of values that are states of generators
SCALAR_NBYTES = 512  # a number takes a whole block on CUDA


@dataclass(frozen=True)
class Lowered:
    """A graph's operations in their shell, and the nodes behind them.

    Attributes:
        graph: its own operations.
        shell: what stands around them.
        node_of: the node that each of these operations stands for, by name.
        storages: as found in the joint graph; their bytes are those of the problem's values.
        derived: nodes that are no operations: made again wherever they are read.
        fixed_nbytes: by operation, how much of its workspace is the same at all sizes.
    """

    graph: Operations
    shell: Shell
    node_of: Mapping[str, fx.Node]
    storages: Storages
    derived: frozenset[fx.Node]
    fixed_nbytes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def problem(self) -> Problem:
        """What the solver sees."""
        return self.shell.around(self.graph)


def shell_of(
    joint: JointGraph, storages: Storages, *, resident_nbytes: int, optimizer_nbytes: int = 0
) -> Shell:
    """What stands around a graph that is alone in its step.

    Args:
        joint: the graph.
        storages: its storages.
        resident_nbytes: bytes that are live during the whole step.
        optimizer_nbytes: bytes that the optimizer's step takes for itself after the backward.
    """
    return Shell(
        tangents={name: storages.nbytes[name] for name in _tangents(joint, storages)},
        held=tuple(n for node in held_tangents(joint, storages) for n in storages.of_node[node]),
        layout_nbytes=_layout_nbytes(joint, storages),
        resident_nbytes=resident_nbytes,
        optimizer_nbytes=optimizer_nbytes,
    )


def lower(
    joint: JointGraph,
    storages: Storages,
    constraints: Constraints,
    costs: Mapping[fx.Node, OpCost],
    shell: Shell,
    *,
    inlined: frozenset[fx.Node] = frozenset(),
) -> Lowered:
    """A joint graph's operations, in its shell.

    Args:
        joint: the graph.
        storages: its storages.
        constraints: what may not be recomputed, or must be.
        costs: time and workspace per operation node.
        shell: what stands around it.
        inlined: nodes that the compiler computes inside their consumers.
    """
    derived = frozenset(
        node
        for node in joint.nodes
        if node.op == "get_attr"
        or (node.op == "call_function" and (node in inlined or _allocates_nothing(node, storages)))
    )
    forward, backward = _in_step_order(joint, derived)
    nodes = (*forward, *backward)
    storages = replace(storages, nbytes=_sizes(nodes, storages, costs))
    reads = _Reads(storages, derived)
    first, second = (
        tuple(_op(node, joint, storages, constraints, costs, reads) for node in part)
        for part in (forward, backward)
    )
    rng_states = [n for op in (*first, *second) for n in op.outputs if n == _rng_state_of(op.name)]
    made = {name for op in (*first, *second) for name in op.outputs} | shell.tangents.keys()
    outputs = tuple(dict.fromkeys([*_handed_out(made, joint, reads), *rng_states]))
    sizes = storages.nbytes | dict.fromkeys(rng_states, _torch.rng_state_nbytes())
    values = {
        name: Value(
            name,
            sizes[name],
            must_save=name in constraints.must_save,
            must_recompute=name in constraints.must_recompute and name not in outputs,
        )
        for op in (*first, *second)
        for name in op.outputs
    }
    graph = Operations(first, second, values, outputs)
    return Lowered(graph, shell, {node.name: node for node in nodes}, storages, derived)


def with_buffers(lowered: Lowered, joint: JointGraph, buffers: Collection[fx.Node]) -> Lowered:
    """The same where nodes that were expected to be inlined take memory all the same.

    Computing them takes no time of its own: it is counted where they are read.
    """
    storages, problem = lowered.storages, lowered.problem
    derived = lowered.derived.difference(buffers)
    reads = _Reads(storages, derived)

    def op(node: fx.Node) -> Op:
        known = problem.op_by_name.get(node.name)
        if known is None:
            known = Op(node.name, (), storages.made_by[node], 0.0, 0, _phase(node, joint))
        inputs = reads.of(node)
        overwrites = tuple(name for name in known.overwrites if name in inputs)
        return replace(known, inputs=inputs, overwrites=overwrites)

    forward, backward = _in_step_order(joint, derived)
    new = {n: Value(n, storages.nbytes[n]) for node in buffers for n in storages.made_by[node]}
    graph = replace(
        lowered.graph,
        forward=tuple(map(op, forward)),
        backward=tuple(map(op, backward)),
        values={**lowered.graph.values, **new},
    )
    node_of = {node.name: node for node in (*forward, *backward)}
    return replace(lowered, graph=graph, node_of=node_of, derived=derived)


def _tangents(joint: JointGraph, storages: Storages) -> list[str]:
    """Storages of the incoming gradients."""
    names = dict.fromkeys(name for node in joint.tangents for name in storages.of_node[node])
    return [name for name in names if name not in storages.resident]


def _layout_nbytes(joint: JointGraph, storages: Storages) -> int:
    """What AOTAutograd does before a backward whose incoming gradients are not contiguous.

    It copies those that arrive so, and frees none of them before all are copied.
    """
    permuted = [node for node in joint.tangents if not _is_contiguous(_torch.fake_value(node))]
    return storages.total_nbytes(permuted)


def _is_contiguous(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    return tensor_spec(value).is_contiguous


def _handed_out(made: Collection[str], joint: JointGraph, reads: _Reads) -> Iterator[str]:
    """Of what is made in the step, its results."""
    for node in (*joint.fwd_outputs, *joint.bwd_outputs):
        yield from (name for name in reads.storages_behind(node) if name in made)


def _sizes(
    nodes: Sequence[fx.Node], storages: Storages, costs: Mapping[fx.Node, OpCost]
) -> dict[str, int]:
    """Bytes of each storage, with what an operator leaves in it beyond its result."""
    sizes = dict(storages.nbytes)
    for node in nodes:
        for name in storages.made_by[node][:1]:
            sizes[name] = max(sizes[name], storages.fake_nbytes[name] + costs[node].excess_nbytes)
    return sizes


def as_written(problem: Problem) -> Plan:
    """Every operation once, in the problem's order: the step without recompute."""
    return Plan.of(op.name for op in problem.ops)


def without_spare_states(problem: Problem, plan: Plan) -> Problem:
    """The problem with generator states counted only where an operation is replayed from them."""
    return without_states(problem, problem.op_by_name.keys() - plan.recomputed)


def without_states(problem: Problem, ops: Iterable[str] | None = None) -> Problem:
    """The problem in which generator states take nothing: of these operations, or of all."""
    spare = {_rng_state_of(name) for name in (problem.op_by_name if ops is None else ops)}
    values = tuple(
        replace(value, nbytes=0) if value.name in spare else value for value in problem.values
    )
    return replace(problem, values=values)


def held_tangents(joint: JointGraph, storages: Storages) -> list[fx.Node]:
    """Incoming gradients that somebody holds until the backward ends.

    The gradient of a loss is held by the `backward()` call that made it; the others are freed
    after their last use where torch hands them over.
    """
    return [
        node
        for node in joint.tangents
        if not _torch.tangents_are_freed()
        or sum(storages.nbytes[name] for name in storages.of_node[node]) <= SCALAR_NBYTES
    ]


def _allocates_nothing(node: fx.Node, storages: Storages) -> bool:
    """Views, elements of tuples and arithmetic on symbols."""
    if storages.made_by[node]:
        return False
    if _torch.is_getitem(node) or not isinstance(node.target, _torch.OpOverload):
        return True
    return not node.is_impure() and not _torch.is_mutable(node.target)


class _Reads:
    """Storages that reading a node reads, seen through the nodes that are derived on demand."""

    def __init__(self, storages: Storages, derived: frozenset[fx.Node]) -> None:
        self._storages = storages
        self._derived = derived
        self._behind: dict[fx.Node, tuple[str, ...]] = {}

    def storages_behind(self, node: fx.Node) -> tuple[str, ...]:
        if node not in self._behind:
            names = [n for n in self._storages.of_node[node] if not self._is_inlined(node)]
            if self._is_inlined(node):
                for source in node.all_input_nodes:
                    names.extend(self.storages_behind(source))
            self._behind[node] = tuple(dict.fromkeys(names))
        return self._behind[node]

    def _is_inlined(self, node: fx.Node) -> bool:
        """Derived although it makes a storage, or a view of such a node."""
        if node not in self._derived or node.op == "get_attr":
            return False
        if self._storages.made_by[node]:
            return True
        return any(
            self._is_inlined(source)
            for source in node.all_input_nodes
            if set(self._storages.of_node[source]) & set(self._storages.of_node[node])
        )

    def of(self, node: fx.Node) -> tuple[str, ...]:
        """Storages that running the node reads, resident ones left out."""
        names = (n for source in node.all_input_nodes for n in self.storages_behind(source))
        return tuple(n for n in dict.fromkeys(names) if n not in self._storages.resident)


def _in_step_order(
    joint: JointGraph, derived: frozenset[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """Operation nodes of the forward part and of the backward part, each in graph order."""
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    in_backward = False
    for node in joint.nodes:
        if node.op != "call_function" or node in derived:
            continue
        if node in joint.backward:
            in_backward = True
            backward.append(node)
        elif node in joint.forward or not in_backward:
            forward.append(node)
        else:
            backward.append(node)
    return forward, backward


def _rng_state_of(op_name: str) -> str:
    """The value that holds the generator's state from which a random operation is replayed."""
    return f"{op_name}{RNG_STATE}"


def _op(
    node: fx.Node,
    joint: JointGraph,
    storages: Storages,
    constraints: Constraints,
    costs: Mapping[fx.Node, OpCost],
    reads: _Reads,
) -> Op:
    phase = _phase(node, joint)
    cost = costs[node]
    rng_state = (_rng_state_of(node.name),) if node in constraints.replayed else ()
    return Op(
        name=node.name,
        inputs=reads.of(node),
        outputs=(*storages.made_by[node], *rng_state),
        time_us=cost.time_us,
        workspace_nbytes=cost.workspace_nbytes,
        phase=phase,
        recomputable=phase is not Phase.BACKWARD and node not in constraints.run_once,
    )


def _phase(node: fx.Node, joint: JointGraph) -> Phase:
    if node in joint.backward:
        return Phase.BACKWARD
    return Phase.FORWARD if node in joint.forward else Phase.EITHER
