"""Readings write loops without vectors: what is allocated and fused does not depend on it.

Generated code is compared with what Inductor writes with vectors, from which it may differ inside
of kernels only.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config, cpu_vec_isa

import autoremat
from autoremat.inductor import hook
from autoremat.planning import found_before
from tests.tiny import WIDTH, many_rows

pytestmark = pytest.mark.inductor


class Attention(nn.Module):
    """Softmax, and a sum over what an outer loop shares."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.heads = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        scores = F.softmax(self.heads(x) @ x.transpose(0, 1), -1)
        return F.gelu(scores @ x).float().square().mean()


class Images(nn.Module):
    """Convolutions, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "float32": (lambda: Attention(torch.float32), many_rows),
    "bfloat16": (lambda: Attention(torch.bfloat16), lambda: many_rows().bfloat16()),
    "images": (Images, lambda: torch.ones(4, 8, 16, 16)),
}


def calls_of(name: str) -> tuple[list[str], list[str]]:
    """The calls that Inductor writes, kernels left out, and their kernels."""
    make, inputs = MODELS[name]
    sources: list[str] = []
    known = hook.read_wrapper

    def noted(source: str, *given: Any) -> Any:
        sources.append(source)
        return known(source, *given)

    torch._dynamo.reset()
    with (
        mock.patch.object(hook, "read_wrapper", noted),
        mock.patch.object(found_before._torch, "caches_are_off", return_value=True),
    ):
        autoremat.plan(make().train(), inputs(), budget="1GB", verbose=False)
    return [ast.unparse(hook.call_function(source)) for source in sources], sources


@pytest.mark.parametrize("name", MODELS)
def test_the_calls_are_the_same(name: str) -> None:
    """Allocations, reuse, frees, and which kernels there are."""
    width = cpu_vec_isa.pick_vec_isa().bit_width()
    without, plain = calls_of(name)
    with config.patch({"cpp.simdlen": width}):
        with_vectors, vectorised = calls_of(name)
    assert without == with_vectors
    assert len(without) >= 2
    assert not any("at::vec::" in source for source in plain)
    assert any("at::vec::" in source for source in vectorised)
