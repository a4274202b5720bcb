"""The joint graph written out along a plan: every recompute is a node of its own.

Enters: a `JointGraph`, what it was lowered to, and a `Plan`. Leaves: a `Rewritten`: a new joint
graph whose nodes stand in the plan's order, and the nodes to save between its two parts.
Guarantees: a repeated operation is a node `<name>_recomputed`, tagged as backward; where Inductor
orders loops, it is `<name>_recomputed_where_read`: nothing else tells caches of code the two apart.
The backward part reads forward values only through saved nodes; the original graph is not changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from autoremat_solver import Plan, Problem, Step, StepKind, simulate
from autoremat_solver.simulate import backward_start, saved_values
from torch import fx

from autoremat import _torch
from autoremat.graph.constraints import RUNNING_STATISTICS, Constraints, is_batch_norm_update
from autoremat.graph.joint_graph import JointGraph
from autoremat.host import operators
from autoremat.problem.lower import Lowered
from autoremat.problem.shell import MARKERS

aten = torch.ops.aten

RECOMPUTED = "_recomputed"  # in the name of every node that repeats an operation
_WHERE_READ = "_where_read"  # and behind it, for caches that know code by its nodes' names
_BACK_SUFFIX = re.compile(r"_reload(ed)?(_\d+)?$")  # of what a copy has brought back
_COPY_SUFFIX = re.compile(rf"{RECOMPUTED}({_WHERE_READ})?(_\d+)?$")


@dataclass(frozen=True)
class Rewritten:
    """A joint graph with explicit recompute nodes.

    Attributes:
        source: the joint graph that it was written from.
        module: the new joint graph.
        saved: its nodes that the forward hands to the backward (tensors and symbols; primals too).
    """

    source: fx.GraphModule
    module: fx.GraphModule
    saved: tuple[fx.Node, ...]


def rewrite(
    joint: JointGraph,
    lowered: Lowered,
    constraints: Constraints,
    plan: Plan,
    folder: str = "",
    *,
    in_order: bool = True,
) -> Rewritten:
    """Write the plan into a copy of the joint graph.

    Args:
        joint: the graph that was planned.
        lowered: its lowering.
        constraints: tells which operations replay their random state.
        plan: one that `check` accepts.
        folder: where values wait that it sends away.
        in_order: whether Inductor has to compute each loop of a backward that recomputes where the
            plan has it; else it computes it where it is first read.
    """
    simulate(lowered.problem, plan)  # raises where the plan reads what was never made
    writer = _Writer(joint, lowered, constraints, plan, folder, in_order=in_order)
    start = backward_start(lowered.problem, plan)
    for step in plan.steps[:start]:
        writer.run(step)
    writer.finish_forward()
    for step in plan.steps[start:]:
        writer.run(step)
    return writer.finish()


def repeats(module: fx.GraphModule) -> bool:
    """Whether a written module repeats an operation."""
    return any(RECOMPUTED in node.name for node in module.graph.nodes)


def original_name(name: str) -> str:
    """Of the node that a node of this name repeats; of any other, its own."""
    return _COPY_SUFFIX.sub("", name)


def value_name(name: str) -> str:
    """Of the value that a node of this name brings back from where it waited; else its own."""
    return _BACK_SUFFIX.sub("", name)


class _Writer:
    """Emits nodes in the plan's order and knows which copy of each node a read sees now."""

    def __init__(
        self,
        joint: JointGraph,
        lowered: Lowered,
        constraints: Constraints,
        plan: Plan,
        folder: str,
        *,
        in_order: bool,
    ) -> None:
        self._joint = joint
        self._in_order = in_order
        self._folder = folder
        self._away: dict[fx.Node, fx.Node] = {}  # copies of values elsewhere
        self._coming: dict[fx.Node, fx.Node] = {}  # those that are copied back, and from what
        self._returning = _returning(lowered.problem, plan)
        self._lowered = lowered
        self._repeated_random = {
            name for name in plan.recomputed if lowered.node_of.get(name) in constraints.replayed
        }
        later = plan.steps[backward_start(lowered.problem, plan) :]
        self._repeats = any(step.kind is StepKind.RECOMPUTE for step in later)
        self._crossing = saved_values(lowered.problem, plan)
        self._pinned = frozenset(lowered.problem.outputs)
        self._graph = fx.Graph()
        self._current: dict[fx.Node, fx.Node] = {}
        self._derived_from: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._rng_states: dict[str, fx.Node] = {}
        self._saved: dict[fx.Node, None] = {}
        self._results: list[Any] = []
        self._ran: set[str] = set()
        self._in_backward = False
        self._in_forward: frozenset[fx.Node] = frozenset()
        self._sizes_of = _sizes_of_operations(joint, lowered)
        for node in joint.module.graph.find_nodes(op="placeholder"):
            self._current[node] = self._graph.node_copy(node)
            self._current[node].meta = dict(node.meta)

    def run(self, step: Step) -> None:
        """Emit one run of an operation, or one copy."""
        if not step.is_run:
            self._copy(step)
        if step.target in MARKERS or not step.is_run:
            return
        node = self._lowered.node_of[step.target]
        repeat = step.kind is StepKind.RECOMPUTE
        self._ran.add(step.target)
        if repeat:
            self._forget_inlined(node)
        arguments = {source: self._read(source) for source in node.all_input_nodes}
        copy = self._emit(node, arguments.__getitem__, repeat)
        if self._in_order and self._in_backward and self._repeats:
            self._materialise(copy)
        self._bind(node, copy)
        if not self._in_backward:
            self._read_sizes(step.target)

    def _copy(self, step: Step) -> None:
        """Emit the operator of a copy; see `host.operators`."""
        node = self._lowered.storages.root[step.target]
        if step.kind is StepKind.OFFLOAD:
            source, target = self._read(node), operators.OFFLOAD
            self._away[node] = self._moved(node, target, (source, self._folder))
        elif step.kind is StepKind.RELEASE:
            args = (self._away[node], self._read(node))
            self._away[node] = self._moved(node, operators.OFFLOADED, args)
        else:
            self._coming[node] = self._away[node]
            args = (self._away[node], _torch.fake_value(node).device)
            self._current[node] = self._moved(node, operators.RELOAD, args)

    def _wait_for(self, node: fx.Node) -> None:
        args = (self._current[node], self._coming.pop(node))
        self._current[node] = self._moved(node, operators.RELOADED, args)

    def _moved(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """A node that gives what another does, elsewhere."""
        copy = self._tag(self._call(f"{node.name}_{target._opname}", target, args), node, False)
        fakes = fx.map_arg(args, _torch.fake_value)
        with _torch.fake_mode_of(_torch.fake_value(node)), torch.no_grad():
            _torch.set_fake_value(copy, target(*fakes))
        return copy

    def _materialise(self, copy: fx.Node) -> None:
        """Hold Inductor to the plan's order: it would compute a loop where it is first read."""
        loop = copy.all_input_nodes[0] if copy.target is aten.squeeze.dim else copy
        if torch.Tag.pointwise in getattr(loop.target, "tags", ()):
            _torch.materialise(loop)

    def finish_forward(self) -> None:
        """Fix the forward's outputs and what it saves; later reads of views make new views."""
        for node in list(self._coming):
            self._wait_for(node)
        self._results += self._read_outputs(slice(None, self._joint.num_fwd_outputs))
        for name in sorted(self._crossing):
            self._saved[self._current[self._lowered.storages.root[name]]] = None
        for name in sorted(self._returning):
            self._saved[self._away[self._lowered.storages.root[name]]] = None
        for node in self._lowered.derived:
            if not self._is_element_of_operation(node) and not _torch.is_symbolic(node):
                self._current.pop(node, None)
        self._in_forward = frozenset(self._current.values())
        self._in_backward = True

    def finish(self) -> Rewritten:
        """Close the graph."""
        self._results += self._read_outputs(slice(self._joint.num_fwd_outputs, None))
        source = self._joint.module
        self._graph.output(tuple(self._results)).meta = dict(source.graph.output_node().meta)
        self._graph.lint()
        return Rewritten(source, fx.GraphModule(source, self._graph), tuple(self._saved))

    def _read_outputs(self, part: slice) -> list[Any]:
        outputs = _torch.arg_tree_leaves(*self._joint.module.graph.output_node().args)[part]
        return [self._read(value) if isinstance(value, fx.Node) else value for value in outputs]

    def _read(self, node: fx.Node) -> fx.Node:
        """The copy of a node that a read at this point sees, made now if it is a derived one."""
        if node not in self._lowered.derived or self._is_element_of_operation(node):
            if node in self._coming:
                self._wait_for(node)
            found = self._current[node]
            if self._in_backward:
                self._note_saved(node, found)
            return found
        if _torch.is_symbolic(node) and node in self._current:
            self._note_saved(node, self._current[node])
            return self._current[node]
        sources = tuple(self._read(source) for source in node.all_input_nodes)
        found_or_none = self._current.get(node)
        if found_or_none is not None and self._derived_from[node] == sources:
            return found_or_none
        copies = dict(zip(node.all_input_nodes, sources, strict=True))
        emitted = self._emit(node, copies.__getitem__, False)
        self._current[node] = emitted
        self._derived_from[node] = sources
        return emitted

    def _forget_inlined(self, node: fx.Node) -> None:
        """Let a repeat compute anew what is computed on the way: shared, it would be kept."""
        seen: set[fx.Node] = set()
        behind = list(node.all_input_nodes)
        while behind:
            source = behind.pop()
            is_derived = source in self._lowered.derived and source not in seen
            if is_derived and not self._is_element_of_operation(source):
                seen.add(source)
                if self._lowered.storages.made_by.get(source):
                    self._current.pop(source, None)
                behind += source.all_input_nodes

    def _read_sizes(self, op_name: str) -> None:
        """Take the sizes of what was made while it is there: the backward may read them later."""
        for size, operations in self._sizes_of.get(op_name, ()):
            if operations <= self._ran:
                self._read(size)

    def _note_saved(self, node: fx.Node, copy: fx.Node) -> None:
        """Inputs and the forward's symbols that the backward reads are handed to it as well."""
        is_handed_over = node.op == "placeholder" or _torch.is_symbolic(node)
        if is_handed_over and copy in self._in_forward and node not in self._joint.backward:
            self._saved[copy] = None

    def _is_element_of_operation(self, node: fx.Node) -> bool:
        """Elements of an operation's tuple of results come with each run of the operation."""
        while _torch.is_getitem(node):
            node = node.args[0]  # type: ignore[assignment]
            if node.name in self._lowered.node_of:
                return True
        return False

    def _bind(self, node: fx.Node, copy: fx.Node) -> None:
        """Let later reads see this run's results; of an output, the first run's stays."""
        pinned = not self._pinned.isdisjoint(self._lowered.storages.of_node[node])
        if node not in self._current or not pinned:
            self._current[node] = copy
        again = copy.target is aten._native_batch_norm_legit.no_stats
        for user in node.users:
            if _torch.is_getitem(user) and not (again and user.args[1] in RUNNING_STATISTICS):
                self._bind(user, self._emit(user, lambda _: copy, False))

    def _emit(self, node: fx.Node, argument: Callable[[fx.Node], fx.Node], repeat: bool) -> fx.Node:
        if repeat and is_batch_norm_update(node):
            return self._tag(self._batch_norm_again(node, argument), node, repeat)
        if node.name in self._repeated_random:
            return self._emit_random(node, argument, repeat)
        if self._in_backward and self._repeats and node.target is aten.add.Tensor:
            product = next((s for s in node.all_input_nodes if self._is_early(argument(s))), None)
            if product is not None and not node.kwargs:
                return self._add_late(node, argument, product)
        copy = self._graph.node_copy(node, argument)
        return self._tag(copy, node, repeat)

    def _tag(self, copy: fx.Node, node: fx.Node, repeat: bool) -> fx.Node:
        copy.meta = dict(node.meta)
        if self._in_backward:
            if node.op == "call_function" and node not in self._joint.backward:
                _torch.move_to_backward(copy)
            if repeat:
                copy._rename(f"{node.name}{RECOMPUTED}{'' if self._in_order else _WHERE_READ}")
        return copy

    def _is_early(self, copy: fx.Node) -> bool:
        """A matrix product that the plan runs well before this point."""
        nodes = reversed(self._graph.nodes)
        latest = next(n for n in nodes if n.op == "call_function" and _makes_storage(n))
        return copy.target is aten.mm.default and copy is not latest

    def _add_late(
        self, node: fx.Node, argument: Callable[[fx.Node], fx.Node], product: fx.Node
    ) -> fx.Node:
        """The sum of gradients, in a form that Inductor does not turn into one `addmm`.

        That would put the product off to the sum, and hold what it reads until then.
        """
        copies = {source: argument(source) for source in node.all_input_nodes}
        lifted = self._graph.call_function(aten.unsqueeze.default, (copies[product], 0))
        _note_lifted(lifted, product)
        total = self._graph.node_copy(node, (copies | {product: lifted}).__getitem__)
        _note_lifted(total, node)
        copy = self._graph.call_function(aten.squeeze.dim, (total, 0))
        return self._tag(copy, node, False)

    def _batch_norm_again(self, node: fx.Node, argument: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The same batch norm without its running statistics: they are updated once."""
        args: tuple[Any, ...] = fx.map_arg(node.args, argument)
        x, weight, bias, _mean, _variance, *rest = args
        target = aten._native_batch_norm_legit.no_stats
        return self._graph.call_function(target, (x, weight, bias, *rest))

    def _emit_random(
        self, node: fx.Node, argument: Callable[[fx.Node], fx.Node], repeat: bool
    ) -> fx.Node:
        """First run: save the generator's state. Repeats: run under the saved state."""
        args: Any = fx.map_arg(node.args, argument)
        kwargs: Any = fx.map_arg(node.kwargs, argument)
        target: Any = node.target
        if repeat:
            state = self._rng_states[node.name]
            self._saved[state] = None
            copy = self._graph.call_function(
                _torch.run_with_rng_state, (state, target, *args), dict(kwargs)
            )
            return self._tag(copy, node, repeat)
        both = self._call(
            f"{node.name}_and_state", _torch.run_and_save_rng_state, (target, *args), dict(kwargs)
        )
        state = self._call(f"{node.name}_state", _torch.getitem, (both, 0))
        result = self._call(node.name, _torch.getitem, (both, 1))
        with _torch.fake_mode_of(_torch.tensor_leaves(_torch.fake_value(node))):
            state_value = torch.empty(torch.get_rng_state().shape, dtype=torch.uint8)
        _torch.set_fake_value(state, state_value)
        _torch.set_fake_value(both, (state_value, _torch.fake_value(node)))
        self._rng_states[node.name] = state
        return self._tag(result, node, repeat)

    def _call(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A node under a name of its own, which takes none away from the nodes still to come."""
        return self._graph.create_node("call_function", target, args, kwargs, name)


def _returning(problem: Problem, plan: Plan) -> frozenset[str]:
    """The values that leave in the forward and come back, or are still leaving, in the backward."""
    start = backward_start(problem, plan)
    left_early = {step.target for step in plan.steps[:start] if step.kind is StepKind.OFFLOAD}
    left_late: set[str] = set()
    found = set()
    for step in plan.steps[start:]:
        if step.kind is StepKind.OFFLOAD:
            left_late.add(step.target)
        elif not step.is_run and step.target in left_early - left_late:
            found.add(step.target)
    return frozenset(found)


def _sizes_of_operations(
    joint: JointGraph, lowered: Lowered
) -> dict[str, list[tuple[fx.Node, frozenset[str]]]]:
    """For each operation, the symbols that are read off its results, and all operations behind."""
    behind: dict[fx.Node, frozenset[str]] = {}
    sizes: defaultdict[str, list[tuple[fx.Node, frozenset[str]]]] = defaultdict(list)
    for node in joint.nodes:
        if node.name in lowered.node_of:
            behind[node] = frozenset({node.name})
            continue
        behind[node] = frozenset().union(*(behind[source] for source in node.all_input_nodes))
        if _torch.is_symbolic(node) and node not in joint.backward:
            for name in behind[node]:
                sizes[name].append((node, behind[node]))
    return dict(sizes)


def _note_lifted(lifted: fx.Node, node: fx.Node) -> None:
    """Note on a node that it gives what another does, in one dimension more."""
    lifted.meta = dict(node.meta)
    _torch.set_fake_value(lifted, _torch.fake_value(node).unsqueeze(0))


def _makes_storage(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and not node.target.is_view
