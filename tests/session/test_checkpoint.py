"""The user's own `torch.utils.checkpoint` regions and policies are constraints of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
    WIDTH,
    Layers,
    rows,
)
from tests.training import (
    UNBOUNDED,
    close,
    gradients_hold,
    make_seeded,
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


def normalised(h: Tensor) -> Tensor:
    return F.layer_norm(h, (WIDTH,))


def batch_normalised(h: Tensor) -> Tensor:
    return F.batch_norm(h, None, None, training=True)


def split(h: Tensor) -> Tensor:
    return h.split(WIDTH // 2, 1)[1].repeat(1, 2)


def view_of_a_split(h: Tensor) -> Tensor:
    return h.chunk(2)[0].view(-1, WIDTH)


def highest(h: Tensor) -> Tensor:
    return h.topk(WIDTH)[0]


def pooled(h: Tensor) -> Tensor:
    return F.max_pool1d(h, 3, 1, 1)


def attended(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*3 * [h.view(1, 2, -1, WIDTH)]).view(-1, WIDTH)


def view_of_normalised(h: Tensor) -> Tensor:
    return normalised(h).view(2, -1, WIDTH)


class ChainedRegions(Layers):
    """Three regions, each right behind the one before; each ends in the same way."""

    def __init__(self, ending: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.ending, self.options = ending, options

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.region, layer, x, use_reentrant=False, **self.options)
        return x.square().mean()

    def region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.ending(torch.tanh(layer(x)))


ENDINGS = [
    normalised,
    batch_normalised,
    split,
    view_of_a_split,
    highest,
    pooled,
    attended,
    view_of_normalised,
]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("options", [{}, {"context_fn": selective_contexts}], ids=["all", "some"])
def test_regions_in_a_row(ending: Callable[[Tensor], Tensor], options: dict[str, Any]):
    """Whatever a region ends in is what the next one begins with; nothing runs three times."""
    make = lambda: ChainedRegions(ending, **options)  # noqa: E731
    model = optimized(make, UNBOUNDED)
    close(step(make_seeded(make), (rows(),)), step(model, (rows(),)), 1e-5)
    assert recomputes(model) > 0
    assert max(value.recomputes for value in autoremat.report(model).values) == 1
