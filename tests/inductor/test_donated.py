"""Saved tensors that the compiled backward may overwrite: the reading takes those that torch takes.

AOTAutograd decides it after the graph is split, so it is worked out before, by torch's own rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import graph_compile

import autoremat
from autoremat import _torch
from autoremat.emit.op_by_op import compile_eager
from tests.tiny import WIDTH, Chain, Layers, images, rows
from tests.training import measured, optimized, scalar, step


class ReturnsSaved(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return torch.tanh(self.second(h)).sin(), h.view(-1)


class SavesViews(Layers):
    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.tanh(self.first(x)).chunk(2, 1)
        return (a.sin() * b.cos() * x[:, : WIDTH // 2].sin()).sum()


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).sum()


def donated(model: nn.Module, x: Tensor, monkeypatch: Any, **options: Any) -> list[set[str]]:
    """Names of what we say is donated, and of what AOTAutograd then donates."""
    torch._dynamo.reset()
    found: list[set[str]] = []
    original = graph_compile.collect_bw_donated_buffer_idxs

    def partition(module: Any, inputs: Any, **keywords: Any) -> Any:
        modules = _torch.default_partition(module, inputs, **keywords)
        count = keywords["num_fwd_outputs"]
        found.append(set(_torch.donated_inputs(*modules, num_fwd_outputs=count)))
        return modules

    def collect(forward: Any, backward: Any, meta: Any) -> Any:
        positions = original(forward, backward, meta)
        placeholders = list(backward.graph.find_nodes(op="placeholder"))
        found.append({placeholders[position].name for position in positions})
        return positions

    monkeypatch.setattr(graph_compile, "collect_bw_donated_buffer_idxs", collect)
    backend = _torch.aot_autograd(
        fw_compiler=compile_eager,
        bw_compiler=compile_eager,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    scalar(torch.compile(model, backend=backend, **options)(x)).backward()
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(Chain, rows), (ReturnsSaved, rows), (SavesViews, rows), (Normalised, images)],
)
def test_what_is_donated_is_known_before(
    make: Callable[[], nn.Module], batch: Callable[[], Tensor], dynamic: bool, monkeypatch: Any
):
    """Neither inputs nor what is returned, whatever views of them are saved."""
    ours, theirs, *_ = donated(make(), batch(), monkeypatch, dynamic=dynamic)
    assert ours == theirs
    assert ours


def test_nothing_is_donated_where_torch_is_told_not_to():
    """For backwards that keep the graph, users turn it off."""
    with torch._functorch.config.patch(donated_buffer=False), pytest.MonkeyPatch.context() as patch:
        assert donated(Chain(), rows(), patch) == [set()]


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("is_on", [True, False])
def test_the_reading_is_what_is_measured(is_on: bool):
    """To the byte, as saved activations become gradients in place, or do not."""
    with torch._functorch.config.patch(donated_buffer=is_on):
        model = optimized(Chain, None, policy="save-all", compiler="inductor")
        step(model, (rows(),))
        assert autoremat.report(model).predicted_peak_nbytes == measured(model, (rows(),))
