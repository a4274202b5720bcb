"""Sizes that vary, where something stands around layers: checkpoints, DistributedDataParallel."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import autoremat
from tests.process_group import one_process  # noqa: F401
from tests.session.test_sizes import (
    RANGES,
    Tokens,
    compiles_of,
    free_nbytes,
    ids,
    plans_of,
    require_within,
    settle,
)
from tests.training import close, make_seeded, measured, optimized, step

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")

SIZES = [(8, 40), (2, 128), (3, 77), (8, 9), (8, 128)]


class Checkpointed(Tokens):
    """Its layers recompute by themselves."""

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.one, layer, x, use_reentrant=False)
        return x

    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(layer(x))


def test_checkpoints_of_the_model_have_one_plan_for_all_sizes() -> None:
    """With the results of the model without any."""
    budget = int(0.9 * free_nbytes(Tokens, ids(8, 128)))
    model, reference = optimized(Checkpointed, budget, sizes=RANGES), make_seeded(Tokens)
    require_within(model, budget, SIZES)
    assert plans_of(model) <= 4
    for size in SIZES:
        close(step(reference, (ids(*size),)), step(model, (ids(*size),)), 1e-5)


def test_data_parallel_keeps_the_budget_at_every_size() -> None:
    """Its buckets included; of them the first step does not know."""
    budget = int(0.9 * free_nbytes(Tokens, ids(8, 128)))
    model = optimized(Tokens, budget, sizes=RANGES)
    parallel = DistributedDataParallel(model)
    reference = DistributedDataParallel(make_seeded(Tokens))
    buckets = sum(parameter.nbytes for parameter in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        for _ in range(3):  # torch makes its buckets anew after the first
            step(parallel, (ids(8, 40),))
    for size in SIZES:
        settle(model, lambda size=size: step(parallel, (ids(*size),)))
        compiled = compiles_of(model)
        assert buckets + measured(parallel, (ids(*size),)) <= budget, size
        assert compiled == compiles_of(model)
        close(step(reference, (ids(*size),)), step(parallel, (ids(*size),)), 1e-5)
