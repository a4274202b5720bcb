"""Training steps of timm, torchvision and diffusers, as `docs/recipes/` has them, small.

Each trains three steps: without a plan, under a budget, and under one that has room for all. The
second and third end bit for bit alike, since recomputing changes nothing. Beside the first they
are alike within rounding only: torch.compile, with whichever backend, takes operations such as
norms and backwards of activations apart, and sums in another order than eager mode does.

The optimizer is SGD with momentum. AdamW would make whole steps of what is rounding: of gradients
that are zero but for it, as those of a bias before a softmax or a norm are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from docs.torchvision_here import import_torchvision
from tests.training import UNBOUNDED, make_seeded

pytestmark = pytest.mark.shares_plans

Batch = tuple[Any, ...]
STEPS, CLASSES = 3, 10
TOLERANCE = 1e-5  # of the largest number of each tensor


class Classified(nn.Module):
    """A model that returns logits, and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels, label_smoothing=0.1)


class Denoised(nn.Module):
    """A UNet that predicts noise, and its loss."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(self.unet(noisy, times).sample, noise)


def require_torchvision() -> None:
    """Skips where it is not installed; timm needs it too."""
    try:
        import_torchvision()
    except ImportError:
        pytest.skip("torchvision is not installed")


def vision_transformer() -> nn.Module:
    """Of timm, four blocks."""
    require_torchvision()
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return Classified(timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes))


def residual_network() -> nn.Module:
    """Of torchvision, a RegNet: bottlenecks as a ResNet has them, with as few channels as asked."""
    require_torchvision()
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams.from_init_params(depth=6, w_0=16, w_a=8.0, w_m=2.0, group_width=8)
    return Classified(RegNet(blocks, num_classes=CLASSES, stem_width=16))


def unet() -> nn.Module:
    """Of diffusers, on two levels, with attention on the lower one."""
    diffusers = pytest.importorskip("diffusers")
    return Denoised(
        diffusers.UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )


def labelled(generator: torch.Generator) -> Batch:
    """Images and classes."""
    images = torch.randn(32, 3, 32, 32, generator=generator)
    return images, torch.randint(CLASSES, (len(images),), generator=generator)


def noised(generator: torch.Generator) -> Batch:
    """What the loop of diffusers makes of images: noise of a time of the scheduler's, added."""
    scheduler = pytest.importorskip("diffusers").DDPMScheduler()
    images, noise = torch.randn(2, 8, 3, 16, 16, generator=generator)
    times = torch.randint(scheduler.config.num_train_timesteps, (len(images),), generator=generator)
    return scheduler.add_noise(images, noise, times), times, noise


@dataclass(frozen=True)
class Trained:
    """What three steps leave: peaks of those after the first in bytes, and the model's state."""

    peaks: list[int]
    state: dict[str, Tensor]
    model: nn.Module


def trained(
    make: Callable[[], nn.Module],
    draw: Callable[[torch.Generator], Batch],
    budget_nbytes: int | None = None,
) -> Trained:
    """Three steps of new batches; the first, which compiles, is not measured."""
    torch._dynamo.reset()
    model, generator = make_seeded(make), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if budget_nbytes is not None:
        given = {"compiler": "eager", "verbose": False, "strict": True, "time_limit": 4.0}
        autoremat.optimize(model, budget_nbytes, optimizer=optimizer, **given)
    peaks = list[int]()
    for number in range(STEPS):
        batch = draw(generator)
        optimizer.zero_grad(set_to_none=True)

        def take(batch: Batch = batch) -> None:
            model(*batch).backward()
            optimizer.step()

        if number:
            held = resident_nbytes(model, batch, optimizer)
            peaks.append(held + measure_peak(take, device="cpu"))
        else:
            take()
    return Trained(peaks, model.state_dict(), model)


@pytest.mark.filterwarnings("error::autoremat.OverBudgetWarning")
@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (vision_transformer, labelled),
        (residual_network, labelled),
        pytest.param(unet, noised, marks=pytest.mark.thorough),
    ],
    ids=["timm", "torchvision", "diffusers"],
)
def test_three_steps_keep_the_budget_and_end_where_they_would(
    make: Callable[[], nn.Module], draw: Callable[[torch.Generator], Batch]
) -> None:
    """Bit for bit where a plan without recompute ends, within rounding where eager mode does."""
    plain = trained(make, draw)
    floor = 3 * sum(p.nbytes for p in plain.model.parameters())  # with gradients and momentum
    budget = floor + int(0.7 * (min(plain.peaks) - floor))
    ours, roomy = trained(make, draw, budget), trained(make, draw, UNBOUNDED)
    assert max(ours.peaks) <= budget
    for name, expected in plain.state.items():
        assert torch.equal(ours.state[name], roomy.state[name]), name
        difference = (ours.state[name] - expected).abs().max()
        assert difference <= TOLERANCE * expected.abs().max(), name
    assert any(value.recomputes for value in autoremat.report(ours.model).values)
