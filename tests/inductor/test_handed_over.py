"""What a reading has generated is what Inductor compiles: it is not generated again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import autoremat
from autoremat import _torch
from autoremat.graph.joint_graph import copy_module
from autoremat.inductor import reading
from autoremat.inductor.hook import PartitionerHook
from autoremat.planning import found_before
from tests.joint_graphs import capture, leaf
from tests.tiny import Chain, many_rows

pytestmark = pytest.mark.inductor
BUDGET = "220kB"


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    """Neither code nor readings."""
    torch.compiler.reset()
    counters.clear()
    off = mock.patch.object(found_before._torch, "caches_are_off", return_value=True)
    with fresh_cache(), off:
        yield


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of one step."""
    model.zero_grad()
    model(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_module_that_was_read_is_generated_once() -> None:
    """Forward and backward are each found in Inductor's cache, whenever they are compiled."""
    model, x = Chain(), many_rows()
    expected = gradients(model, x)
    generated: list[Any] = []
    codegen = GraphLowering.codegen

    def noted(graph: GraphLowering) -> Any:
        generated.append(graph)
        return codegen(graph)

    read: list[Any] = []
    known = reading.read_code

    def noted_reading(*given: Any) -> Any:
        read.append(given)
        return known(*given)

    with (
        mock.patch.object(GraphLowering, "codegen", noted),
        mock.patch.object(reading, "read_code", noted_reading),
    ):
        planned = autoremat.optimize(model, budget=BUDGET, verbose=False)
        found = gradients(planned, x)
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert len(generated) == 2 * len(read)  # the compile itself has generated nothing
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_without_inductors_cache_it_is_generated_again() -> None:
    """Nothing is kept, nothing is found, and the step is right."""
    model, x = Chain(), many_rows()
    expected = gradients(model, x)
    with config.patch(fx_graph_cache=False):
        planned = autoremat.optimize(model, budget=BUDGET, verbose=False)
        found = gradients(planned, x)
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def backward_of(function: Any, *inputs: torch.Tensor) -> tuple[Any, list[Any]]:
    """The backward as torch would split it, and its inputs."""
    _, backward = _torch.min_cut(capture(function, *inputs).module, num_fwd_outputs=1)
    return backward, list(map(_torch.fake_value, backward.graph.find_nodes(op="placeholder")))


def keys_of(backward: Any, values: list[Any], context: TracingContext, **options: Any) -> set[str]:
    """Under which key its code is kept."""
    kept: list[str] = []
    with mock.patch.object(_torch.generating._unclaimed, "keep", lambda key, _: kept.append(key)):
        hook = {"custom_partitioner_fn": PartitionerHook()}
        with values[0].fake_mode, tracing(context), config.patch(hook), _torch.handing_over():
            assert _torch.generated_code(
                copy_module(backward), values, is_backward=True, static_input_idxs=[0], **options
            )
    return set(kept)


def test_code_that_may_overwrite_other_inputs_is_another() -> None:
    """Inductor's own key does not tell them apart, ours in it does."""
    backward, values = backward_of(lambda x: (x.sin() * x.cos()).sum(), leaf(64, 64))
    context = TracingContext(values[0].fake_mode)
    first, again = (keys_of(backward, values, context, donated=[0]) for _ in range(2))
    other = keys_of(backward, values, context)
    assert len(first) == 1
    assert first == again != other


def test_what_is_kept_is_of_one_compile() -> None:
    """Guards that its symbols have hold for no other; what a compile does not come to goes."""
    unclaimed = _torch.generating._Unclaimed()
    one, other = (TracingContext(FakeTensorMode(shape_env=ShapeEnv())) for _ in range(2))
    forward, backward = mock.Mock(), mock.Mock()
    with tracing(one):
        unclaimed.keep("forward", forward)
        unclaimed.keep("backward", backward)
    with tracing(other):
        assert unclaimed.take("backward") is None
        unclaimed.drop()
    with tracing(one):
        assert unclaimed.take("backward") is backward
        assert unclaimed.take("backward") is None
        unclaimed.drop()
        assert unclaimed.take("forward") is None


def test_a_kernel_that_does_not_compile_is_what_inductor_cannot_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is where Inductor has generated it itself: the step is planned op by op."""
    load, errors = PyCodeCache.load_by_key_path, iter([RuntimeError("no compiler")])

    def fail_once(*given: Any, **more: Any) -> Any:
        for error in errors:
            raise error
        return load(*given, **more)

    model, x = Chain(), many_rows()
    expected = gradients(model, x)
    monkeypatch.setattr(PyCodeCache, "load_by_key_path", fail_once)
    planned = autoremat.optimize(model, budget=BUDGET, verbose=False)
    with pytest.warns(autoremat.FallbackWarning, match="AR120"):
        found = gradients(planned, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_are_read_as_results_that_the_user_sees(keeps: bool) -> None:
    """As Inductor compiles them, unless its configuration says that they are not."""
    seen: list[list[int]] = []
    marked = mock.patch.object(_torch, "mark_visible_outputs", lambda _, found: seen.append(found))
    with config.patch(bw_outputs_user_visible=keeps), marked:
        autoremat.plan(Chain(), many_rows(), budget="1GB", verbose=False)
    forward, backward = seen[:2]
    assert forward == [0]
    assert len(backward) == (len(list(Chain().parameters())) if keeps else 0)
