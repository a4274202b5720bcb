"""Which value of a planned step is the first that is not the one of the step without recompute.

Enters: a session whose step does not give what it should, and how to run that step. Leaves: an
`Explanation`. The planned modules and, on the same inputs, random state and incoming gradients,
the joint graph that they were made from run operation by operation, and each planned value is
compared with the joint graph's, in the order in which the plan makes them. On the CPU they are
equal bit for bit; elsewhere operations may round in another way each time.

Every value of both is kept until the step ends: this may take far more memory than the budget.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.backend import with_own_code
from autoremat.emit.op_by_op import compile_eager
from autoremat.emit.planned_graph import PlannedGraph, fingerprint
from autoremat.emit.torch_split import Modules
from autoremat.explain.places import op_name, source_of
from autoremat.graph.joint_graph import ORIGIN, JointGraph
from autoremat.session.session import Session
from autoremat.verification.tensor_error import absolute_error, largest, relative_error

aten = torch.ops.aten

_PART = "autoremat_part"  # on a module's output: which graph, and whether it is its backward
_UNDEFINED = frozenset(  # operators whose results hold whatever was in memory before
    {
        aten.empty,
        aten.empty_like,
        aten.empty_permuted,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """A planned value that is not what the graph without recompute computes.

    Attributes:
        value: its name in the joint graph.
        op: the operator that makes it.
        source: the user's line, as "model.py:88"; "" where it is not known.
        is_recomputed: whether it is a copy that is computed again for the backward; if so, the
            first run was right.
        error: largest absolute error over the largest element.
    """

    value: str
    op: str
    source: str
    is_recomputed: bool
    error: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a step differs.

    Attributes:
        difference: the first planned value that is wrong; None if none is.
        sentence: the same in words, or where else the difference comes from.
    """

    difference: FirstDifference | None
    sentence: str


def explain_difference(
    session: Session, call: Callable[..., Any], agrees: Callable[[Callable[..., Any]], bool]
) -> Explanation:
    """Run a planned step once more, op by op, beside the same step without recompute.

    Args:
        session: planned the step.
        call: the module's own call, uncompiled.
        agrees: runs forward and backward with the call that it is given, and tells whether that
            gives what it should.
    """
    recorder = _Recorder(session)
    try:
        right = agrees(_torch.compile_apart(with_own_code(call), recorder.compile))
    except Exception as error:  # the verification itself has its result: it must not get lost
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return Explanation(None, f"Its first value is not known: run op by op, it fails ({what}).")
    is_compiled = session.options.setting.compiler == "inductor"
    return Explanation(recorder.difference, _in_words(recorder, is_compiled and right))


def _in_words(recorder: _Recorder, only_compiled: bool) -> str:
    found = recorder.difference
    if found is not None:
        where = f"{found.op}, {found.source}" if found.source else found.op
        which = "recomputed for the backward" if found.is_recomputed else "in its first run"
        return (
            f"The first value that differs from the step without recompute is {found.value} "
            f"({where}), {which}: by {found.error:.2g} of its largest element."
        )
    if not recorder.compared:
        return "No planned value could be compared: no planned graph was captured again."
    left = f" ({recorder.unknown} graphs have no plan)" if recorder.unknown else ""
    fact = f"No planned value differs from the step without recompute{left}"
    if not only_compiled:
        return f"{fact}: what torch captures is not the eager step."
    return (
        f"{fact}, and run op by op the plan gives what it should; compiled by Inductor it does "
        "not: kernels round otherwise or are wrong. torch.compile(model) shows whether they are "
        "without a plan."
    )


class _Recorder:
    """Compiles graphs so that they compare themselves with what they were made from.

    Attributes:
        difference: the first one, once the step has run.
        compared: how many values were compared.
        unknown: graphs that were captured and have no plan in the session.
    """

    def __init__(self, session: Session) -> None:
        self.difference: FirstDifference | None = None
        self.compared = 0
        self.unknown = 0
        self._session = session
        self._left = {key: list(found) for key, found in session.planned.items()}
        self._graphs: list[PlannedGraph] = []
        self._under_way: dict[int, list[_Reference]] = defaultdict(list)

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """One Dynamo graph: the body of a `torch.compile` backend."""
        return self._session.capturing.compile(
            module, example_inputs, self, executor=self._executor
        )

    def partition(self, module: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Modules:
        """The modules that the session made of this graph."""
        plans = self._left.get(fingerprint(module))
        if plans is None:
            self.unknown += 1
            return self._session.capturing.split_as_torch(
                module, joint_inputs, keywords["num_fwd_outputs"], graph=_torch.compile_name()
            )
        graph = plans.pop(0) if len(plans) > 1 else plans[0]
        modules = graph.copied()
        for part, is_backward in ((modules.forward, False), (modules.backward, True)):
            part.graph.output_node().meta[_PART] = (len(self._graphs), is_backward)
        self._graphs.append(graph)
        return modules.forward, modules.backward

    def _executor(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **_keywords: Any
    ) -> Callable[..., Any]:
        part = module.graph.output_node().meta.get(_PART)
        if part is None:
            return compile_eager(module, example_inputs)
        number, is_backward = part

        def run(arguments: list[Any]) -> Any:
            reference = self._reference(number, is_backward)
            named = dict(zip(_inputs(module), arguments, strict=True))
            arguments.clear()
            reference.advance({node.name: value for node, value in named.items()}, is_backward)
            return self._compared(module, named, reference)

        return _torch.as_boxed(run)

    def _reference(self, number: int, is_backward: bool) -> _Reference:
        """The latest forward has the first backward, as autograd runs them."""
        if is_backward:
            return self._under_way[number].pop()
        reference = _Reference(self._graphs[number].joint)
        self._under_way[number].append(reference)
        return reference

    def _compared(
        self, module: fx.GraphModule, named: dict[fx.Node, Any], reference: _Reference
    ) -> Any:
        """The module's results, each of its values held against the reference's."""
        values = dict(named)
        before = frozenset(reference.made)
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            if node.op != "placeholder":
                values[node] = _evaluated(module, node, values)
                reference.made.add(_origin_of(node))
            if self.difference is None:
                self.difference = self._difference(node, values[node], reference, before)
        return fx.map_arg(module.graph.output_node().args[0], values.__getitem__)

    def _difference(
        self, node: fx.Node, ours: Any, reference: _Reference, before: frozenset[str]
    ) -> FirstDifference | None:
        origin = reference.node_of.get(_origin_of(node))
        theirs = reference.values.get(origin) if origin is not None else None
        if origin is None or getattr(origin.target, "overloadpacket", None) in _UNDEFINED:
            return None
        if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
            return None
        self.compared += 1
        error = _error(theirs, ours)
        if error <= (0.0 if ours.device.type == "cpu" else _tolerance(ours.dtype)):
            return None
        return FirstDifference(
            value=origin.name,
            op=op_name(_operation_of(origin)),
            source=source_of(origin),
            is_recomputed=node.op != "placeholder" and _origin_of(_operation_of(node)) in before,
            error=error,
        )


class _Reference:
    """The joint graph of one call, run in its own order: each operation once.

    Attributes:
        values: what its nodes compute.
        node_of: its nodes by name, but for inputs that the step overwrites.
        made: names of nodes that the plan has run so far.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.node_of = {n.name: n for n in joint.nodes if n not in joint.overwritten}
        self.made: set[str] = set()
        self._joint = joint

    def advance(self, inputs: Mapping[str, Any], is_backward: bool) -> None:
        """Run the forward or the backward part on these inputs; what it knows by itself is left.

        Inputs are copied, so that an update of one is not made twice, and random numbers are drawn
        from a copy of the generators.
        """
        fresh = [
            node
            for node in self._joint.module.graph.find_nodes(op="placeholder")
            if node.name in inputs and node not in self.values
        ]
        copies = _in_own_memory([inputs[node.name] for node in fresh])
        self.values |= dict(zip(fresh, copies, strict=True))
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for node in self._joint.nodes:
                runs = node.op in ("call_function", "get_attr") and node not in self.values
                if runs and (is_backward or node not in self._joint.backward):
                    self.values[node] = _evaluated(self._joint.module, node, self.values)


def _origin_of(node: fx.Node) -> str:
    return str(node.meta.get(ORIGIN, ""))


def _operation_of(node: fx.Node) -> fx.Node:
    """The node behind elements of its tuple of results."""
    while _torch.is_getitem(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _evaluated(module: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    target: Any = node.target
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
    return target(*args, **kwargs)


def _in_own_memory(values: Sequence[Any]) -> list[Any]:
    """Copies that lie as the originals do; those that share a storage share one again."""
    storages: dict[int | None, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = _torch.storage_key(value)
        if key is None or value.is_conj() or value.is_neg():
            return value.clone()
        if key not in storages:
            storages[key] = value.untyped_storage().clone()
        copy = torch.empty(0, dtype=value.dtype, device=value.device)
        return copy.set_(storages[key], value.storage_offset(), value.size(), value.stride())

    return [copied(value) for value in values]


def _error(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Relative to the largest element; whoever hides a sum from fusion adds extents of one."""
    if ours.dtype != theirs.dtype or ours.numel() != theirs.numel():
        return float("inf")
    if ours.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    error = absolute_error(theirs, ours.reshape(theirs.shape))
    return relative_error(error, largest(theirs)) if error else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    """What two runs of one operation on an accelerator may differ by, sums in another order."""
    return 1e3 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
