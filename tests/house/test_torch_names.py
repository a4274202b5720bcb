"""One smoke test for each private torch name that autoremat relies on.

A torch release that moves or changes one fails here, by its name.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import operator
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, fx, nn
from torch._functorch import partitioners
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _triton
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from autoremat import _torch
from autoremat.emit.op_by_op import compile_eager
from autoremat.emit.planned_graph import fingerprint
from tests.joint_graphs import capture, leaf
from tests.process_group import on_ranks

aten = torch.ops.aten


def joint_graph(loss_of: Any = lambda y: y.sin().sum(), **options: Any) -> fx.GraphModule:
    """The joint graph of `loss_of(linear(x))`, and what the partitioner is called with."""
    seen: list[tuple[fx.GraphModule, Any, dict[str, Any]]] = []

    def partition(module: fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        seen.append((module, inputs, keywords))
        return _torch.default_partition(module, inputs, **keywords)

    layer = nn.Linear(4, 4)
    backend = _torch.aot_autograd(
        fw_compiler=compile_eager,
        bw_compiler=compile_eager,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch.compile(lambda x: loss_of(layer(x)), backend=backend, **options)(torch.randn(2, 4))
    module, inputs, keywords = seen[0]
    module.meta["joint inputs"], module.meta["keywords"] = inputs, keywords
    return module


@pytest.fixture(name="joint")
def _joint() -> fx.GraphModule:
    return joint_graph()


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def test_partition_function_is_called_with_these_keywords(joint: fx.GraphModule):
    """`aot_autograd` hands over the joint graph, its inputs and the number of outputs."""
    keywords = joint.meta["keywords"]
    assert keywords["num_fwd_outputs"] == 1
    assert "static_lifetime_input_indices" in keywords
    primals, tangents = joint.meta["joint inputs"]
    assert len(primals) == 3
    assert len(tangents) == 1


def test_is_primal_and_is_tangent(joint: fx.GraphModule):
    """Placeholders are told apart by name."""
    kinds = [(_torch.is_primal(n), _torch.is_tangent(n)) for n in placeholders(joint)]
    assert kinds == [(True, False)] * 3 + [(False, True)]


def test_is_backward_seed(joint: fx.GraphModule):
    """Told by its name: no placeholder of a plain graph is a seed of the backward."""
    assert not any(_torch.is_backward_seed(n) for n in placeholders(joint))
    seeds = [joint.graph.placeholder(name) for name in ("bwd_seed_0", "bwd_base_offset_0")]
    assert all(_torch.is_backward_seed(node) for node in seeds)


def test_partitioner_tags(joint: fx.GraphModule):
    """Nothing of a plain graph must run in one part."""
    nodes = list(joint.graph.nodes)
    assert not any(_torch.must_run_in_backward(node) for node in nodes)
    nodes[5].meta["partitioner_tag"] = "must_be_in_backward"
    assert _torch.must_run_in_backward(nodes[5])


def test_is_symbolic():
    """A graph of symbolic sizes has placeholders that are symbols."""
    joint = joint_graph(lambda y: (y * y.shape[0]).sum(), dynamic=True)
    assert any(_torch.is_symbolic(node) for node in placeholders(joint))
    assert not all(_torch.is_symbolic(node) for node in placeholders(joint))


def test_is_opaque(joint: fx.GraphModule):
    """Tensors are not opaque; objects of classes that are written in C++ are, where torch asks."""
    assert not any(_torch.compiling._is_opaque(node) for node in placeholders(joint))
    node = placeholders(joint)[0]
    fake = FakeScriptObject(object(), "a class", None)  # as torch traces them
    _torch.set_fake_value(node, fake)
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert _torch.compiling._is_opaque(node) is (version >= (2, 13))


def test_force_save_what_torch_demands(joint: fx.GraphModule):
    """Results of effects and sources of twofold mutations; nothing in a graph without them."""
    assert not _torch.force_save_what_torch_demands(joint)
    assert not any(_torch.recompute_policy(node) for node in joint.graph.nodes)
    graph = fx.Graph()
    token, x = graph.placeholder("token"), graph.placeholder("primals_1")
    effect = graph.call_function(torch.ops.higher_order.with_effects, (token, aten.sin.default, x))
    result = graph.call_function(operator.getitem, (effect, 1))
    source = graph.call_function(aten.cos.default, (result,))
    for part in ("must_be_in_forward", "must_be_in_backward"):
        graph.call_function(aten.copy_.default, (x, source)).meta["partitioner_tag"] = part
    graph.output((source,))
    assert not _torch.force_save_what_torch_demands(fx.GraphModule({}, graph))
    saved = _torch.CheckpointPolicy.MUST_SAVE
    assert [_torch.recompute_policy(node) for node in (x, result, source)] == [None, saved, saved]


def test_the_value_between_two_checkpointed_regions_is_saved():
    """It is returned, as the only one that is saved for that reason alone."""
    region = lambda x: checkpoint(lambda h: h.sin().exp(), x, use_reentrant=False)  # noqa: E731
    module = capture(lambda x: region(region(x)).sum(), leaf(4)).module
    for node in module.graph.find_nodes(op="call_function", target=aten.exp.default):
        node.meta["recompute"] = _torch.CheckpointPolicy.PREFER_RECOMPUTE  # as before torch's split
    (between,) = _torch.force_save_what_torch_demands(module)
    assert between.target is aten.exp.default
    assert between.meta["recompute"] is _torch.CheckpointPolicy.MUST_SAVE


def test_extract_forward_and_backward(joint: fx.GraphModule):
    """Saved nodes are outputs of the one module and inputs of the other."""
    saved = next(n for n in joint.graph.nodes if n.target is aten.addmm.default)
    keep = [saved, *placeholders(joint)[:3]]
    forward, backward = _torch.extract_forward_and_backward(joint, keep, num_fwd_outputs=1)
    assert saved.name in {n.name for n in placeholders(backward)}
    assert len(forward.graph.output_node().args[0]) > 1


def test_without_cached_partitions():
    """AOTAutograd asks the partitioner again, though it has seen the graph before."""
    seen: list[fx.GraphModule] = []

    class Hook(_torch.CustomPartitionerFn):
        def uuid(self) -> str:
            return "the same"

        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
            seen.append(gm)
            count = keywords["num_fwd_outputs"]
            return _torch.default_partition(gm, joint_inputs, num_fwd_outputs=count)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with _torch.without_cached_partitions():
            patches = {"custom_partitioner_fn": Hook()}
            return _torch.compile_fx(module, inputs, config_patches=patches)

    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin().sum(), backend=backend)(leaf(8)).backward()
    assert len(seen) == 2


def test_code_at_hand():
    """Of the call as it begins, of what resumes it after a graph break; none where none is."""
    found: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.append(_torch.code_at_hand())
        return module

    def call(x: Any) -> Any:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    torch._dynamo.reset()
    torch.compile(call, backend=backend)(torch.ones(8))
    first, second = found
    assert first is call.__code__
    assert second is not first
    assert _torch.code_at_hand() is None


def test_with_backwards_ahead():
    """Both are compiled before anything has run, also where no size is symbolic."""
    compiled: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> fx.GraphModule:
        compiled.append(module)
        return module

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        with _torch.with_backwards_ahead():
            return _torch.aot_autograd(
                fw_compiler=keep, bw_compiler=keep, partition_fn=_torch.default_partition
            )(module, inputs)

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin().sum(), backend=backend)(leaf(8))
    assert len(compiled) == 2


def test_caches_are_off():
    """Where the user says so."""
    assert not _torch.caches_are_off()
    with torch.compiler.config.patch(force_disable_caches=True):
        assert _torch.caches_are_off()


def test_inductor_settings():
    """They tell one configuration from another, and are the same text for the same one."""
    before = _torch.inductor_settings()
    with torch._inductor.config.patch("cpp.enable_loop_tail_vec", False):
        other = _torch.inductor_settings()
        assert other != before
        with torch._inductor.config.patch("trace.enabled", True):
            assert _torch.inductor_settings() == other
    assert _torch.inductor_settings() == before
    assert "'cpp.threads'" in before
    assert " at 0x" not in before


def test_activation_memory_budget():
    """Set within, as before afterwards."""
    config = torch._functorch.config
    before = config.activation_memory_budget
    with _torch.activation_memory_budget(0.25):
        assert config.activation_memory_budget == 0.25
    assert config.activation_memory_budget == before


def test_min_cut(joint: fx.GraphModule):
    """Torch's own partition for Inductor gives two modules."""
    forward, backward = _torch.min_cut(joint, num_fwd_outputs=1)
    assert placeholders(forward)
    assert any(_torch.is_tangent(node) for node in placeholders(backward))


def test_thread_rng_states(joint: fx.GraphModule):
    """Modules without random higher-order operators come back unchanged; others take states."""
    forward, backward = _torch.min_cut(joint, num_fwd_outputs=1)
    before = str(forward.graph)
    assert str(_torch.thread_rng_states(forward, backward)[0].graph) == before
    drawing = [calling_a_body_with(f"{part}_rng_state_0") for part in ("fwd", "bwd")]
    for module in _torch.thread_rng_states(*drawing):
        (call,) = module.graph.find_nodes(op="call_function", target=_torch.invoke_subgraph)
        assert call.args[-1] is placeholders(module)[-1]
        assert len(placeholders(module)) == 2


def calling_a_body_with(state: str) -> fx.GraphModule:
    """A module that calls a body, which needs a state of the generator by this name as well."""
    body, outer = fx.Graph(), fx.Graph()
    x = body.placeholder("x")
    body.placeholder(state).meta["val"] = torch.get_rng_state()
    body.output((x,))
    argument, inner = outer.placeholder("x"), outer.get_attr("body")
    outer.output((outer.call_function(_torch.invoke_subgraph, (inner, "body", argument)),))
    return fx.GraphModule({"body": fx.GraphModule({}, body)}, outer)


def test_fx_graph_cse(joint: fx.GraphModule):
    """Equal calls become one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    twins = [graph.call_function(aten.sin.default, (x,)) for _ in range(2)]
    graph.output(tuple(twins))
    assert (
        len(_torch.fx_graph_cse(graph).find_nodes(op="call_function", target=aten.sin.default)) == 1
    )


def test_tangents_are_freed_is_known():
    """Torch 2.12 and later hand the incoming gradients over to the backward."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    with _torch.FakeTensorMode(), torch.no_grad():  # as where it is asked: in a compile
        assert _torch.tangents_are_freed.__wrapped__() is (version >= (2, 12))


def test_tangents_that_are_held_are_seen(monkeypatch: pytest.MonkeyPatch):
    """It is measured: where the caller of the backward holds them, they are not freed."""
    held = []
    backward = torch.Tensor.backward

    def holding(loss: Tensor) -> None:
        loss.grad_fn.next_functions[0][0].register_hook(lambda gradients, _: held.extend(gradients))
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", holding)
    assert not _torch.tangents_are_freed.__wrapped__()


def test_draws_four_at_a_time_is_known():
    """Torch 2.13's kernels on CUDA do, those of 2.11 do not."""
    assert (VERSION < (2, 12)) <= (not _torch.DRAWS_FOUR_AT_A_TIME)
    assert (VERSION == (2, 13)) <= _torch.DRAWS_FOUR_AT_A_TIME


def test_inductor_makes_seeds_and_draws_from_them():
    """Operators of its own: those that make seeds take none, those that draw take one."""
    names = {op.name() for op in _torch.SEED_MAKERS | _torch.SEEDED_DRAWS}
    assert names == {f"prims::inductor_{name}" for name in ("seed", "seeds", "random", "randint")}
    for op in _torch.SEED_MAKERS | _torch.SEEDED_DRAWS:
        takes_seed = "seed" in [argument.name for argument in op._schema.arguments]
        assert takes_seed == (op in _torch.SEEDED_DRAWS)


def test_the_state_of_the_cpus_generator_is_restored():
    """Of CUDA's only that of the current device."""
    assert _torch.restores_rng_state(torch.device("cpu"))
    assert not _torch.restores_rng_state(torch.device("meta"))


def test_results_that_inductor_may_leave_in_an_argument():
    """Of functional forms of what writes, the argument and who takes the result; else none."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    scattered = graph.call_function(aten.slice_scatter.default, (x, y))
    put = graph.call_function(aten.index_put.default, (x, [y], y))
    summed = graph.call_function(aten._foreach_add.List, ([x, y], [y, x]))
    second = graph.call_function(operator.getitem, (summed, 1))
    functional = torch.ops.higher_order.auto_functionalized
    both = graph.call_function(functional, (aten.add_.Tensor,), {"self": x, "other": y})
    both.meta["val"] = (None, None)
    updated = graph.call_function(operator.getitem, (both, 1))
    ops = torch.ops.higher_order
    bases = {"_all_bases": [x]}
    several = graph.call_function(ops.auto_functionalized_v2, (aten.add_.Tensor,), bases)
    several.meta["val"] = (None, None, None)
    last = graph.call_function(operator.getitem, (several, 2))
    effects = graph.call_function(ops.with_effects, (y, aten.index_put.default, x, [y], y))
    effect = graph.call_function(operator.getitem, (effects, 1))
    options = {"kwargs": {"pointer": x, "size": 4}, "tensors_to_clone": ["pointer"]}
    kernel = graph.call_function(ops.triton_kernel_wrapper_functional, (), options)
    written = graph.call_function(operator.getitem, (kernel, "pointer"))
    assert _torch.in_place_results(several) == [(x, [last])]
    assert _torch.in_place_results(effects) == [(x, [effect])]
    assert _torch.in_place_results(kernel) == [(x, [written])]
    assert _torch.in_place_results(scattered) == [(x, [scattered])]
    assert _torch.in_place_results(put) == [(x, [put])]
    assert _torch.in_place_results(summed) == [(x, []), (y, [second])]
    assert _torch.in_place_results(both) == [(x, [updated])]
    assert _torch.in_place_results(second) == []


def test_options_of_mode():
    """What a mode of torch.compile stands for."""
    assert _torch.options_of_mode("reduce-overhead") == {"triton.cudagraphs": True}
    assert _torch.options_of_mode("warp-speed") is None


def test_inductor_config():
    """Holds within, also for options of a part."""
    config = torch._inductor.config
    with _torch.inductor_config({"realize_opcount_threshold": 3, "cpp.threads": 7}):
        assert (config.realize_opcount_threshold, config.cpp.threads) == (3, 7)
    assert config.cpp.threads != 7


def test_tensor_leaves():
    """Of all containers that torch knows."""
    x, y = torch.ones(1), torch.ones(2)
    assert [*map(id, _torch.tensor_leaves(({"x": x}, [y, 3], None)))] == [id(x), id(y)]


def test_extent():
    """Where the last element of a tensor lies, and none of one without elements."""
    x = torch.empty(3, 4)[:, ::2]
    assert _torch.extent(x.shape, x.stride()) == 2 * 4 + 2 + 1
    assert _torch.extent((3, 0), (4, 1)) == 0


def test_list_options():
    """Nested ones included."""
    assert {"max_autotune", "cpp.enable_loop_tail_vec"} <= set(_torch.list_options())


def test_random_state_operators():
    """One run saves the generator's state, the other replays under it."""
    state, first = _torch.run_and_save_rng_state(aten.rand.default, [3], device="cpu")
    again = _torch.run_with_rng_state(state, aten.rand.default, [3], device="cpu")
    assert torch.equal(first, again)
    assert state.nbytes == _torch.rng_state_nbytes()


def test_size_hint():
    """Plain numbers stand for themselves, symbols for the size at hand."""
    assert _torch.size_hint(7) == 7
    joint = joint_graph(lambda y: (y * y.shape[0]).sum(), dynamic=True)
    tensors = [n.meta["val"] for n in placeholders(joint)]
    shapes = [t.shape for t in tensors if isinstance(t, torch.Tensor)]
    assert {_torch.size_hint(size) for shape in shapes for size in shape} <= {2, 4}


@pytest.mark.parametrize(
    ("mark", "most", "expected"),
    [({}, 8, True), ({}, 2, True), ({"min": 2, "max": 64}, 8, False)],
)
def test_can_be_bounded(mark: dict[str, int], most: int, expected: bool):
    """Any size that inputs decide, but not one that the user has given bounds."""
    found: list[bool] = []

    def backend(module: fx.GraphModule, _inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in placeholders(module)]
        (size,) = next(value for value in values if isinstance(value, torch.Tensor)).shape
        found.append(_torch.can_be_bounded(size, most))
        return module.forward

    x = torch.ones(2)
    if mark:
        torch._dynamo.mark_dynamic(x, 0, **mark)
    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(x)
    assert found == [expected]


def test_sizes_as_and_size_symbols():
    """Symbols have the numbers that they were traced with, and others in a context."""
    joint = joint_graph(lambda y: (y * y.shape[0]).sum(), dynamic=True)
    values = [node.meta["val"] for node in placeholders(joint)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape if not isinstance(size, int)]
    (symbol, number), *_ = _torch.size_symbols(sizes[0]).items()
    assert _torch.size_hint(sizes[0]) == number
    with _torch.sizes_as({symbol: 3 * number}):
        assert _torch.size_hint(sizes[0]) == 3 * number
        assert _torch.size_hint(2 * sizes[0] + 1) == 6 * number + 1
        with _torch.sizes_as({symbol: 5 * number}):  # what was found of others is not taken here
            assert _torch.size_hint(2 * sizes[0] + 1) == 10 * number + 1
        assert _torch.size_hint(2 * sizes[0] + 1) == 6 * number + 1
    assert _torch.size_hint(sizes[0]) == number
    assert _torch.size_symbols(7) == {}


def test_what_a_node_has_saved_is_read_without_unpacking_it():
    """As the hook has packed it; an optional value that was not saved is none."""
    x = torch.ones(3, requires_grad=True)
    plain = (x.sin() * 2).grad_fn
    assert [type(value) for value in _torch.saved_by(plain)].count(torch.Tensor) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), pytest.fail):
        packed = x.sin().grad_fn
    assert _torch.saved_by(packed)[0][0] == "packed"
    assert _torch.saved_by(x.sum().grad_fn) != [None]


def test_accumulates():
    """The node of a parameter, no other."""
    node = torch.ones(3, requires_grad=True).sin().grad_fn
    assert not _torch.accumulates(node)
    assert _torch.accumulates(node.next_functions[0][0])


def test_storage_key():
    """Views share it, copies do not, sparse tensors have none."""
    x = torch.zeros(4)
    assert _torch.storage_key(x) == _torch.storage_key(x[1:])
    assert _torch.storage_key(x) != _torch.storage_key(x.clone())
    assert _torch.storage_key(x.to_sparse()) is None


def test_operators_and_their_overloads():
    """`aten.mm` is a packet, `aten.mm.default` one of its overloads; both print their names."""
    assert isinstance(torch.ops.aten.mm, _torch.OpOverloadPacket)
    assert isinstance(torch.ops.aten.mm.default, _torch.OpOverload)
    assert str(torch.ops.aten.mm) == "aten.mm"
    assert str(torch.ops.aten.mm.default) == "aten.mm.default"


def test_sparse_parts():
    """They are those that it holds, each time the same, while a graph is being traced as well."""
    sparse = torch.tensor([0.0, 3.0]).to_sparse()
    with _torch.FakeTensorMode():
        held = [_torch.sparse_parts(sparse) for _ in range(2)]
    assert [part.tolist() for part in held[0]] == [[[1]], [3.0]]
    assert held[0][1].data_ptr() == held[1][1].data_ptr()


def test_base_of():
    """A view's base, else the tensor."""
    whole = torch.ones(4)
    assert _torch.base_of(whole[:2]) is whole
    assert _torch.base_of(whole) is whole


def test_is_compiled_backward():
    """Where a compiled graph ends in autograd's, and nowhere else."""
    layer = nn.Linear(4, 4)
    output = torch.compile(layer, backend="aot_eager")(torch.randn(2, 4))
    assert _torch.is_compiled_backward(output.grad_fn)
    assert not _torch.is_compiled_backward(output.sum().grad_fn)


def test_recurrent_layers_are_admitted_within_a_context():
    """Dynamo traces them there instead of giving up the function."""
    assert not _torch.traces_recurrent_layers()
    layer, x = nn.RNN(4, 4), torch.randn(3, 4)
    torch._dynamo.reset()
    with _torch.admitting_recurrent_layers():
        assert _torch.traces_recurrent_layers()
        torch.compile(lambda x: layer(x)[0], backend="eager", fullgraph=True)(x)


def test_is_getitem():
    """Only elements of tuples."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert _torch.is_getitem(graph.call_function(operator.getitem, (x, 0)))
    assert not _torch.is_getitem(x)


def test_failing_quietly(caplog: pytest.LogCaptureFixture):
    """Torch 2.13 logs what an operator says of fake values that do not go together."""
    mode = _torch.FakeTensorMode()
    one, other = (mode.from_tensor(torch.ones(size)) for size in (2, 3))
    with _torch.failing_quietly(), pytest.raises(RuntimeError):
        torch.add(one, other)
    assert not caplog.records
    with pytest.raises(RuntimeError):
        torch.add(one, other)
    assert caplog.records or torch.__version__ < "2.13"


def test_fake_mode_of(joint: fx.GraphModule):
    """What is made under the mode of a graph's values is fake; real values have none."""
    value = placeholders(joint)[0].meta["val"]
    with _torch.fake_mode_of([value]):
        assert isinstance(torch.zeros(2), FakeTensor)
    with _torch.fake_mode_of(torch.zeros(2)):
        assert not isinstance(torch.zeros(2), FakeTensor)


def test_boxed_code_generation():
    """The generated function takes one list and empties it."""
    graph = fx.Graph()
    graph.output(graph.call_function(aten.sin.default, (graph.placeholder("x"),)))
    graph.set_codegen(_torch.BoxedCodeGen())
    arguments = [torch.zeros(2)]
    assert torch.equal(fx.GraphModule({}, graph).forward(arguments), torch.zeros(2))
    assert not arguments


def test_compile_context():
    """Outside a compile there is no id, inside there is the frame's."""
    assert not _torch.is_compiling()
    assert (_torch.compile_name(), _torch.compile_number()) == ("graph 0", 0)
    names = []

    def backend(module: Any, inputs: Any) -> Any:
        assert _torch.is_compiling()
        names.append((_torch.frame_name(), _torch.compile_name(), _torch.compile_number()))
        return module.forward

    run = torch.compile(lambda x: x.sin(), backend=backend)
    run(torch.zeros(2))
    run(torch.zeros(2, dtype=torch.float64))
    assert names == [("graph 0", "graph 0", 0), ("graph 0", "graph 0/1", 1)]


def test_exceptions_that_dynamo_lets_through():
    """Dynamo wraps a backend's error unless it is a `ShortenTraceback`."""

    def raising(error: Exception) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            raise error

        return torch.compile(lambda x: x.sin(), backend=backend)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        raising(KeyError("inner"))(torch.zeros(2))
    assert issubclass(
        type(_torch.passing_through(KeyError("x"))), torch._dynamo.exc.ShortenTraceback
    )
    with pytest.raises(KeyError, match="inner"):
        raising(_torch.passing_through(KeyError("inner")))(torch.zeros(2))
    with pytest.raises(FileNotFoundError) as caught:
        raising(_torch.passing_through(FileNotFoundError(2, "No such file", "plan")))(torch.ones(2))
    assert (caught.value.errno, caught.value.filename) == (2, "plan")


def test_compile_apart():
    """One function compiled for more callers than the limit allows one of them."""

    def shared(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    graphs: list[Any] = []

    def keep(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    @torch.compiler.disable(recursive=False)
    def caller(x: torch.Tensor) -> torch.Tensor:
        return shared(x)

    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            backend = lambda module, inputs: keep(module, inputs)  # noqa: E731 - one for each
            _torch.compile_apart(caller, backend)(torch.ones(2))
    assert len(graphs) == 3


def test_marked_sizes():
    given = torch.ones(5, 3)
    assert _torch.marked_sizes(given) == set()
    torch._dynamo.mark_dynamic(given, 1)
    _torch.may_vary(given, 0)
    assert _torch.marked_sizes(given) == {0, 1}


def test_size_expressions():
    """A size that varies has a symbol, which has a source and a range."""
    found: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        found.extend(value for value in inputs if isinstance(value, torch.SymInt))
        return module.forward

    given = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(given, 0, min=2, max=64)
    torch.compile(lambda x: x + 1, backend=keep)(given)
    (size,) = found
    (symbol,) = _torch.size_symbols(size)
    assert _torch.size_expression(3 * size + 1) == 3 * symbol + 1
    assert _torch.size_expression(7) == 7
    assert _torch.symbol_source(size, symbol) == "L['x'].size()[0]"
    assert _torch.symbol_range(size, symbol) == (2, 64)


def test_marked_ranges():
    """Of marks with a largest size."""
    given = torch.ones(5, 3)
    assert _torch.marked_ranges(given) == {}
    torch._dynamo.mark_dynamic(given, 0, max=64)
    torch._dynamo.mark_dynamic(given, 1)
    assert _torch.marked_ranges(given) == {0: (1, 64)}


def test_the_lines_that_decide_sizes():
    """One that makes a size a constant, and one that bounds it."""
    found: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        found.extend(_torch.DynamoGraph(module, inputs).inputs)
        return module.forward

    def call(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] < 64
        for _ in range(x.shape[1]):
            x = x + 1
        return x

    given = torch.ones(5, 3)
    for dimension in range(2):
        _torch.may_vary(given, dimension)
    torch.compile(call, backend=keep)(given)
    (fake,) = (value for value in found if isinstance(value, torch.Tensor))
    assert "assert x.shape[0] < 64" in _torch.bounded_at(fake.shape[0])
    assert "for _ in range(x.shape[1])" in _torch.fixed_at(fake, 1)
    assert _torch.fixed_at(fake, 0) == ""
    size = fake.shape[0].node.expr
    assert _torch.sized(2 * size) == 2 * size
    with _torch.sizes_as({size: 7}):
        assert _torch.sized(2 * size) == 14


def test_may_vary():
    """A size that may vary is a symbol at its first call; one that the code insists on is none."""
    sizes: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        sizes.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return module.forward

    for insists in (False, True):
        given = torch.ones(5, 3)
        _torch.may_vary(given, 0)
        call = torch.compile(
            lambda x, i=insists: x + (int(x.shape[0] == 5) if i else 1), backend=keep
        )
        call(given)
    assert [len(found) for found in sizes] == [1, 0]


def test_frozen_parameters_are_noticed():
    """A parameter frozen after the first call has no gradient after the second."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    run = torch.compile(lambda x: layers(x).sum(), backend="aot_eager")
    for is_trained in (True, False, True):
        layers[0].requires_grad_(is_trained)
        layers.zero_grad(set_to_none=True)
        with _torch.compiling_steps(8):
            run(torch.ones(2, 4)).backward()
        assert (layers[0].weight.grad is not None) == is_trained


def test_checkpoint_policies():
    """The policies that arrive as tags."""
    names = {"MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE"}
    assert names <= set(_torch.CheckpointPolicy.__members__)


def test_custom_partitioner_of_inductor():
    """Abstract: a call and a uuid; Inductor's configuration has its place."""
    assert {"__call__", "uuid"} <= set(dir(_torch.CustomPartitionerFn))
    assert "custom_partitioner_fn" in torch._inductor.config.get_config_copy()
    assert "config_patches" in inspect.signature(_torch.compile_fx).parameters


@pytest.mark.inductor
def test_a_compile_can_be_stopped_at_its_source():
    """The wrapper's source and the scheduled graph are there, and no kernel is compiled."""
    captured = capture(lambda x: x.sin().sum(), leaf(8))
    forward, backward = _torch.min_cut(captured.module, num_fwd_outputs=1)
    inputs = [node.meta["val"] for node in placeholders(forward)]
    options: Any = {"is_backward": False, "static_input_idxs": ()}
    with inputs[0].fake_mode:
        source, graph = _torch.generated_code(forward, inputs, **options)
    assert "def call" in source
    sizes = _torch.inductor_result_nbytes(graph, torch.device("cpu"))
    assert sizes
    assert all(nbytes >= 0 for element in sizes.values() for nbytes in element)
    assert _torch.inductor.size_hint_of_expr(graph, 3) == 3
    (loop,) = _torch.generated_loops(graph)
    assert loop.moved_nbytes == 8 * 4 + 4
    assert (loop.computed["sin"], loop.computed["load"], loop.flops) == (8, 8, 0)
    size, stride, dtype, device = _torch.inductor_layout(graph, "primals_1")
    assert (size, stride, dtype, device.type) == ((8,), (1,), torch.float32, "cpu")
    assert _torch.inductor_layout(graph, "nothing") is None
    assert _torch.inductor_output_strides(graph)[0] == ()
    options["is_backward"] = True
    values = [node.meta["val"] for node in placeholders(backward)]
    with inputs[0].fake_mode:
        _, graph = _torch.generated_code(backward, values, donated=[0], **options)
    assert graph.bw_donated_idxs == [0]


@pytest.mark.inductor
def test_what_another_thread_compiles_meanwhile_is_loaded():
    """It is not stopped, and asks AOTAutograd what it may overwrite."""
    x = torch.eye(3)
    results = []

    def run() -> None:
        options = {"fx_graph_cache": False}
        results.append(torch.compile(lambda a, b: a @ b, options=options)(x, 2 * x))

    with _torch.loading_kernels_by(pytest.fail, donated=[0]):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert torch.equal(results[0], 2 * x)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_inlining_limits_are_those_of_the_configuration(device: str):
    """Each of its own option, which goes before what torch has for the device."""
    config = torch._inductor.config
    before = _torch.inlining_limits(torch.device(device))
    assert min(before.shared_reads, before.reads, before.operations) > 1
    with config.patch(realize_reads_threshold=2, realize_acc_reads_threshold=3):
        changed = _torch.inlining_limits(torch.device(device))
    with config.patch(realize_opcount_threshold=4):
        few = _torch.inlining_limits(torch.device(device))
    assert (changed.shared_reads, changed.reads) == (2, 3)
    assert (changed.operations, few.operations) == (before.operations, 4)


def test_what_the_cpu_keeps_for_reuse_is_asked_of_inductor():
    """Not what is cheap, nor what is no operation of a loop, whatever the limits are here.

    Torch 2.11 has a shorter list of what is not.
    """
    with torch._inductor.config.patch(realize_opcount_threshold=0):
        kept = {name for name in ("exp", "tanh", "add", "mm") if _torch.is_kept_for_reuse(name)}
    assert kept == ({"exp"} if VERSION < (2, 12) else {"exp", "tanh"})


def test_inner_compile_takes_these_keywords():
    """`generated_code` calls it with them."""
    parameters = inspect.signature(torch._inductor.compile_fx.compile_fx_inner).parameters
    assert "kwargs" in parameters or "is_backward" in parameters


def test_names_that_wrappers_use():
    """Library calls in generated code can be evaluated with them."""
    names = _torch.wrapper_namespace()
    x = torch.arange(4.0)
    assert torch.equal(eval("reinterpret_tensor(x, (2,), (2,), 1)", names | {"x": x}), x[1::2])
    out = torch.empty(1, 1)
    one = torch.ones(1, 1)
    eval("extern_kernels.mm(a, a, out=out)", names | {"a": one, "out": out})
    assert torch.equal(out, one)


def test_trees_of_arguments():
    """Leaves of positional and keyword arguments."""
    assert _torch.arg_tree_leaves([1, (2,)], three=3) == [1, 2, 3]
    assert _torch.tree_leaves({"a": (1, [2])}) == [1, 2]
    assert isinstance(aten.sin.default, _torch.OpOverload)


# --- what profiling relies on ------------------------------------------------------------------


def test_real_execution_suspends_fake_tensors():
    """Inside a fake mode, tensors made under it are real."""
    with _torch.FakeTensorMode(), _torch.real_execution():
        assert type(torch.zeros(2)) is torch.Tensor


def test_profiler_is_active():
    """Only while one records."""
    assert not _torch.profiler_is_active()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.profiler_is_active()


def test_profiler_warms_up():
    """Between waiting and recording, of which the other question says no."""
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    seen = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as session:
        for _ in range(3):
            seen.append((_torch.profiler_warms_up(), _torch.profiler_is_active()))
            session.step()
    assert seen == [(False, False), (True, False), (False, True)]


def test_memory_events():
    """Allocations on the CPU have bytes and an address, functions a name, in order of time."""
    with _torch.recording_memory() as session:
        held = torch.zeros(1024)
        with torch.profiler.record_function("mine::span"):
            address = held.data_ptr()
        del held
    events = _torch.memory_events(session, "mine::")
    found = [(e.name, e.nbytes, e.address) for e in events]
    assert found == [("", 4096, address), ("mine::span", 0, 0), ("", -4096, address)]
    assert [e.start_ns for e in events] == sorted(e.start_ns for e in events)
    assert all(e.start_ns <= e.end_ns for e in events)


def test_memory_events_of():
    """The same of a call, as long as somebody profiles without their addresses."""

    def run() -> None:
        with torch.profiler.record_function("mine::span"):
            held = torch.zeros(1024)
        del held

    def found() -> list[tuple[str, int, bool]]:
        events = _torch.memory_events_of(run, "mine::")
        (span,) = (event for event in events if event.name)
        return [(e.name, e.nbytes, span.start_ns <= e.start_ns <= span.end_ns) for e in events]

    alone = found()
    assert alone == [("mine::span", 0, True), ("", 4096, True), ("", -4096, False)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
        assert found() == alone
    assert "mine::span" not in {event.name for event in session.events()}


def test_apart_from_profilers():
    """On this thread, but while somebody profiles; errors come through."""
    assert _torch.apart_from_profilers(threading.get_ident) == threading.get_ident()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.apart_from_profilers(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            _torch.apart_from_profilers(lambda: 1 / 0)


def test_memory_of_an_earlier_session_ends_without_a_size():
    """What the profiler tells may be that of another block, which had the same address then."""
    held = []
    with _torch.recording_memory():
        held.append(torch.zeros(1024))
    address = held[0].data_ptr()
    with _torch.recording_memory() as session:
        held.clear()
    (event,) = _torch.memory_events(session, "mine::")
    assert (event.name, event.nbytes, event.address) == ("", 0, address)


def test_memory_that_another_thread_frees_goes_when_its_address_is_used_again():
    """The profiler sees this thread only; a process group's threads let go of what it gave them."""
    held = []
    with _torch.recording_memory() as session:
        for _ in range(50):
            held.append(torch.zeros(1024))
            other = threading.Thread(target=held.clear)
            other.start()
            other.join()
    events = _torch.memory_events(session, "mine::")
    assert [e.nbytes for e in events].count(4096) == 50
    live: dict[int, int] = {}
    for event in events:
        live[event.address] = live.get(event.address, 0) + event.nbytes
        assert 0 <= live[event.address] <= 4096
    if len(live) == 50:
        pytest.skip("The allocator of this system did not use an address again.")


def test_checkpoint_region():
    """In a non-reentrant checkpoint and in its rerun, which runs in a backward."""
    found = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(f"{bool(_torch.checkpoint_region()):d}{_torch.is_in_backward():d}")
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    note(x)
    for is_reentrant in (False, True):
        checkpoint(note, x, use_reentrant=is_reentrant).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        note(x)
    assert found == ["00", "10", "11", "00", "01", "00"]


def test_saved_are_hooked():
    """By hooks that may keep something else; a checkpoint drops what it is given."""
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch.saved_are_hooked())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    note(x)
    checkpoint(note, x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        note(x)
    assert found == [False, False, True]


def test_checkpoint_region_tells_regions_apart():
    """As long as anything waits for them: equal within one, different between two."""
    found: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            found.append(_torch.checkpoint_region())
            x = x.sin()
        return x

    x = torch.ones(2, requires_grad=True)
    for _ in range(20):
        x = checkpoint(note, x, use_reentrant=False)
    assert found[::2] == found[1::2]
    assert len(set(found)) == 20


def test_checkpoints_of_tells_what_is_made_again():
    """What each node had saved, by its number among all of the region, and not before it runs."""
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    for debug in (False, True):
        seen.clear()
        found = checkpoint(run, x, use_reentrant=False, debug=debug)
        exp, sin = found.grad_fn, found.grad_fn.next_functions[0][0].next_functions[0][0]
        (taken,), ((other, of_sin, _),) = map(_torch.checkpoints_of, (exp, sin))
        assert isinstance(taken, _torch.Taken)
        one, of_exp, goes_in = taken
        assert not goes_in
        assert one.region == other.region != 0
        assert one.shapes == other.shapes
        assert "[2]" in (one.shapes or "")
        assert (one.numbers()[of_sin], one.numbers()[of_exp]) == (0, 1)
        one.watch_rerun(seen.append, seen.append)
        other.watch_rerun(lambda given: seen.clear(), lambda made: seen.clear())  # one looks on
        del one, other, taken
        found.sum().backward()
        (given,), (of_first, of_last) = seen
        assert given.data_ptr() == x.data_ptr()
        torch.testing.assert_close(of_first, torch.ones(2))
        torch.testing.assert_close(of_last, run(torch.ones(2)))
    assert _torch.checkpoints_of(x.sin().grad_fn) == []


def test_checkpoint_inputs_are_what_regions_run_again_on():
    """Of one region within another, the outer one makes them again."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x.exp(), use_reentrant=False)

    x = torch.ones(2, requires_grad=True) * 2
    node = checkpoint(torch.sin, x, use_reentrant=False).grad_fn
    assert [value.data_ptr() for value in _torch.checkpoint_inputs(node)] == [x.data_ptr()]
    assert _torch.checkpoint_inputs(x.sin().grad_fn) == []
    inner = checkpoint(outer, x, use_reentrant=False).grad_fn
    assert [value.data_ptr() for value in _torch.checkpoint_inputs(inner)] == [x.data_ptr()]
    node = checkpoint(lambda x, other: x * other, x, other=x + 1, use_reentrant=False).grad_fn
    assert len(_torch.checkpoint_inputs(node)) == 2
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    found = checkpoint(lambda x: x.sin().exp().cos(), x, use_reentrant=False, context_fn=kept)
    _, of_policy = _torch.checkpoint_inputs(found.grad_fn)
    torch.testing.assert_close(of_policy, x.detach().sin())
    (own, going_in) = _torch.checkpoints_of(inner)
    assert own.checkpoint.region != going_in.checkpoint.region
    assert (own.goes_in, going_in.goes_in) == (False, True)


def test_raw_saved_and_saved_names():
    """As autograd keeps them: what is no tensor has nothing behind it."""
    node = torch.ones(2, requires_grad=True).sum(0).sin().grad_fn
    assert "_saved_self" in _torch.saved_names(node)
    (kept,) = _torch.raw_saved(node, "_saved_self")
    assert kept.unpack_hook is None
    (sum_node,) = (source for source, _ in node.next_functions)
    assert not _torch.raw_saved(sum_node, "_saved_dim")


def test_what_a_function_of_the_users_has_saved_under_a_name_of_its_own():
    """One call of it may have what another has not."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if x.numel() > 1:
                ctx._saved_own = x
            return x.clone()

    one, two = (Own.apply(torch.ones(n, requires_grad=True)).grad_fn for n in (1, 2))
    assert _torch.saved_names(one) == ["saved_tensors"]
    assert _torch.saved_names(two) == ["saved_tensors", "_saved_own"]
    kind = weakref.ref(type(one))
    del one, two, Own
    gc.collect()
    assert kind() is None  # with what its code holds


def test_address_of():
    """That of the data, without a copy of what is copied on write, and 0 where there is none."""
    x = torch.zeros(4)
    assert _torch.address_of(x.untyped_storage()) == x.data_ptr()
    assert _torch.address_of(x[1:].untyped_storage()) == x.data_ptr()
    assert _torch.address_of(torch.from_numpy(x.numpy()).untyped_storage()) == x.data_ptr()
    lazy = torch._lazy_clone(x)
    assert _torch.address_of(lazy.untyped_storage()) == _torch.address_of(x.untyped_storage())
    assert torch._C._is_cow_tensor(lazy)
    assert _torch.address_of(torch.empty(0).untyped_storage()) == 0


def test_recording_is_silent_unless_the_user_says_otherwise():
    """Nothing on the terminal, and the environment is left as it was."""
    record = """
import os
from autoremat._torch import recording_memory
before = dict(os.environ)
with recording_memory():
    pass
assert dict(os.environ) == before
"""
    told = {
        level: subprocess.run(
            [sys.executable, "-c", record],
            env={k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"} | level_set,
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for level, level_set in (("none", {}), ("all", {"KINETO_LOG_LEVEL": "0"}))
    }
    assert told["none"] == ""
    assert told["all"]


def test_storage_identity():
    """Equal for views of one storage."""
    x = torch.zeros(4)
    identity = _torch.storage_identity
    assert identity(x.untyped_storage()) == identity(x[1:].untyped_storage())


def test_storage_references():
    """One for each tensor that is not the same one, whoever holds it."""
    x = torch.zeros(4)
    identity, references = _torch.storage_identity(x.untyped_storage()), _torch.storage_references
    assert references(identity) == 1
    views = [x[1:], x.detach()]
    assert references(identity) == 3
    del views
    assert references(identity) == 1


class Seeing(_torch.TorchDispatchMode):
    """Lists operators, and leaves compiled code alone."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_that_begins_or_ends_in_a_compiled_call_is_on_or_off_afterwards():
    """As it would be without a compiler around it."""
    _torch.let_modes_outlast_compiled_calls()
    seen: list[object] = []
    mode, x = Seeing(seen), torch.ones(2)
    changes: list[Callable[[], object]] = [mode.__enter__, lambda: mode.__exit__(None, None, None)]

    def backend(graph, _inputs):
        def run(*args):
            changes.pop(0)()
            return (args[0],)

        return run

    call = torch.compile(lambda x: x * 2, backend=backend)
    call(x)
    x.sin()
    call(x)
    x.cos()
    assert seen == [torch.ops.aten.sin.default]
    assert not changes


def test_dispatch_modes_are_those_of_the_stack():
    """The innermost last; one that leaves compiled code alone does not keep any from compiling."""
    seen: list[object] = []
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object):
        graphs.append(graph)
        return graph.forward

    assert not _torch.dispatch_modes()
    with Seeing(seen) as outer, Seeing(seen) as inner:
        assert _torch.dispatch_modes() == [outer, inner]
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
    assert len(graphs) == 1
    assert aten.sin.default in seen


def test_is_mutable():
    """Told by the schema."""
    assert _torch.is_mutable(aten.add_.Tensor)
    assert not _torch.is_mutable(aten.add.Tensor)


def test_has_results():
    """Told by the schema."""
    assert _torch.has_results(aten.add.Tensor)
    assert not _torch.has_results(aten._assert_async.default)


def test_foreach_by_default():
    """On CPU, torch's optimizers loop over the parameters."""
    assert _torch.foreach_by_default([torch.zeros(2)], False) is False


def test_step_hooks():
    """The attributes exist on every optimizer."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)
    assert all(hasattr(optimizer, name) for name in _torch.step_hooks())


def test_operator_types_and_trees():
    """Names that are classes or functions of the expected kind."""
    assert isinstance(aten.sin.default, _torch.OpOverload)
    assert isinstance(_torch.run_with_rng_state, _torch.HigherOrderOperator)
    assert issubclass(_torch.TorchDispatchMode, object)
    assert _torch.tree_leaves({"a": [1, 2]}) == [1, 2]
    assert _torch.tree_map(lambda x: x + 1, (1, [2])) == (2, [3])


def test_forward_of_a_lazy_module_is_its_own_after_recompiling(joint: fx.GraphModule):
    """`force_recompile` leaves no detour by `__call__`, where users' hooks run."""
    joint.recompile()
    _torch.force_recompile(joint)
    assert "lazy" not in joint.forward.__name__


def test_dynamo_counts_graphs_and_breaks():
    """By the graphs' number, and by the reasons of breaks; a count that never was is 0."""
    _torch.dynamo_counters.clear()

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break("on purpose")
        return y.cos()

    assert _torch.dynamo_counters["stats"]["unique_graphs"] == 0
    broken(torch.zeros(2))
    assert _torch.dynamo_counters["stats"]["unique_graphs"] == 2
    ((reason, count),) = _torch.dynamo_counters["graph_break"].items()
    assert "on purpose" in reason
    assert count == 1


def test_hooks_are_guarded_within_a_context():
    """Dynamo recompiles when a hook comes to a module that was compiled in the context."""
    frames = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        frames.append(module)
        return module.forward

    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: layer(x), backend=backend)
    before = torch._dynamo.config.skip_nnmodule_hook_guards
    with _torch.compiling_steps(8):
        compiled(torch.randn(2, 4))
    assert torch._dynamo.config.skip_nnmodule_hook_guards is before
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    compiled(torch.randn(2, 4))
    assert len(frames) == 2


def test_dynamo_can_be_stopped_at_a_module(monkeypatch: pytest.MonkeyPatch):
    """By the method that its variable for modules is called through."""
    variable = _torch.dynamo.UnspecializedNNModuleVariable
    monkeypatch.setattr(variable, "call_function", variable.call_function)  # put back after this
    layer = nn.Linear(4, 4)
    _torch.stop_at(lambda module: module is layer)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="autoremat has planned"):
        torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)(torch.randn(2, 4))


def test_padding_of_packed_sequences_does_not_end_a_compile():
    """Dynamo traces it, or stops there."""
    _torch.stop_at_padding()
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 4), [3, 2], batch_first=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: nn.utils.rnn.pad_packed_sequence(x)[0] + 1, backend="eager")
    assert compiled(packed).shape == (3, 2, 4)


def test_backend_around_is_of_the_compile_that_runs_this():
    """Of what is compiled itself, or calls code that is; and of none outside."""
    seen = []

    @torch.compiler.disable(recursive=False)
    def asks() -> None:
        seen.append(_torch.backend_around())

    asks()
    torch.compile(lambda x: (asks(), x + 1)[1], backend="aot_eager")(torch.ones(2))
    torch.compile(asks, backend="eager")()
    assert seen == ["", "aot_eager", "eager"]


def test_takes_what_is_called():
    """Also where Dynamo takes no part in the function that asks, only in what that calls."""
    seen = []

    @torch.compiler.disable(recursive=False)
    def asks() -> None:
        seen.append(_torch.takes_what_is_called())

    @torch.compiler.disable
    def asks_apart() -> None:
        seen.append(_torch.takes_what_is_called())

    def both(x: torch.Tensor) -> torch.Tensor:
        asks()
        asks_apart()
        return x + 1

    asks()
    torch.compile(both, backend="eager")(torch.ones(2))
    assert seen == [False, True, False]


def test_in_functional_transform():
    """Inside `torch.func.grad`, and not before or after."""
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(_torch.in_functional_transform())
        return x.square().sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    function(torch.ones(2))
    assert seen == [False, True, False]


def test_is_static_input():
    """Dynamo marks what belongs to the module when it traces, and not what the call is given."""
    torch._dynamo.reset()
    found: list[list[bool]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append([_torch.is_static_input(value) for value in inputs])
        return graph

    torch.compile(nn.Linear(2, 3), backend=backend)(torch.ones(1, 2))
    assert sorted(found[0]) == [False, True, True]


def test_kinds_of_global_hooks():
    """Each kind is known by whether there are any."""
    assert not any(_torch.kinds_of_global_hooks().values())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert [k for k, v in _torch.kinds_of_global_hooks().items() if v] == [
            "_global_forward_hooks"
        ]
    finally:
        handle.remove()


def test_a_shared_region_is_a_call_of_its_graph():
    """Its arguments: the graph, a name, and the operands; its users take elements."""
    calls = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        calls.extend(module.graph.find_nodes(op="call_function", target=_torch.invoke_subgraph))
        return module.forward

    region = torch.compiler.nested_compile_region(lambda x: x.sin())
    torch.compile(lambda x: region(region(x)), backend=backend)(torch.randn(2, 4))
    call = calls[-1]  # the first may be traced without one
    body, name, *operands = call.args
    assert body.op == "get_attr"
    assert isinstance(name, str)
    assert len(operands) == 1
    assert all(_torch.is_getitem(user) for user in call.users)


# --- autograd's graph --------------------------------------------------------------------------


def test_compiled_backward_of():
    """The node of a compiled graph, also behind views of its outputs; eager code has none."""
    x = torch.ones(4, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")(x)
    assert _torch.compiled_backward_of([compiled]) is compiled.grad_fn
    assert _torch.compiled_backward_of([compiled.view(2, 2)]) is compiled.grad_fn
    assert _torch.compiled_backward_of([x.sin(), x]) is None


def test_gradient_nbytes_into_and_sequence_number():
    """A gradient is as large as what a node has made; what was made later goes back first."""
    x = torch.ones(4, 8, requires_grad=True)
    y = x.sin()
    z = y.sum()
    assert _torch.gradient_nbytes_into(y.grad_fn) == [4 * 8 * 4]
    assert _torch.gradient_nbytes_into(z.grad_fn) == [4]
    assert _torch.sequence_number(z.grad_fn) > _torch.sequence_number(y.grad_fn)


@pytest.mark.parametrize("keep", [False, True])
def test_keeps_graph_and_watch_backwards(keep: bool, monkeypatch: pytest.MonkeyPatch):
    """Each backward that Python code begins is seen before it runs, and told apart."""
    unwatched = torch.autograd.graph._engine_run_backward  # tests before this one may have watched
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", unwatched)
    monkeypatch.setattr("autoremat._torch.autograd._backward_watchers", [])
    seen: list[object] = []
    _torch.watch_backwards(
        lambda roots, given, keeps: seen.append((roots[0] is loss, given[0].item(), keeps))
    )
    x = torch.ones(4, requires_grad=True)
    loss = x.sin().sum()
    loss.grad_fn.register_prehook(lambda _: seen.append(_torch.keeps_graph()))
    loss.backward(retain_graph=keep)
    assert seen == [(True, 1.0, keep), keep]


def test_compiles_are_admitted():
    """More compiles of one function than Dynamo would make; never fewer than the user's."""
    config = torch._dynamo.config
    before = config.recompile_limit
    with _torch.compiling_steps(before + 5):
        assert config.recompile_limit == before + 5
    with _torch.compiling_steps(1):
        assert config.recompile_limit == before
    assert config.recompile_limit == before


# --- what torch notes on nodes -----------------------------------------------------------------


def test_fake_value(joint: fx.GraphModule):
    """Every operation of a joint graph has one, of its result's size; an output has none."""
    (addmm,) = joint.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert isinstance(_torch.fake_value(addmm), FakeTensor)
    assert _torch.fake_value(addmm).shape == (2, 4)
    assert _torch.fake_value(joint.graph.output_node()) is None


def test_set_fake_value(joint: fx.GraphModule):
    """Torch's own shape of a saved value follows it."""
    (addmm,) = joint.graph.find_nodes(op="call_function", target=aten.addmm.default)
    with _torch.fake_mode_of(_torch.fake_value(addmm)):
        _torch.set_fake_value(addmm, torch.empty(7))
    keep = [addmm, *placeholders(joint)[:3]]
    _, backward = _torch.extract_forward_and_backward(joint, keep, num_fwd_outputs=1)
    handed = next(node for node in placeholders(backward) if node.name == addmm.name)
    assert _torch.fake_value(handed).shape == (7,)


def test_meta_of_copy(joint: fx.GraphModule):
    """All but the descriptor, which says of an input which one it is."""
    node = placeholders(joint)[0]
    assert set(node.meta) - set(_torch.meta_of_copy(node)) >= {"desc"}
    assert _torch.meta_of_copy(node)["val"] is _torch.fake_value(node)


def test_recompute_policies_arrive_with_checkpoints():
    """On what stands within one, and nowhere else."""
    region = lambda x: checkpoint(lambda h: h.sin().exp(), x, use_reentrant=False)  # noqa: E731
    module = capture(lambda x: region(x).sum(), leaf(4)).module
    policies = {
        target: _torch.recompute_policy(node)
        for target in (aten.exp.default, aten.sum.default)
        for node in module.graph.find_nodes(op="call_function", target=target)
    }
    assert policies[aten.exp.default] is _torch.CheckpointPolicy.PREFER_RECOMPUTE
    assert policies[aten.sum.default] is None


@pytest.mark.parametrize("policy", ["MUST_SAVE", "MUST_RECOMPUTE"])
def test_torchs_partitioner_follows_policies(policy: str):
    """It hands what must be saved to the backward, and not what must run again."""
    module = capture(lambda x: x.exp().cos().sum(), leaf(4)).module
    (power,) = module.graph.find_nodes(op="call_function", target=aten.exp.default)
    _torch.set_recompute_policy(power, _torch.CheckpointPolicy[policy])
    _, backward = _torch.min_cut(module, num_fwd_outputs=1)
    is_saved = power.name in {node.name for node in placeholders(backward)}
    assert is_saved == (policy == "MUST_SAVE")


def test_traced_in_backward(joint: fx.GraphModule):
    """What AOTAutograd traced in each of the two."""
    kinds = {
        target: _torch.traced_in_backward(node)
        for target in (aten.addmm.default, aten.sin.default, aten.cos.default, aten.mm.default)
        for node in joint.graph.find_nodes(op="call_function", target=target)
    }
    assert list(kinds.values()) == [False, False, True, True]


def test_where_a_node_is_to_run():
    """By what torch's partitioner asks of it; what is moved has no policy any more."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    kept, moved = (graph.call_function(aten.copy_.default, (x, x)) for _ in range(2))
    _torch.keep_in_forward(kept)
    assert partitioners._has_tag_is_forward(kept)
    _torch.set_recompute_policy(moved, _torch.CheckpointPolicy.MUST_SAVE)
    _torch.move_to_backward(moved)
    assert _torch.must_run_in_backward(moved)
    assert not _torch.must_run_in_backward(kept)
    assert _torch.recompute_policy(moved) is None


def test_a_node_that_must_stay_in_the_backward():
    """Whether it writes or not."""
    graph = fx.Graph()
    node = graph.call_function(aten.sin.default, (graph.placeholder("x"),))
    assert not _torch.must_run_in_backward(node)
    _torch.must_stay_in_backward(node)
    assert _torch.must_run_in_backward(node)


def test_what_autograd_traced(joint: fx.GraphModule):
    """Its engine notes it on the nodes of whatever is traced meanwhile; not in torch 2.11."""
    kinds = {
        target: _torch.traced_by_autograd(node)
        for target in (aten.addmm.default, aten.sin.default, aten.cos.default, aten.mm.default)
        for node in joint.graph.find_nodes(op="call_function", target=target)
    }
    assert list(kinds.values()) == [False, False, VERSION > (2, 11), VERSION > (2, 11)]


def test_names_of_modules_in_what_is_noted_on_nodes():
    """`annotate` notes them; a note taken off one node stays on the others."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, other = (graph.call_function(aten.sin.default, (x,)) for _ in range(2))
    one.meta["custom"] = other.meta["custom"] = {"module_fqn": "loss", "phase": 1}
    _torch.forget_module_name(one)
    assert [_torch.module_name(node) for node in (one, other, x)] == ["", "loss", ""]
    assert one.meta["custom"] == {"phase": 1}


@pytest.mark.inductor
def test_visible_outputs_keep_their_strides():
    """Inductor asks which they are when it begins to lower a graph."""
    module = capture(lambda x: x.sin().sum(), leaf(8)).module
    forward, _ = _torch.min_cut(module, num_fwd_outputs=1)
    _torch.mark_visible_outputs(forward.graph.output_node(), [0])
    inputs = [_torch.fake_value(node) for node in placeholders(forward)]
    with inputs[0].fake_mode:
        _, graph = _torch.generated_code(forward, inputs, is_backward=False, static_input_idxs=())
    assert list(graph.user_visible_output_strides.values()) == [()]


def test_module_stack_and_source_lines():
    """The path and the class of a module's call, and the user's line, also of a gradient."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module = capture(lambda x: layers(x).sum(), leaf(2, 4)).module
    for target in (aten.tanh.default, aten.tanh_backward.default):
        nodes = module.graph.find_nodes(op="call_function", target=target)
        for node in nodes:
            path, kind = list(_torch.module_stack(node).values())[-1]
            assert path.endswith("[1]") or path.endswith(".1") or "['1']" in path
            assert "Tanh" in str(kind)
    (tanh,) = module.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert "layers(x)" in _torch.source_lines(tanh)
    assert _torch.source_lines(module.graph.output_node()) == ""


def test_results_of_tangents():
    """Each incoming gradient is of the result that can be differentiated, not of one like it."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin().sum(), x.detach() * 2, x.cos()

    joint = capture(function, leaf(8))
    found = _torch.results_of_tangents(joint.module.graph)
    assert [node.target for node in found.values()] == [
        torch.ops.aten.sum.default,
        torch.ops.aten.cos.default,
    ]
    assert all(map(_torch.is_tangent, found))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_inputs_that_are_overwritten_afterwards():
    """AOTAutograd writes to an input that needs a gradient once the compiled forward has run."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.sum()

    x, y = leaf(4) * 1, leaf(4)
    module = capture(function, x, y).module
    (overwritten,) = _torch.overwritten_afterwards(module.graph)
    (product, *_) = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert overwritten in product.args[0].all_input_nodes  # through a copy


def test_effect_tokens_are_no_inputs():
    """The placeholder that orders effects, before those of tensors."""
    seen: list[fx.GraphModule] = []

    def partition(module: fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        seen.append(module)
        return _torch.default_partition(module, inputs, **keywords)

    def function(x: Tensor) -> Tensor:
        torch.ops.higher_order.print("seen")
        return x.sin().sum()

    backend = _torch.aot_autograd(
        fw_compiler=compile_eager, bw_compiler=compile_eager, partition_fn=partition
    )
    torch.compile(function, backend=backend)(leaf(4))
    kinds = [_torch.is_effect_token(node) for node in placeholders(seen[0])]
    assert kinds[:2] == [True, False]


def test_as_boxed():
    """AOTAutograd hands over the list itself."""
    lengths: list[int] = []

    def compiler(module: fx.GraphModule, _inputs: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            lengths.append(len(arguments))
            return module(*arguments)

        return _torch.as_boxed(run)

    backend = _torch.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(lambda x, y: x + y, backend=backend)(torch.ones(2), torch.ones(2))
    assert lengths == [2]


# --- modules and operators ---------------------------------------------------------------------


def test_module_calls():
    """Of this thread, the outermost first, whoever calls in between."""
    found: list[Any] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            found.extend(_torch.module_calls())
            return super().forward(x * scale)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return inner(x + 1.0, scale=2.0)

    inner, outer, x = Inner(2, 2), Outer(), torch.ones(1, 2)
    outer(x)
    assert [module for module, _ in found] == [outer, inner]
    (args, _), (_, keywords) = (given for _, given in found)
    assert args[0] is x
    assert keywords == {"scale": 2.0}
    assert _torch.module_calls() == []


def test_own_and_compiled_calls():
    """What is set runs instead of a module's own call, which still runs its hooks."""
    layer, hooked = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: hooked.append(True))
    assert _torch.compiled_call(layer) is None
    _torch.set_compiled_call(layer, lambda x: "compiled")
    assert layer(torch.ones(2)) == "compiled"
    assert _torch.compiled_call(layer)(None) == "compiled"
    assert _torch.own_call(layer)(torch.ones(2)).shape == (2,)
    assert hooked == [True]


def test_version_of():
    """It grows with each write in place; tensors of inference mode have none."""
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.add_(1)
    assert _torch.version_of(tensor) > before
    with torch.inference_mode():
        assert _torch.version_of(torch.zeros(2)) == 0


def test_arguments_of():
    """By name, with their defaults."""
    dropout = _torch.arguments_of(aten.native_dropout.default)
    assert [argument.name for argument in dropout] == ["input", "p", "train"]
    attention = _torch.arguments_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert {a.name: a.default_value for a in attention}["dropout_p"] == 0.0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dynamo_graph_is_compiled_again_without_dynamo(dynamic: bool):
    """Static inputs are known again, the joint graph is the same, and nothing asks for guards."""
    seen: list[tuple[str, Any]] = []
    again: list[Any] = []

    def compile_it(module: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, values: Any, **keywords: Any) -> Any:
            seen.append((fingerprint(joint), keywords["static_lifetime_input_indices"]))
            return _torch.default_partition(joint, values, **keywords)

        backend = _torch.aot_autograd(
            fw_compiler=compile_eager, bw_compiler=compile_eager, partition_fn=partition
        )
        return backend(module, inputs)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graph = _torch.DynamoGraph(module, inputs)
        assert not any(
            isinstance(v, Tensor) and not isinstance(v, FakeTensor) for v in graph.inputs
        )
        compiled = compile_it(module, inputs)

        def run(*args: Any) -> Any:
            with graph.resumed():
                again.append(compile_it(graph.copy(), graph.inputs))
            assert torch.equal(again[-1](*args)[0], compiled(*args)[0])
            return compiled(*args)

        return run

    layer = nn.Linear(4, 4)
    call = torch.compile(lambda x: layer(x).sin(), backend=backend, dynamic=dynamic)
    call(torch.randn(3, 4)).sum().backward()
    assert len(again) == 1
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 2, "weight and bias"


def test_a_second_compile_knows_as_much_of_sizes_as_the_first_did():
    """A bound that a guard has brought in between would make a slice one that does nothing."""
    seen: list[str] = []

    def partition(joint: fx.GraphModule, values: Any, **keywords: Any) -> Any:
        seen.append(fingerprint(joint))
        return _torch.default_partition(joint, values, **keywords)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graph = _torch.DynamoGraph(module, inputs)
        size = next(value for value in graph.inputs if isinstance(value, torch.SymInt))
        env = size.node.shape_env

        trace = _torch.aot_autograd(
            fw_compiler=compile_eager, bw_compiler=compile_eager, partition_fn=partition
        )
        trace(graph.copy(), graph.inputs)
        assert bool(size < 1000)
        known = env.var_to_range[size.node.expr], list(env.guards), dict(env.axioms)
        trace(graph.copy(), graph.inputs)
        with graph.resumed():
            trace(graph.copy(), graph.inputs)
        assert known == (env.var_to_range[size.node.expr], env.guards, env.axioms)
        return module

    layer = nn.Linear(4, 4)
    call = torch.compile(lambda x: layer(x)[:, :2].sin(), backend=backend)
    batch = torch.randn(3, 4)
    torch._dynamo.mark_dynamic(batch, 0)
    call(batch)
    assert seen[0] == seen[2]
    assert seen[0] != seen[1], "else there is nothing to be known again"


def test_a_second_compile_may_ask_what_is_known_by_then_and_make_sizes_of_its_own():
    """What follows from guards is no new one; a size that it has made is known to whom it meets."""
    made: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graph = _torch.DynamoGraph(module, inputs)
        size = next(value for value in graph.inputs if isinstance(value, torch.SymInt))
        env = size.node.shape_env
        made.append(env.create_unbacked_symint())
        assert bool(size < 100)
        with graph.resumed():
            assert bool(size < 200)
            made.append(env.create_unbacked_symint())
            assert all(one.node.expr in env.var_to_range for one in made)
        assert all(one.node.expr in env.var_to_range for one in made)
        env.pending_fresh_unbacked_symbols.clear()
        return module

    call = torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)
    call(torch.randn(3, 4))
    assert len(made) == 2


def test_a_guard_that_a_second_compile_asks_for_is_noticed():
    """Dynamo could not check it: its guards are made."""

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        graph = _torch.DynamoGraph(module, inputs)
        size = next(value for value in graph.inputs if isinstance(value, torch.SymInt))

        def run(*args: Any) -> Any:
            with (
                pytest.raises(RuntimeError, match="is no guard"),
                graph.resumed(),
            ):
                bool(size < 1000)
            return module(*args)

        return run

    call = torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)
    call(torch.randn(3, 4))


# --- several processes -------------------------------------------------------------------------

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


def test_without_a_job_there_is_no_store_and_no_lockstep():
    """Nor any wrapper."""
    assert _torch.job_store() is None
    assert _torch.lockstep_ranks(nn.Linear(2, 2)) == ()


@needs_distributed
def test_the_store_of_a_job(job: None):
    """The first value set counts, a value that is not expected is handed back, and keys differ."""
    store = _torch.part_of_store(_torch.job_store(), "ours")
    assert store.compare_set("key", "-", "-") == b"-"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "one") == b"one"
    assert store.compare_set("key", "", "two") == store.compare_set("key", "-", "-") == b"one"
    assert not _torch.job_store().check(["key"])
    assert store.timeout.total_seconds() == 77
    assert [store.add("count", 1), store.add("count", 1)] == [1, 2]


@needs_distributed
def test_a_module_is_called_in_lockstep_within_its_wrapper(job: None):
    """By DistributedDataParallel itself, or below it where nothing may be left out."""
    seen = []

    class Outer(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert _torch.wrapping_ranks(self) == (0,)
            seen.append([_torch.lockstep_ranks(module) for module in (self, self[0])])
            return super().forward(x)

    for options, inner in (({}, (0,)), ({"find_unused_parameters": True}, ())):
        wrapped = nn.parallel.DistributedDataParallel(Outer(nn.Linear(2, 2)), **options)
        assert _torch.lockstep_ranks(wrapped) == (0,)
        assert _torch.lockstep_ranks(wrapped.module) == ()
        wrapped(torch.ones(1, 2))
        assert seen.pop() == [(0,), inner]


@needs_distributed
def test_parameters_over_a_mesh_are_in_lockstep(job: None):
    """As tensor parallelism and FSDP2 leave them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    layer = parallelize_module(nn.Linear(2, 2), mesh, ColwiseParallel())
    assert _torch.lockstep_ranks(nn.Sequential(layer)) == (0,)


@pytest.fixture(name="job")
def _job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of this process, which counts as one of several."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=77),
    )
    monkeypatch.setattr(_torch.distributed, "_is_job", lambda: True)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def two_processes() -> Any:
    """A group of two, of which only this process is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_processes")
def test_sharded_units():
    """The root and one layer: what is gathered, and which of them runs."""
    from torch.distributed.fsdp import fully_shard

    inner = nn.Linear(4, 8, bias=False)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(inner))
    fully_shard(model[1])
    fully_shard(model)
    seen: list[list[_torch.ShardedUnit]] = []
    inner.register_forward_hook(lambda *_: seen.append(_torch.sharded_units(model)))
    loss = model(torch.ones(2, 4)).sum()
    root, layer = sorted(seen[0], key=lambda unit: not unit.is_root)
    assert (root.is_root, layer.is_root) == (True, False)
    assert len(_torch.units_that_gather(layer.gathered)) == 2
    assert list(_torch.sharding_ranks(model.modules())) == [(0, 1), (0, 1)]
    assert not _torch.units_that_gather([torch.ones(1)])
    assert len(_torch.tensors_of_units([layer])) > len(layer.gathered)
    assert layer.runs_forward
    assert not layer.is_latest
    assert [u.is_root for u in _torch.sharded_units(model) if u.is_latest] == [True]
    assert not any(unit.runs_forward for unit in _torch.sharded_units(model))
    assert (root.gathered_nbytes, layer.gathered_nbytes) == (64, 128)
    assert (root.kept_nbytes, layer.kept_nbytes) == (64, 0)
    assert (layer.buffer_nbytes, layer.reduced_nbytes) == (128, 128)
    assert layer.gradient_share == 0.5
    nodes, names = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [source for source, _ in node.next_functions if source is not None]
    assert _torch.REGISTERS_REDUCTION in names


@pytest.mark.usefixtures("two_processes")
def test_tensors_of_units():
    """Shards always; what is gathered has storage only while it is there."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4, bias=False))
    shards = _torch.tensors_of_units(_torch.sharded_units(model))
    assert [t.shape for t in shards] == [(4, 4)]
    model(torch.ones(2, 4))
    sizes = [t.untyped_storage().nbytes() for u in _torch.sharded_units(model) for t in u.moving]
    assert sizes == [64]
    assert not _torch.sharded_units(nn.Linear(4, 4))


@pytest.mark.usefixtures("two_processes")
def test_gathering():
    """Which units gather and let go in a forward, and what they have then."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(fully_shard(nn.Linear(4, 4, bias=False)) for _ in range(2)))
    fully_shard(model)
    seen: list[tuple[list[object], list[int]]] = []

    def look(*_: object) -> None:
        gathering = _torch.sharded_units(model)[0].gathering
        assert gathering is not None
        units = [gathering.gathered(number) for number in range(len(gathering.states()))]
        sizes = [sum({t.untyped_storage().nbytes() for t in tensors}) for tensors in units]
        assert all(isinstance(tensor, torch.Tensor) for tensor in gathering.in_flight())
        seen.append((gathering.states(), sizes))

    for layer in model:
        layer.register_forward_hook(look, prepend=True)
    model(torch.ones(2, 4)).sum().backward()
    (first, first_sizes), (second, second_sizes) = seen
    changed = [one != other for one, other in zip(first, second, strict=True)]
    assert sum(changed) == 2
    assert sorted(first_sizes) == sorted(second_sizes) == [0, 64]
    units = _torch.sharded_units(model)
    assert units[0].gathering == units[1].gathering


def test_all_modules():
    """Those of `modules()` in its order: with several names, without any, and in cycles, too."""
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.Sequential(nn.ReLU(), inner), nn.Tanh())
    outer.register_module("none", None)
    inner.add_module("around", outer)
    assert list(_torch.all_modules([outer])) == list(outer.modules())
    other = nn.Linear(1, 1)
    assert list(_torch.all_modules([other, outer, inner])) == [other, *outer.modules()]


def test_own_parameters():
    """Those of the modules that are given, not those of their parts; of shared ones each."""
    inner = nn.Linear(2, 2, bias=False)
    outer = nn.Sequential(inner)
    outer.register_parameter("own", nn.Parameter(torch.ones(1)))
    outer.register_parameter("none", None)
    found = list(_torch.own_parameters([outer, inner, inner]))
    assert list(map(id, found)) == list(map(id, [outer.own, inner.weight, inner.weight]))


@pytest.mark.usefixtures("two_processes")
def test_units_that_are_gathered_ahead_are_told_by_their_number_among_all():
    """Where the user has said so for the second of two models."""
    from torch.distributed.fsdp import fully_shard

    models = []
    for size in (4, 8):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(3)))
        models.append(fully_shard(nn.Sequential(*map(fully_shard, model))))
        models[-1](torch.ones(2, size))
    models[1][2].set_modules_to_backward_prefetch([models[1][0]])
    units = _torch.sharded_units(nn.ModuleList(models))
    ahead = [[units[number].gathered_nbytes for number in u.gathered_ahead] for u in units]
    assert [found for found in ahead if found] == [[8 * 8 * 4]]
    number = next(u.gathered_ahead[0] for u in units if u.gathered_ahead)
    assert any(t is models[1][0].weight for t in units[number].shards)


@pytest.mark.usefixtures("two_processes")
def test_sharded_gradients():
    """Of all models among the modules: of shards, and of what is gathered of them."""
    from torch.distributed.fsdp import fully_shard

    models = [fully_shard(nn.Linear(4, size, bias=False)) for size in (4, 8)]
    pair = nn.ModuleList(models)
    models[1].set_requires_gradient_sync(False)
    assert len(_torch.sharded_units(pair)) == 2
    assert not list(_torch.sharded_gradients(pair.modules()))
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    second = _torch.sharded_units(models[1])[0].gathered
    found = list(_torch.sharded_gradients(pair.modules()))
    assert list(map(id, next(zip(*found, strict=True)))) == [id(models[0].weight), id(second[0])]
    assert [gradient.shape for _, gradient in found] == [(4, 4), (8, 4)]
    assert next(_torch.sharded_gradients([], gathered=second))[1] is second[0].grad
    assert not list(_torch.sharded_gradients([], gathered=[torch.ones(1)]))
    both = list(_torch.sharded_gradients(pair.modules(), gathered=second))
    assert [id(gradient) for _, gradient in both] == [id(gradient) for _, gradient in found]
    assert not list(_torch.sharded_gradients([nn.Linear(4, 4)]))


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("waits_for", ["reduction", "replicas"])
def test_gradients_that_wait(waits_for: str):
    """In the type that they are reduced in; or until replicas reduce what shards have reduced."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if waits_for == "reduction":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(4, 4, bias=False), mp_policy=policy)
        model.set_requires_gradient_sync(False)
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
        model.set_requires_all_reduce(False)
    assert not _torch.waiting_gradients(_torch.sharded_units(model))
    model(torch.ones(2, 4)).sum().backward()
    [waiting] = _torch.waiting_gradients(_torch.sharded_units(model))
    assert waiting.nbytes == 64
    assert [gradient is waiting for _, gradient in _torch.sharded_gradients([model])] == [True]
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model(torch.ones(2, 4)).sum().backward()
    assert not _torch.waiting_gradients(_torch.sharded_units(model))
    model.zero_grad()
    assert not list(_torch.sharded_gradients([model]))


@pytest.mark.usefixtures("two_processes")
def test_what_replicas_keep_of_gradients():
    """What they reduce, in the type of that, until the backward ends or they are told to."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model = fully_shard(layer, mesh=mesh, mp_policy=policy)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert [unit.gradient_share for unit in _torch.sharded_units(model)] == [3.0]
    model.set_requires_all_reduce(False)
    assert [unit.gradient_share for unit in _torch.sharded_units(model)] == [2.0]
    assert not any(unit.waiting for unit in _torch.sharded_units(model))
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    [unit] = _torch.sharded_units(model)
    assert unit.waiting == frozenset(map(id, unit.gathered))


def test_ambient():
    """Switches and casts are as they were, and afterwards as they are."""
    before = _torch.Ambient.now()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = _torch.Ambient.now()
        with before.again():
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
        assert _torch.Ambient.now() == inside != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _torch.Ambient.now() != before
        with before.again():
            assert torch.backends.cuda.flash_sdp_enabled()
    with inside.again():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert _torch.Ambient.now() == before


def test_own_gradients():
    """Of leaves, without a warning about others."""
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    result = 2 * one
    result.sum().backward()
    assert [t is one for t, _ in _torch.own_gradients([one, two, result])] == [True]
    assert next(_torch.own_gradients([one]))[1].tolist() == [2, 2]


def test_active_replica_and_replica_among(tmp_path: Path):
    """While the forward of a DistributedDataParallel runs."""
    place = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    inner = nn.Linear(4, 4)
    model = nn.parallel.DistributedDataParallel(inner)
    seen: list[Any] = []
    inner.register_forward_hook(lambda *_: seen.append(_torch.active_replica()))
    model(torch.ones(2, 4))
    found = [_torch.replica_among(modules) for modules in ([inner, model], [inner])]
    torch.distributed.destroy_process_group()
    assert seen == [model]
    assert _torch.active_replica() is None
    assert found == [model, None]


@pytest.mark.skipif(not _torch.has_triton_package(), reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_standing_in():
    """Inside, torch and triton have the GPU; outside, what they knew before.

    In a process of its own, as it is used: for CPython, tensors stay sequences whose item was
    replaced once, and `torch.tensor` takes no list of numbers that are tensors any more.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        apart.submit(_let_a_gpu_stand_in).result()


def _let_a_gpu_stand_in() -> None:
    from triton.runtime import driver

    hopper = {"capability": (9, 0), "multiprocessors": 132, "memory_nbytes": 80 << 30}
    rest = {"shared_nbytes": 227 << 10, "threads": 2048, "cache_nbytes": 50 << 20}
    invert = torch.Tensor.__invert__
    assert not _triton.has_triton()
    with _torch.gpu_standing_in(_torch.AbsentGpu(name="H100", **hopper, **rest)):
        assert torch.cuda.get_device_capability() == (9, 0)
        assert driver.active.get_current_target().arch == 90
        assert _triton.has_triton()
        with FakeTensorMode():
            assert (~torch.empty(2, dtype=torch.bool, device="cuda")).device.type == "cuda"
            x, weight = (torch.empty(2, 3, n, n, device="cuda") for n in (8, 3))
            last = torch.channels_last
            found = torch.conv2d(x.to(memory_format=last), weight)
            assert found.is_contiguous(memory_format=last)
    assert not torch.cuda.is_available()
    assert not _triton.has_triton()
    assert torch.Tensor.__invert__ is invert


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("dtype", "given"), [(torch.bfloat16, torch.bfloat16), (None, None)])
def test_autocast_on_cpu(dtype: torch.dtype | None, given: torch.dtype | None):
    """In a traced graph autocast for CUDA holds on the CPU, in CUDA's own type if none is named."""

    def traced(x: Tensor) -> Tensor:
        with torch.autocast("cuda", given):
            return x @ x

    with _torch.autocast_on_cpu():
        found = torch.compile(traced, backend="eager")(torch.ones(2, 2))
    assert found.dtype is (dtype or torch.get_autocast_dtype("cuda"))
    assert torch.amp._enter_autocast.__module__ == "torch.amp.autocast_mode"


def test_collectives_so_far(tmp_path: Path):
    """Each group counts those that it has begun, in graphs or not; without a job there is none."""
    assert _torch.collectives_so_far() == {}
    first, second = on_ranks({"counts": _counts_of_collectives}, tmp_path)["counts"]
    assert first == second == ([0, 0, 0], [1, 1, 0], [2, 1, 0])


def _counts_of_collectives(_rank: int) -> tuple[list[int], ...]:
    """After none, after one of each of two groups, and after one of a graph."""
    groups = [distributed.new_group([0, 1]) for _ in range(3)]
    names = [group.group_name for group in groups]

    def counts() -> list[int]:
        return [_torch.collectives_so_far()[name] for name in names]

    found = [counts()]
    for group in groups[:2]:
        distributed.all_reduce(torch.ones(1), group=group)
    found.append(counts())
    reduced = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", names[0])
    torch.ops._c10d_functional.wait_tensor(reduced)
    return (*found, counts())


@pytest.mark.usefixtures("two_processes")
def test_communicating_ranks():
    """Those of the group that a collective names; all of the job where it names none that is."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = torch.distributed.new_group([0])
    named = [
        graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", name))
        for name in (torch.distributed.group.WORLD.group_name, own.group_name, "none")
    ]
    assert [_torch.communicating_ranks(node) for node in named] == [(0, 1), (0,), (0, 1)]


def test_is_collective_and_is_wait():
    """Told by the namespace and the name of the operator."""
    ops = torch.ops._c10d_functional
    asked = [ops.all_gather_into_tensor.default, ops.all_reduce.default, ops.wait_tensor.default]
    told = [[f(op) for op in (*asked, aten.mm.default)] for f in _KINDS]
    assert told == [
        [True, True, True, False],
        [False, False, True, False],
    ]


_KINDS = (_torch.is_collective, _torch.is_wait)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_flat_units(strategy: str):
    """Of FSDP1: the root and one layer, whose parameters are views of what is gathered."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def shard(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[strategy],
        )

    def gathered(inputs: list[Tensor]) -> list[int]:
        return _torch.gathered_inputs(joint, inputs)

    joint = fx.symbolic_trace(lambda primals_1, primals_2, tangents_1: primals_1)
    inner = nn.Linear(4, 8, bias=False)
    model = shard(nn.Sequential(nn.Linear(4, 4, bias=False), shard(inner)))
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append((_torch.sharded_units(model), gathered([torch.ones(2)[:1], inner.weight])))

    inner.register_forward_hook(look)
    model(torch.ones(2, 4)).sum().backward()
    (root, layer), positions = seen[0]
    assert positions == [1]
    assert gathered([torch.ones(2)]) == []
    assert (root.is_root, layer.is_root) == (True, False)
    assert layer.runs_forward
    is_shared, stays = strategy != "NO_SHARD", strategy == "SHARD_GRAD_OP"
    assert (root.gathered_nbytes, layer.gathered_nbytes) == (64 * is_shared, 128 * is_shared)
    assert (root.kept_nbytes, layer.kept_nbytes) == (64 * is_shared, 128 * stays)
    assert layer.buffer_nbytes == layer.gathered_nbytes
    assert layer.gradient_share == (0.5 if is_shared else 1.0)
    assert len(layer.moving) == is_shared
    after = _torch.sharded_units(model)[1]
    assert sum(tensor.untyped_storage().nbytes() for tensor in after.moving) == 0
    assert sum(tensor.nbytes for tensor in after.shards) == (64 if is_shared else 128)
    assert any(tensor is inner.weight for tensor in after.gathered)
    found = [gradient for _, gradient in _torch.sharded_gradients(model.modules())]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    assert sum(sizes.values()) == 4 * 48 // (2 if is_shared else 1)


@pytest.mark.inductor
def test_asking_code_cache_and_code_can_be_cached():
    """What is stored has a name, under which it is found; unless nobody answers for it."""
    from torch._inductor.utils import fresh_cache

    def compiled(note: Any) -> _torch.CodeCache:
        torch.compiler.reset()
        x = torch.ones(3, requires_grad=True)
        with _torch.asking_code_cache() as cache:
            loss = torch.compile(lambda x: x.sin().sum())(x)
        cache.close(note)
        loss.backward()
        return cache

    names: list[str] = []
    module = fx.symbolic_trace(nn.Identity())
    assert _torch.code_can_be_cached(module)
    for option in ({"enable_autograd_cache": False}, {"bundled_autograd_cache": True}):
        with torch._functorch.config.patch(option):
            assert not _torch.code_can_be_cached(module)
    with fresh_cache():
        assert [compiled(None).found, compiled(names.append).found] == ["", ""]
        second = compiled(None)
        assert (second.asked, [second.found]) == (1, names)
        second.forget()
        assert compiled(None).found == ""
    assert len(names[0].split()) == 3  # of the question, forward and backward


def test_backend_compiler_failed():
    """What Dynamo makes of a backend's error, which it holds."""

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise ValueError("no")

    with pytest.raises(_torch.BackendCompilerFailed) as raised:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert isinstance(raised.value.inner_exception, ValueError)


def test_what_the_configuration_lets_be_written_over():
    """Inductor's results in place of what they are made from; saved values in the backward."""
    assert _torch.writes_in_place()
    assert _torch.donates_saved_values()
    with torch._inductor.config.patch(inplace_buffers=False):
        assert not _torch.writes_in_place()
    with torch._functorch.config.patch(donated_buffer=False):
        assert not _torch.donates_saved_values()


def test_convolutions_are_given_channels_last():
    """Where there are any, and the configuration does not forbid it."""

    def traced(layer: nn.Module, x: Tensor) -> fx.GraphModule:
        return capture(lambda x: layer(x).sum(), x).module

    convolution = traced(nn.Conv2d(2, 2, 3), torch.ones(1, 2, 8, 8))
    assert _torch.prefers_channels_last(convolution.graph.nodes)
    linear = traced(nn.Linear(2, 2), torch.ones(1, 2))
    assert not _torch.prefers_channels_last(linear.graph.nodes)
    with torch._inductor.config.patch(layout_optimization=False):
        assert not _torch.prefers_channels_last(convolution.graph.nodes)


def test_sizes_as_seen():
    """A second size makes no symbol of it."""
    shapes = []

    def noting(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        shapes.append([type(size) for value in inputs for size in getattr(value, "shape", ())])
        return module.forward

    compiled = torch.compile(lambda x: x + 1, backend=noting)
    with _torch.sizes_as_seen():
        for size in (3, 4):
            compiled(torch.ones(size))
    assert shapes == [[int], [int]]


def test_whether_an_option_is_as_torch_has_it():
    """What the user has set is theirs."""
    assert _torch.is_as_torch_has_it("unroll_reductions_threshold")
    with torch._inductor.config.patch(unroll_reductions_threshold=5):
        assert not _torch.is_as_torch_has_it("unroll_reductions_threshold")
    assert _torch.is_as_torch_has_it("unroll_reductions_threshold")
