"""Which fusions the planned peak allows: tiny kernels, and a compiled step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
import autoremat.inductor.hook
from autoremat.inductor.fusion_limit import Buffer, Fusions, Kernels
from tests.training import UNBOUNDED, close, measured, optimized, refusal, step


def value(maker: int, *readers: int, nbytes: int = 4, is_kept: bool = False) -> Buffer:
    """A result of one kernel."""
    return Buffer(nbytes, nbytes, maker, readers, is_kept)


@pytest.fixture(name="gelu")
def _gelu() -> Fusions:
    """A backward that recomputes `y` from `x` and later needs `x` for the gradient `h`.

    kernel  0: y = f(x)    1: w = y * y (small)    2: g    3: h = f'(x) * g
    """
    x = Buffer(0, 4, None, (0, 3), is_kept=False)
    w, h = value(1, nbytes=1, is_kept=True), value(3, nbytes=1, is_kept=True)
    return Fusions(Kernels(((), (0,), (), (2,)), (x, value(0, 1), w, value(2, 3), h)))


def test_the_limit_is_the_peak_of_the_planned_order(gelu: Fusions):
    """At kernel 3 `x`, `w`, `g` and `h` are live."""
    assert gelu.limit_nbytes == 4 + 1 + 4 + 1


def test_a_fusion_that_holds_more_at_once_is_refused(gelu: Fusions):
    """Kernels 0 and 3 share `x`, but together they hold `y` beside `g`; nothing changes."""
    assert not gelu.admit({0, 3})
    assert gelu.peak_nbytes() == gelu.limit_nbytes
    assert gelu.admit({2, 3})


def test_a_fusion_below_the_peak_is_admitted(gelu: Fusions):
    """Kernels 0 and 1 are neighbours: they hold `x`, `y` and `w`, as before."""
    assert gelu.admit({0, 1})
    assert gelu.admit({0, 1})


def test_a_group_is_judged_as_a_whole(gelu: Fusions):
    """What is fused already comes along: 1 with 0, which may not meet 3."""
    assert gelu.admit({0, 1})
    assert not gelu.admit({1, 3})


def test_a_kernel_drawn_ahead_of_its_place_makes_its_result_live_longer():
    """Two copies of a mask, far apart, would be made at once.

    kernel  0: a    1: reads a    2: b    3: reads b    with a peak of one at a time
    """
    a, b = value(0, 1), value(2, 3)
    fusions = Fusions(Kernels(((), (0,), (), (2,)), (a, b)))
    assert fusions.limit_nbytes == 4
    assert not fusions.admit({0, 2})


class Blocks(nn.Module):
    """Four blocks of `x + down(gelu(up(x)))`."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(32, 128) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(128, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


def smallest(inputs: tuple[Tensor, ...]) -> int:
    """The smallest peak of a compiled step."""
    return refusal(Blocks, inputs, compiler="inductor").smallest_peak_nbytes


@pytest.mark.inductor
@pytest.mark.slow  # with two blocks, free fusion reaches the same peak
def test_fusion_does_not_undo_the_recompute(monkeypatch: pytest.MonkeyPatch):
    """The smallest peak is lower than with free fusion; it is kept, and gradients agree."""
    inputs = (torch.randn(512, 32, generator=torch.Generator().manual_seed(1)),)
    limited = smallest(inputs)
    with monkeypatch.context() as free:
        free.setattr(autoremat.inductor.hook, "_own_config", dict)
        assert limited < smallest(inputs)
    model = optimized(Blocks, limited, compiler="inductor")
    ours = step(model, inputs)
    peak = measured(model, inputs)
    assert peak <= limited
    assert autoremat.report(model).predicted_peak_nbytes == pytest.approx(peak, rel=0.05)
    close(step(optimized(Blocks, UNBOUNDED, compiler="inductor"), inputs), ours, 1e-5)
