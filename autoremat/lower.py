"""From the joint graph to the solver's problem, and back from operation names to nodes.

Enters: a `JointGraph`, its storages, constraints and costs. Leaves: a `Lowered`: the torch-free
`Problem` and which node each operation stands for. Nodes that allocate nothing (views, symbols,
elements of tuples; with Inductor also what it inlines into its consumers) are no operations:
the rewrite derives them again wherever they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from autoremat_solver import Op, Phase, Plan, Problem, Value
from torch import fx

from autoremat import _torch
from autoremat.capture import JointGraph
from autoremat.constraints import Constraints
from autoremat.cost import OpCost, tensor_spec
from autoremat.storage import Storages

LOSS_BOUNDARY = "backward_begins"
LATER_GRADIENTS = "gradients_of_later_graphs"
GRADIENTS_LAID_OUT = "gradients_laid_out"
OPTIMIZER_STEP = "optimizer_step"
RNG_STATE = "#rng_state"  # ends the names of values that are states of generators
SCALAR_NBYTES = 512  # a number takes a whole block on CUDA
MARKERS = frozenset(
    {LOSS_BOUNDARY, GRADIENTS_LAID_OUT, OPTIMIZER_STEP}
)  # operations that no node stands for


@dataclass(frozen=True)
class Lowered:
    """A problem and the nodes behind it.

    Attributes:
        problem: what the solver sees.
        node_of: the node that each operation's name stands for (not the boundary).
        storages: as found in the joint graph; their bytes are those of the problem's values.
        derived: nodes that are no operations: made again wherever they are read.
    """

    problem: Problem
    node_of: Mapping[str, fx.Node]
    storages: Storages
    derived: frozenset[fx.Node]


def lower(
    joint: JointGraph,
    storages: Storages,
    constraints: Constraints,
    costs: Mapping[fx.Node, OpCost],
    *,
    resident_nbytes: int,
    optimizer_nbytes: int = 0,
    inlined: frozenset[fx.Node] = frozenset(),
) -> Lowered:
    """The solver's problem for a joint graph.

    Args:
        joint: the graph.
        storages: its storages.
        constraints: what may not be recomputed, or must be.
        costs: time and workspace per operation node.
        resident_nbytes: bytes that are live during the whole step.
        optimizer_nbytes: bytes that the optimizer's step takes for itself after the backward.
        inlined: nodes that the compiler computes inside their consumers.
    """
    derived = frozenset(
        node
        for node in joint.nodes
        if node.op == "get_attr"
        or (node.op == "call_function" and (node in inlined or _allocates_nothing(node, storages)))
    )
    reads = _Reads(storages, derived)
    forward, backward = _in_step_order(joint, derived)
    optimizer = Op(
        OPTIMIZER_STEP, (), (), 0.0, optimizer_nbytes, Phase.BACKWARD, recomputable=False
    )
    ops = (
        *(_op(node, joint, storages, constraints, costs, reads) for node in forward),
        _boundary(joint, storages),
        *_layout(joint, storages),
        *(_op(node, joint, storages, constraints, costs, reads) for node in backward),
        *([optimizer] if optimizer_nbytes else []),
    )
    nodes = (*forward, *backward)
    rng_states = [_rng_state_of(op.name) for op in ops if _rng_state_of(op.name) in op.outputs]
    outputs = tuple(dict.fromkeys([*_handed_out(ops, joint, storages, reads), *rng_states]))
    storages = replace(storages, nbytes=_sizes(nodes, storages, costs))
    sizes = storages.nbytes | dict.fromkeys(rng_states, _torch.rng_state_nbytes())
    values = tuple(
        Value(
            name,
            sizes[name],
            must_save=name in constraints.must_save,
            must_recompute=name in constraints.must_recompute and name not in outputs,
        )
        for op in ops
        for name in op.outputs
    )
    problem = Problem(values, ops, outputs, resident_nbytes)
    return Lowered(problem, {node.name: node for node in nodes}, storages, derived)


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
        return replace(known, inputs=reads.of(node))

    forward, backward = _in_step_order(joint, derived)
    boundary = [op for op in problem.ops if op.name in (LOSS_BOUNDARY, GRADIENTS_LAID_OUT)]
    optimizer = [op for op in problem.ops if op.name == OPTIMIZER_STEP]
    ops = (*map(op, forward), *boundary, *map(op, backward), *optimizer)
    new = (Value(n, storages.nbytes[n]) for node in buffers for n in storages.made_by[node])
    node_of = {node.name: node for node in (*forward, *backward)}
    problem = replace(problem, ops=ops, values=(*problem.values, *new))
    return Lowered(problem, node_of, storages, derived)


def with_later_graphs(
    lowered: Lowered, *, gradients_nbytes: int = 0, room_nbytes: int = 0
) -> Lowered:
    """The same for a graph between whose forward and backward others of the step run.

    Args:
        lowered: of a graph without others.
        gradients_nbytes: what the others' backwards return, live until the step's end.
        room_nbytes: what they take while they run, beside what crosses from forward to backward.
    """
    problem = lowered.problem
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    made_nbytes = sum(problem.value_by_name[name].nbytes for name in boundary.outputs)
    new = (LATER_GRADIENTS,) if gradients_nbytes else ()
    later = replace(
        boundary,
        outputs=(*boundary.outputs, *new),
        workspace_nbytes=max(0, room_nbytes - made_nbytes - gradients_nbytes),
    )
    problem = replace(
        problem,
        ops=tuple(later if op is boundary else op for op in problem.ops),
        values=(*problem.values, *(Value(name, gradients_nbytes) for name in new)),
        outputs=(*problem.outputs, *new),
    )
    return replace(lowered, problem=problem)


def room_nbytes(problem: Problem) -> int:
    """What the problem leaves free for later graphs, beside what it makes at the boundary."""
    return problem.op_by_name[LOSS_BOUNDARY].workspace_nbytes


def without_room(problem: Problem) -> Problem:
    """The problem without what it leaves free for later graphs: what the graph itself takes."""
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    alone = replace(boundary, workspace_nbytes=0)
    return replace(problem, ops=tuple(alone if op is boundary else op for op in problem.ops))


def _boundary(joint: JointGraph, storages: Storages) -> Op:
    """The loss, between forward and backward: it makes the incoming gradients."""
    tangents = dict.fromkeys(
        name
        for node in joint.tangents
        for name in storages.of_node[node]
        if name not in storages.resident
    )
    return Op(LOSS_BOUNDARY, (), tuple(tangents), 0.0, 0, Phase.BACKWARD, recomputable=False)


def _layout(joint: JointGraph, storages: Storages) -> Iterator[Op]:
    """What AOTAutograd does before a backward whose incoming gradients are not contiguous.

    It copies those that arrive so, and frees none of them before all are copied.
    """
    permuted = [node for node in joint.tangents if not _is_contiguous(_torch.fake_value(node))]
    nbytes = storages.total_nbytes(permuted)
    if nbytes:
        yield Op(GRADIENTS_LAID_OUT, (), (), 0.0, nbytes, Phase.BACKWARD, recomputable=False)


def _is_contiguous(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    spec = tensor_spec(value)
    return spec.stride == torch.empty(spec.shape, device="meta").stride()


def layout_nbytes(problem: Problem) -> int:
    """Bytes of incoming gradients that are there twice while they are laid out."""
    found = problem.op_by_name.get(GRADIENTS_LAID_OUT)
    return 0 if found is None else found.workspace_nbytes


def _handed_out(
    ops: Sequence[Op], joint: JointGraph, storages: Storages, reads: _Reads
) -> Iterator[str]:
    """What operations make of the step's results, and of what its caller holds."""
    made = {name for op in ops for name in op.outputs}
    for node in (*joint.fwd_outputs, *held_tangents(joint, storages), *joint.bwd_outputs):
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
    return Plan(tuple(op.name for op in problem.ops))


def without_spare_states(problem: Problem, plan: Plan) -> Problem:
    """The problem with generator states counted only where an operation is replayed from them."""
    runs = Counter(plan.schedule)
    return without_states(problem, [name for name in problem.op_by_name if runs[name] <= 1])


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
