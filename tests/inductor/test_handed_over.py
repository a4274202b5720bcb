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
from torch._inductor.codecache import FxGraphCache
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache

import autoremat
from autoremat import _torch
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

    with mock.patch.object(GraphLowering, "codegen", noted):
        planned = autoremat.optimize(model, budget=BUDGET, verbose=False)
        found = gradients(planned, x)
    readings = autoremat.report(planned)
    assert readings.predicted_peak_nbytes <= readings.budget_nbytes
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert len(generated) % 2 == 0  # of readings: the compile itself has generated nothing
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


def test_code_that_may_overwrite_other_inputs_is_another() -> None:
    """Inductor's key does not tell them apart."""
    joint = capture(lambda x: (x.sin() * x.cos()).sum(), leaf(64, 64)).module
    _, backward = _torch.min_cut(joint, num_fwd_outputs=1)
    values = list(map(_torch.fake_value, backward.graph.find_nodes(op="placeholder")))
    options: Any = {"is_backward": True, "static_input_idxs": [0]}
    context = TracingContext(values[0].fake_mode)
    with values[0].fake_mode, tracing(context), _torch.handing_over():
        assert _torch.generated_code(backward, values, donated=[0], **options)
    (code,) = _torch.generating._unclaimed._by_key.values()
    assert code.donated == [0]
    (key,) = _torch.generating._unclaimed._by_key
    with tracing(context):
        found, facts = FxGraphCache.load_with_key(
            key, [], values, True, None, is_backward=True, constants=mock.Mock()
        )
    assert (found, facts["cache_state"]) == (None, "miss")
    assert not _torch.generating._unclaimed._by_key
