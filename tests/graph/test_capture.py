"""The joint graph, cleaned and sorted into forward, backward and either."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autoremat.graph.joint_graph import copy_module
from tests.joint_graphs import capture, drawn, leaf

aten = torch.ops.aten


def names(nodes: object) -> set[str]:
    """Names of nodes."""
    return {node.name for node in nodes}  # type: ignore[attr-defined]


def called(module: fx.GraphModule, target: object) -> int:
    """How often an operator is called."""
    return len(module.graph.find_nodes(op="call_function", target=target))


def test_nodes_are_sorted_into_forward_backward_and_either():
    """Each node is of one kind.

    forward:  sin, sum       what the user's output needs
    either:   cos            only the backward reads it, but it needs no gradient
    backward: expand, mul    what depends on the incoming gradient
    """
    joint = capture(lambda x: x.sin().sum(), leaf(4)).prepared()
    assert names(joint.forward) == {"primals_1", "sin", "sum_1"}
    assert names(joint.backward) == {"tangents_1", "expand", "mul"}
    either = set(joint.nodes) - joint.forward - joint.backward
    assert {n.name for n in either if n.op == "call_function"} == {"cos"}


def test_inputs_and_outputs_are_named():
    """Primals, tangents, outputs of both parts."""
    joint = capture(lambda x, y: (x * y).sum(), leaf(4), leaf(4)).prepared()
    assert names(joint.primals) == {"primals_1", "primals_2"}
    assert names(joint.tangents) == {"tangents_1"}
    assert names(joint.fwd_outputs) == {"sum_1"}
    assert len(joint.bwd_outputs) == 2


def test_equal_calls_become_one():
    """The backward's own copy of a forward value is the forward's."""
    captured = capture(lambda x: (x.exp() * x.exp()).sum(), leaf(4))
    joint = captured.prepared()
    assert called(captured.module, aten.exp.default) == 2
    assert called(joint.module, aten.exp.default) == 1


def test_equal_outputs_keep_a_memory_of_their_own():
    """Two norms alike are two if one is returned, as element 0 of its results, and one if none is.

    Merged, the callers' results would share memory; and where one was returned and the other saved,
    the backward ran the norm again.
    """
    x = torch.randn(4, 8, requires_grad=True)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.group_norm(x, 2), F.group_norm(x, 2)

    def one(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.group_norm(x, 2), F.group_norm(x, 2).sin()

    def none(x: Tensor) -> Tensor:
        return F.group_norm(x, 2) + F.group_norm(x, 2).sin()

    counts = [
        called(capture(function, x).prepared().module, aten.native_group_norm.default)
        for function in (both, one, none)
    ]
    assert counts == [2, 2, 1]


def test_the_callers_graph_is_not_changed():
    """It is needed again where planning fails."""
    captured = capture(lambda x: (x.exp() * x.exp()).sum(), leaf(4))
    before = str(captured.module.graph)
    captured.prepared()
    assert str(captured.module.graph) == before


def test_a_copied_module_has_names_and_meta_of_its_own():
    """Changing one leaves the other."""
    module = capture(lambda x: x.sin().sum(), leaf(4)).module
    copied = copy_module(module)
    assert drawn(copied) == drawn(module)
    node = next(iter(copied.graph.nodes))
    node.meta["mark"] = 1
    assert "mark" not in next(iter(module.graph.nodes)).meta
    assert copied.graph.output_node().meta.keys() == module.graph.output_node().meta.keys()


def test_overwritten_inputs_are_found_with_their_views():
    """A buffer that the graph overwrites, and a row of it that was read before."""
    buffer = torch.zeros(2, 4)

    def function(x: Tensor) -> Tensor:
        row = buffer[0]
        y = (x + row).sin()
        buffer.add_(1.0)
        return y.sum()

    joint = capture(function, leaf(4)).prepared()
    overwritten = names(joint.overwritten)
    assert any(name.startswith("primals") for name in overwritten)
    assert any(name.startswith("select") for name in overwritten)


def test_the_backward_reads_a_copy_of_an_overwritten_input():
    """The copy is taken in the forward and has a storage of its own."""
    buffer = torch.ones(4)

    def function(x: Tensor) -> Tensor:
        y = (x * buffer.clone()).sum()
        buffer.zero_()
        return y

    joint = capture(function, leaf(4)).prepared()
    for node in joint.nodes:
        if node in joint.backward:
            assert not any(source in joint.overwritten for source in node.all_input_nodes)


def test_nothing_is_overwritten_in_a_pure_graph():
    """No buffers, no copies."""
    joint = capture(lambda x: x.sin().sum(), leaf(4)).prepared()
    assert not joint.overwritten
    assert not called(joint.module, aten.clone.default)


def test_batch_norm_backward_lets_the_running_statistics_go():
    """In training its formula ignores them, and they are overwritten inputs."""
    norm = torch.nn.BatchNorm1d(4)
    joint = capture(lambda x: norm(x).square().mean(), leaf(8, 4)).prepared()
    target = aten.native_batch_norm_backward.default
    (node,) = joint.module.graph.find_nodes(op="call_function", target=target)
    assert node.args[3:5] == (None, None)


def test_the_log_sum_exp_of_attention_in_double_precision_has_all_its_bytes():
    """Its fake value has the type of the real one (torch 2.11 says float32), and so have views."""
    query, key, value = (leaf(1, 2, 8, 4).double().detach().requires_grad_() for _ in range(3))
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    real = target(query, key, value)
    joint = capture(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v).sum(), query, key, value
    ).prepared()
    (node,) = joint.module.graph.find_nodes(op="call_function", target=target)
    assert [fake.dtype for fake in node.meta["val"]] == [tensor.dtype for tensor in real[:2]]
    (backward,) = [n for n in joint.nodes if "attention_for_cpu_backward" in str(n.target)]
    read = [source.meta["val"].dtype for source in backward.all_input_nodes]
    assert read == [torch.float64] * len(read)


def test_parameters_are_static_inputs():
    """They lie at one address for the whole training."""
    layer = torch.nn.Linear(4, 4)
    joint = capture(lambda x: layer(x).sum(), torch.ones(2, 4)).prepared()
    shapes = {tuple(node.meta["val"].shape) for node in joint.static_inputs}
    assert shapes <= {(4, 4), (4,)}
