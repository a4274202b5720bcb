"""Two processes that share a model, each way of sharing it: peaks, gradients, one plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat import OverBudgetWarning
from autoremat.memory.meter import resident_nbytes
from tests.process_group import on_ranks
from tests.training import make_seeded

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.thorough,
]

WIDTH, ROWS, LAYERS = 128, 512, 6
GIVEN: dict[str, Any] = {"compiler": "eager", "verbose": False, "time_limit": 2.0}
SHARE = 0.7
STEPS = 4  # before one is measured: it is promised from the third on
LOOKS = 4  # at the peak: what gloo's own threads free late seems to live on

Share = Callable[[nn.Module], nn.Module]
Plan = Callable[[nn.Module, int], None]
Take = Callable[[nn.Module, Tensor], None]


class Block(nn.Module):
    """`x + down(gelu(up(x)))`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    """A linear layer, equal blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


# --- ways to share, and to plan ------------------------------------------------------------------


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model)


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    """DistributedDataParallel in buckets of about two blocks."""
    return DistributedDataParallel(model, bucket_cap_mb=1, **options)


def parallel(model: nn.Module) -> nn.Module:
    """Tensor parallel: up by columns, down by rows."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = distributed.init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def whole(model: nn.Module, budget: int) -> None:
    """The model is optimised."""
    autoremat.optimize(model, budget, **GIVEN)


def by_block(model: nn.Module, budget: int) -> None:
    """Each block is compiled by itself."""
    for block in model.blocks:
        block.compile(backend="autoremat", options={"budget": budget, **GIVEN})


def modules_of_one_budget(model: nn.Module, budget: int) -> None:
    """Each block is optimised, under a budget that they share."""
    shared = autoremat.Budget(budget)
    for block in model.blocks:
        autoremat.optimize(block, shared, **GIVEN)


def accumulating(called: nn.Module, x: Tensor) -> None:
    """Two backwards, of which the first reduces nothing."""
    with called.no_sync():
        called(x).backward()
    called(x).backward()


def one_batch(called: nn.Module, x: Tensor) -> None:
    """A step's forward and backward."""
    called(x).backward()


def outcome(
    share: Share,
    plan: Plan,
    take: Take,
    _rank: int,
    *,
    shares_first: bool,
) -> tuple[float, float, bool, list[Any]]:
    """Peak and prediction as parts of the budget, whether gradients are equal, and the plan."""
    plain = share(made := make_seeded(Blocks))
    highest, expected = peak_of(plain, take), gradients_of(made)
    budget = int(SHARE * highest)
    model = make_seeded(Blocks)
    if shares_first and share is not replicated:
        called = share(model)
        plan(model, budget)
    else:
        plan(model, budget)
        called = share(model)
    peak = peak_of(called, take)
    pairs = zip(gradients_of(model), expected, strict=True)
    equal = all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in pairs)
    report = autoremat.report(model if plan is not modules_of_one_budget else model.blocks[0])
    plans = [(graph.name, [v.recomputes for v in graph.values]) for graph in report.graphs]
    return peak / budget, report.predicted_peak_nbytes / budget, equal, plans


def peak_of(called: nn.Module, take: Take) -> int:
    """Measured after the steps that settle it, the buckets of gradients included."""
    found, x = [], batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverBudgetWarning)
        for number in range(STEPS + LOOKS):
            called.zero_grad(set_to_none=True)
            distributed.barrier()
            if number < STEPS:
                take(called, x)
                continue
            before = resident_nbytes(called, x)
            found.append(before + autoremat.measure_peak(lambda: take(called, x), device="cpu"))
    is_replica = isinstance(called, DistributedDataParallel)
    buckets = sum(p.nbytes for p in called.parameters()) if is_replica else 0
    return min(found) + buckets


def gradients_of(model: nn.Module) -> list[Tensor]:
    """On this rank."""
    found = (parameter.grad for parameter in model.parameters())
    return [g.to_local() if hasattr(g, "to_local") else g for g in found if g is not None]


SCENARIOS = {
    "sharded": partial(outcome, sharded, whole, one_batch, shares_first=True),
    "blocks, sharded first": partial(outcome, sharded, by_block, one_batch, shares_first=True),
    "blocks, compiled first": partial(outcome, sharded, by_block, one_batch, shares_first=False),
    "blocks of one budget": partial(
        outcome, sharded, modules_of_one_budget, one_batch, shares_first=True
    ),
    "tensor parallel": partial(outcome, parallel, whole, one_batch, shares_first=True),
    "replicated": partial(outcome, replicated, whole, one_batch, shares_first=False),
    "static graph": partial(
        outcome, partial(replicated, static_graph=True), whole, one_batch, shares_first=False
    ),
    "bucket views": partial(
        outcome,
        partial(replicated, gradient_as_bucket_view=True),
        whole,
        one_batch,
        shares_first=False,
    ),
    "accumulating": partial(outcome, replicated, whole, accumulating, shares_first=False),
}
