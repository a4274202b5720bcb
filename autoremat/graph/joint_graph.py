"""The joint forward-backward graph, made ready for planning.

Enters: what AOTAutograd hands to a partitioner. Leaves: a `JointGraph` whose nodes are sorted
into forward, backward and either, on a copy: the caller's graph is never changed.
Guarantees: no dead nodes, no duplicates; torch's own demands are tags on the nodes, and so is each
node's name, for copies of it; no backward node reads an input that the forward overwrites (it
reads a copy taken before), and nothing but further updates reads a result that may lie in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.graph.gradient_parts import put_parts_together
from autoremat.graph.storages import find_storages
from autoremat.graph.whole_slices import leave_out_whole_slices

aten = torch.ops.aten

ORIGIN = "autoremat_origin"  # in `meta`: the joint graph's name of what a node computes
BOUNDARY = "autoremat_boundary"  # a checkpointed region's result that another region reads
_DISTINCT = "autoremat_distinct"


@dataclass(frozen=True)
class JointGraph:
    """One graph of a training step.

    Attributes:
        module: the joint graph; placeholders are primals, then tangents.
        num_fwd_outputs: how many of its outputs belong to the forward.
        static_inputs: placeholders that stay at one address (parameters, buffers).
        forward: nodes that the forward's outputs or effects need.
        backward: nodes that depend on a tangent or must run in the backward.
        overwritten: inputs whose storage the step overwrites, results that Inductor may put into
            them, and views of both.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    static_inputs: frozenset[fx.Node]
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    overwritten: frozenset[fx.Node]

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes, in graph order."""
        return list(self.module.graph.nodes)

    @property
    def primals(self) -> list[fx.Node]:
        """Inputs of the forward: parameters, buffers, the batch, symbols."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if _torch.is_primal(n)]

    @property
    def tangents(self) -> list[fx.Node]:
        """Incoming gradients, one for each differentiable output."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if _torch.is_tangent(n)]

    @property
    def fwd_outputs(self) -> list[fx.Node]:
        """What the forward returns."""
        return _nodes_in(_outputs(self.module)[: self.num_fwd_outputs])

    @property
    def bwd_outputs(self) -> list[fx.Node]:
        """Gradients that the backward returns."""
        return _nodes_in(_outputs(self.module)[self.num_fwd_outputs :])


def prepare(
    module: fx.GraphModule, *, num_fwd_outputs: int, static_indices: Sequence[int] | None
) -> JointGraph:
    """A cleaned and classified copy of a joint graph.

    Args:
        module: the joint graph as AOTAutograd (or Inductor's joint passes) left it.
        num_fwd_outputs: how many of its outputs belong to the forward.
        static_indices: positions among the primals of parameters and buffers.
    """
    module = copy_module(module)
    _widen_log_sum_exp(module.graph)
    _free_batch_norm_backward(module.graph)
    leave_out_whole_slices(module.graph)
    put_parts_together(module.graph)
    module.graph.eliminate_dead_code()
    module.graph = _without_duplicates(module.graph)
    for node in _torch.force_save_what_torch_demands(module):
        node.meta[BOUNDARY] = True
    backward = _depends_on_tangents(module.graph)
    inputs, results = _overwritten(module, backward)
    overwritten = inputs | results
    if overwritten:
        _snapshot_for_backward(module.graph, inputs, backward)
        _snapshot_for_all(module.graph, results)
        _save_what_is_read(overwritten, backward)
    for node in module.graph.nodes:
        node.meta[ORIGIN] = node.name  # copies take `meta` along, not the name
    primals = [n for n in module.graph.find_nodes(op="placeholder") if _torch.is_primal(n)]
    return JointGraph(
        module=module,
        num_fwd_outputs=num_fwd_outputs,
        static_inputs=frozenset(_at(primals, static_indices or ())),
        forward=_needed_by_forward(module, num_fwd_outputs, backward, overwritten),
        backward=frozenset(backward),
        overwritten=frozenset(overwritten),
    )


def _at(primals: list[fx.Node], indices: Sequence[int]) -> list[fx.Node]:
    """Primals at positions that AOTAutograd counts without the effect tokens in front."""
    inputs = [node for node in primals if not _torch.is_effect_token(node)]
    wanted = set(indices)
    numbers = _torch.input_numbers(inputs)
    return [node for node, number in zip(inputs, numbers, strict=True) if number in wanted]


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """The same module over a copy of its graph; nodes keep their names and have own `meta`."""
    graph = module.graph
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output = copied.graph_copy(graph, nodes, return_output_node=True)
    assert output is not None, "a joint graph has an output"
    values: Any
    original: Any
    values, original = output  # type: ignore[misc]
    node = copied.output(values)
    node.meta = dict(original.meta)
    for before, after in nodes.items():
        after.meta = dict(before.meta)
    return fx.GraphModule(module, copied)


def _without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Equal nodes merged, but every random draw left on its own, and every output.

    Torch's pass knows only some of the random operators, and of the outputs only those that are no
    element of a tuple: it would give two outputs one memory. A mark tells the others apart.
    """
    outputs = _storage_keys(_nodes_in(_torch.arg_tree_leaves(*graph.output_node().args)))
    for number, node in enumerate(graph.nodes):
        is_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        elements = [user for user in node.users if _torch.is_getitem(user)]
        if is_draw or not outputs.isdisjoint(_storage_keys(elements)):
            node.kwargs = {**node.kwargs, _DISTINCT: number}
    graph = _torch.fx_graph_cse(graph)
    for node in graph.nodes:
        if _DISTINCT in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != _DISTINCT}
    return graph


def _storage_keys(nodes: Sequence[fx.Node]) -> set[int | None]:
    """Identities of the storages behind nodes' tensors."""
    values = (_torch.fake_value(node) for node in nodes)
    keys = {_torch.storage_key(value) for value in values if isinstance(value, torch.Tensor)}
    return keys - {None}


def _free_batch_norm_backward(graph: fx.Graph) -> None:
    """Take the running statistics off batch norm's backward, which in training ignores them."""
    target = aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=target):
        gradient, x, weight, _mean, _variance, *rest = node.args
        is_training = rest[2]
        if is_training is True:
            node.args = (gradient, x, weight, None, None, *rest)


def _widen_log_sum_exp(graph: fx.Graph) -> None:
    """Give the log-sum-exp of attention in double precision its true type.

    Torch 2.11 traces it as float32, half of its bytes, and its backward refuses such an input when
    it is measured.
    """
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in graph.find_nodes(op="call_function", target=target):
        attended, log_sum_exp = _torch.fake_value(node)
        if attended.dtype == torch.float64 != log_sum_exp.dtype:
            with _torch.fake_mode_of(attended):
                _torch.set_fake_value(node, (attended, log_sum_exp.double()))
                _trace_again([user for user in node.users if user.args[1] == 1])


def _trace_again(nodes: Sequence[fx.Node]) -> None:
    """Work out the fake values of nodes anew, and those of views of them."""
    for node in nodes:
        assert callable(node.target), "an element of a tuple, or a view of it"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _torch.fake_value)
        _torch.set_fake_value(node, node.target(*args, **kwargs))
        _trace_again([user for user in node.users if getattr(user.target, "is_view", False)])


def _outputs(module: fx.GraphModule) -> list[object]:
    return _torch.arg_tree_leaves(*module.graph.output_node().args)


def _nodes_in(values: Sequence[object]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _depends_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        starts = (node.op == "placeholder" and not _torch.is_primal(node)) and (
            _torch.is_tangent(node) or _torch.is_backward_seed(node)
        )
        if (
            starts
            or _torch.must_run_in_backward(node)
            or any(source in found for source in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _needed_by_forward(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    backward: set[fx.Node],
    overwritten: set[fx.Node],
) -> frozenset[fx.Node]:
    """Nodes behind the forward's outputs and effects, and all that must run before an overwrite.

    What only the backward needs may run as late as there, but not if it reads an input that the
    forward's last operations overwrite.
    """
    before_overwrite = [
        reader for node in overwritten for reader in node.users if reader.op == "call_function"
    ]
    effects = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node not in backward and node.is_impure()
    ]
    stack = _nodes_in(_outputs(module)[:num_fwd_outputs]) + effects + before_overwrite
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in needed or node in backward:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
    needed.update(n for n in module.graph.find_nodes(op="placeholder") if n not in backward)
    return frozenset(needed)


def _overwritten(
    module: fx.GraphModule, backward: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Inputs that the forward overwrites, and results that Inductor may put into them; and views.

    Where an operator is the functional form of one that writes, Inductor may let it write into the
    input after all: its result then changes with the input's next update.
    """
    storages = find_storages(module.graph.nodes, torch.device("cpu"))
    inputs = {n for node in _overwritten_inputs(module) for n in storages.of_node[node]}
    results: set[str] = set()
    for node in module.graph.nodes:
        for base, takers in _torch.in_place_results(node) if node not in backward else ():
            if not (inputs | results).isdisjoint(storages.of_node[base]):
                results.update(name for taker in takers for name in storages.of_node[taker])
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    return (
        {node for node in nodes if not inputs.isdisjoint(storages.of_node[node])},
        {n for n in nodes if storages.of_node[n] and results.issuperset(storages.of_node[n])},
    )


def _overwritten_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Inputs that the forward overwrites in the graph or in AOTAutograd's epilogue."""
    found = {
        node.args[0]
        for node in module.graph.find_nodes(op="call_function", target=aten.copy_.default)
        if isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
        and not _torch.must_run_in_backward(node)
    }
    return found | _torch.overwritten_afterwards(module.graph)


def _save_what_is_read(overwritten: set[fx.Node], backward: set[fx.Node]) -> None:
    """Tag what reads an overwritten input, so that torch's own partitioner saves it as well."""
    for node in overwritten:
        for reader in node.users:
            value = _torch.fake_value(reader)
            if reader in overwritten or reader in backward or not isinstance(value, torch.Tensor):
                continue
            _torch.set_recompute_policy(reader, _torch.CheckpointPolicy.MUST_SAVE)


def _snapshot_for_backward(
    graph: fx.Graph, overwritten: set[fx.Node], backward: set[fx.Node]
) -> None:
    """Let the backward read a copy, taken in the forward, of inputs that the forward overwrites."""
    for node in [n for n in graph.nodes if n in overwritten]:
        readers = [user for user in node.users if user in backward and not _only_writes(user, node)]
        if readers and isinstance(_torch.fake_value(node), torch.Tensor):
            _snapshot(graph, node, readers, aten.clone.default)


def _snapshot_for_all(graph: fx.Graph, results: set[fx.Node]) -> None:
    """Let all but further updates read a copy of results that may lie in an overwritten input.

    What reads the copy can be computed again, and the caller gets memory of its own. Inductor takes
    a clone for superfluous, as it does not see the aliasing; it copies what is reversed along no
    dimension.
    """
    for node in [n for n in graph.nodes if n in results]:
        readers = [user for user in node.users if user not in results and _reads(user, node)]
        if readers and isinstance(_torch.fake_value(node), torch.Tensor):
            _snapshot(graph, node, readers, torch.ops.prims.rev.default, [])


def _reads(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node does more with a value than to update it, or to copy it into an input."""
    updated = [base for base, _ in _torch.in_place_results(node)]
    return source not in updated and node.target is not aten.copy_.default


def _snapshot(
    graph: fx.Graph, node: fx.Node, readers: Sequence[fx.Node], copies: Any, *options: Any
) -> None:
    with graph.inserting_after(node):
        copy = graph.call_function(copies, (node, *options))
    copy.meta = _torch.meta_of_copy(node)
    with _torch.fake_mode_of(_torch.fake_value(node)):
        # A storage of its own: Inductor removes a clone whose result looks like its input.
        _torch.set_fake_value(copy, _torch.fake_value(node).clone())
    _torch.keep_in_forward(copy)
    for reader in readers:
        reader.replace_input_with(node, copy)


def _only_writes(node: fx.Node, target: fx.Node) -> bool:
    """Whether the node is a backward's own update of an input: the copy must not take that."""
    return (
        node.target is aten.copy_.default and node.args[0] is target and node.args[1] is not target
    )
