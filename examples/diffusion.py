"""Train a denoising diffusion UNet on drawn shapes, before and after in one table.

    python examples/diffusion.py [--steps 40] [--share 0.5] [--compiler eager]

Images are discs and squares of random place, size and colour, 32 x 32. The network predicts the
noise that was added to one (Ho, Jain and Abbeel 2020), and returns the loss of that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from side_by_side import Run, arguments, side_by_side
from torch import Tensor, nn

SIZE, TIMES = 32, 1000


class Residual(nn.Module):
    """Two convolutions, told the time, beside the identity."""

    def __init__(self, width_in: int, width: int, time_width: int) -> None:
        super().__init__()
        self.norm_in, self.norm = nn.GroupNorm(8, width_in), nn.GroupNorm(8, width)
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.past = nn.Conv2d(width_in, width, 1) if width_in != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (batch, width_in, h, w) to (batch, width, h, w)."""
        hidden = self.first(F.silu(self.norm_in(x))) + self.time(time)[:, :, None, None]
        return self.past(x) + self.second(F.silu(self.norm(hidden)))


class Denoiser(nn.Module):
    """A UNet of three resolutions whose forward returns the loss of a training step."""

    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        widths, time_width = (width, 2 * width, 2 * width), 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU())
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.down, self.up, have = nn.ModuleList(), nn.ModuleList(), width
        for out in widths:
            self.down.append(self._stage([have, *[out] * depth], time_width))
            have = out
        for skipped, out in zip(reversed(widths), (*reversed(widths[:-1]), width), strict=True):
            self.up.append(self._stage([have + skipped, *[out] * depth], time_width))
            have = out
        noise_left = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), dim=0)
        self.register_buffer("signal", noise_left.sqrt())
        self.register_buffer("spread", (1 - noise_left).sqrt())

    @staticmethod
    def _stage(widths: Sequence[int], time_width: int) -> nn.ModuleList:
        pairs = itertools.pairwise(widths)
        return nn.ModuleList(Residual(one, other, time_width) for one, other in pairs)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Return the mean squared error of the noise predicted in noisy (batch, 3, h, w)."""
        shape = (-1, 1, 1, 1)
        x = self.signal[times].view(shape) * images + self.spread[times].view(shape) * noise
        rates = torch.exp(-math.log(10_000.0) * torch.arange(self.width // 2) / (self.width // 2))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skipped = self.enter(x), []
        for stage in self.down:
            for block in stage:
                x = block(x, time)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        for stage in self.up:
            x = torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], dim=1)
            for block in stage:
                x = block(x, time)
        return F.mse_loss(self.leave(F.silu(x)), noise)


def shapes(count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` images of one disc or square each, (count, 3, 32, 32) in -1 to 1."""
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    place = torch.randint(8, SIZE - 8, (count, 2, 1, 1), generator=generator)
    away = (grid - place).abs().float()
    distance = torch.stack([away.square().sum(1).sqrt(), away.amax(1)], dim=1)
    kind = torch.randint(2, (count,), generator=generator)
    radius = torch.randint(3, 8, (count, 1, 1), generator=generator)
    inside = (distance[torch.arange(count), kind] <= radius)[:, None]
    colour = torch.rand(count, 3, 1, 1, generator=generator) * 2 - 1
    return torch.where(inside, colour, torch.tensor(-1.0))


def make(depth: int = 2) -> Denoiser:
    """The same each time."""
    torch.manual_seed(0)
    return Denoiser(depth)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for all of it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def main(given: Sequence[str] | None = None) -> tuple[Run, Run]:
    """Train twice and print the table."""
    args = arguments(__doc__.splitlines()[0], given, steps=40)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(args.steps):
            images = shapes(args.batch, generator)
            noise = torch.randn(images.shape, generator=generator)
            yield images, noise, torch.randint(TIMES, (args.batch,), generator=generator)

    return side_by_side(lambda: make(max(1, args.layers // 6)), new_optimizer, batches, args)


if __name__ == "__main__":
    main()
