"""The user's own `torch.utils.checkpoint` regions and policies are constraints of the plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import autoremat
from tests.tiny import (
    Layers,
    rows,
)
from tests.training import (
    UNBOUNDED,
    gradients_hold,
    optimized,
    recomputes,
    step,
)


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False)
        return x.square().mean()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(F.dropout(torch.tanh(layer(x)), 0.2))


def test_checkpoint_regions_are_honoured():
    """What the user wants recomputed is recomputed, even without a budget to keep."""
    found = gradients_hold(Checkpointed, (rows(),))
    model = optimized(Checkpointed, UNBOUNDED)
    step(model, (rows(),))
    assert recomputes(model) > 0
    assert found.smallest <= found.save_all


class ReturnsCheckpointed(Checkpointed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = checkpoint(torch.tanh, self.first(x), use_reentrant=False)
        return torch.sin(self.second(torch.sin(h))).square().mean(), h


def test_a_checkpoint_region_whose_value_is_returned():
    """An output is alive anyway."""
    gradients_hold(ReturnsCheckpointed, (rows(),), loss_of=lambda output: output[0])


def policy(context: object, target: object, *args: object, **keywords: object) -> CheckpointPolicy:
    """Save matrix products, recompute everything else."""
    if target is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> object:
    return create_selective_checkpoint_contexts(policy)


class SelectivelyCheckpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False, context_fn=selective_contexts)
        return x.square().mean()

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(layer(x)) * 2)


def test_selective_checkpoint_policies_are_honoured():
    """Matrix products that the policy saves are saved at every budget."""
    found = gradients_hold(SelectivelyCheckpointed, (rows(),))
    model = optimized(SelectivelyCheckpointed, found.smallest)
    step(model, (rows(),))
    actions = {v.action for v in autoremat.report(model).values if v.op == "addmm"}
    assert actions <= {"save", "free"}
