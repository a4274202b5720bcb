"""Models that are spread over processes, under Inductor: graphs of which inputs are no tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn

import autoremat

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
]


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    """A group of two, of which only this process is there: collectives communicate nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    """Up and down again."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Sequential):
    """Several, and a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def parallel(depth: int = 3) -> nn.Module:
    """Blocks in tensor parallel, whose graphs are given the group of processes."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = Blocks(*[Block() for _ in range(depth)])
    mesh = distributed.init_device_mesh("cpu", (2,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def test_tensor_parallel_is_planned() -> None:
    """Its step is within a budget that torch's own partition exceeds, and nothing falls back."""
    x = torch.ones(256, 16)
    model = parallel()
    autoremat.optimize(model, 1 << 40, verbose=False, strict=True)
    model(x).backward()
    whole = autoremat.report(model).predicted_peak_nbytes
    torch._dynamo.reset()
    model = parallel()
    resident = int(autoremat.resident_nbytes(model, (x,)))
    autoremat.optimize(model, resident + (whole - resident) * 85 // 100, verbose=False, strict=True)
    model(x).backward()
    report = autoremat.report(model)
    assert not report.fallbacks
    assert report.is_within_budget
    assert any(value.recomputes for value in report.values)
    assert report.code_times_us is None  # what communicates has no time that one process could know
