"""Which fusions the planned peak allows: tiny kernels, and a compiled step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
import autoremat.inductor.hook
from autoremat._torch import Kernels, Overwrite, Scheduled, ScheduledBuffer
from autoremat.inductor.fusion_limit import ends_of_functions, peak_nbytes
from tests.training import UNBOUNDED, close, measured, optimized, refusal, step


def value(maker: int, *readers: int, nbytes: int = 4, is_kept: bool = False) -> ScheduledBuffer:
    """A result of one kernel."""
    return ScheduledBuffer(nbytes, nbytes, (maker,), readers, is_kept)


ALONE = range(4)


@pytest.fixture(name="gelu")
def _gelu() -> Kernels:
    """A backward that recomputes `y` from `x` and later needs `x` for the gradient `h`.

    kernel  0: y = f(x)    1: w = y * y (small)    2: g    3: h = f'(x) * g
    """
    x = ScheduledBuffer(0, 4, (), (0, 3), is_kept=False)
    w, h = value(1, nbytes=1, is_kept=True), value(3, nbytes=1, is_kept=True)
    return Kernels({}, ((), (0,), (), (2,)), (x, value(0, 1), w, value(2, 3), h), ())


def test_without_fusion_the_peak_is_that_of_the_planned_order(gelu: Kernels):
    """At kernel 3 `x`, `w`, `g` and `h` are live."""
    assert peak_nbytes(gelu, ALONE) == 4 + 1 + 4 + 1


@pytest.mark.parametrize("overwrites", [True, False])
def test_what_is_written_over_counts_once(overwrites: bool):
    """`a` of 8 bytes, of which a kernel makes `b` of 4 and `c` of 8, perhaps in place of `a`."""
    a, b, c = value(0, 1, nbytes=8), value(1, nbytes=4), value(1, nbytes=8, is_kept=True)
    over = ((Overwrite(1, 8, ()),),) if overwrites else ()
    assert peak_nbytes(Kernels({}, ((), (0,)), (a, b, c), over), range(2)) == 20 - 8 * overwrites


def test_what_another_reads_in_the_same_kernel_is_not_written_over():
    """`a`, read by 1 and then 2, which would take its memory: not once they are one kernel.

    Where 2 may also write over `b`, it takes that.
    """
    a, b, c, d = value(0, 1, 2), value(0, 2), value(1, is_kept=True), value(2, is_kept=True)
    order, buffers = ((), (0,), (0,)), (a, b, c, d)
    only_a = Kernels({}, order, buffers, ((Overwrite(2, 4, (1,)),),))
    either = Kernels({}, order, buffers, ((Overwrite(2, 4, (1,)), Overwrite(2, 4, ())),))
    assert [peak_nbytes(only_a, fused) for fused in ([0, 1, 2], [0, 1, 1])] == [12, 16]
    assert [peak_nbytes(either, fused) for fused in ([0, 1, 2], [0, 1, 1])] == [12, 12]


def test_a_fusion_holds_all_that_its_kernels_hold_at_once(gelu: Kernels):
    """Kernels 0 and 3 share `x`, but together they hold `y` beside `g`."""
    assert peak_nbytes(gelu, [0, 1, 2, 0]) > peak_nbytes(gelu, ALONE)
    assert peak_nbytes(gelu, [0, 1, 2, 2]) == peak_nbytes(gelu, ALONE)


def test_a_fusion_of_neighbours_holds_no_more(gelu: Kernels):
    """Kernels 0 and 1 hold `x`, `y` and `w`, as before."""
    assert peak_nbytes(gelu, [0, 0, 2, 3]) == peak_nbytes(gelu, ALONE)


def test_what_is_fused_is_judged_as_a_whole(gelu: Kernels):
    """What is fused already comes along: 1 with 0, which may not meet 3."""
    assert peak_nbytes(gelu, [0, 0, 2, 0]) > peak_nbytes(gelu, ALONE)


def test_a_kernel_drawn_ahead_of_its_place_makes_its_result_live_longer():
    """Two copies of a mask, far apart, would be made at once.

    kernel  0: a    1: reads a    2: b    3: reads b    with a peak of one at a time
    """
    kernels = Kernels({}, ((), (0,), (), (2,)), (value(0, 1), value(2, 3)), ())
    assert peak_nbytes(kernels, ALONE) == 4
    assert peak_nbytes(kernels, [0, 1, 0, 3]) == 8


def scheduled(*may_join: bool) -> list[Scheduled]:
    """Kernels that nothing was fused with."""
    return [Scheduled((number,), joins) for number, joins in enumerate(may_join)]


CHAIN = Kernels(
    {}, ((), (0,), (1,), (2,)), tuple(value(n, n + 1, is_kept=n == 3) for n in range(4)), ()
)


@pytest.mark.parametrize(
    ("limit_nbytes", "ends"),
    [(16, set()), (15, {2}), (12, {2}), (11, {1, 2}), (8, {1, 2}), (4, {0, 1, 2})],
)
def test_a_function_ends_where_all_that_it_makes_would_be_too_much(
    limit_nbytes: int, ends: set[int]
):
    """Each of four kernels makes 4 bytes of those of the one before, which are freed at the end."""
    assert ends_of_functions(CHAIN, limit_nbytes, scheduled(*[True] * 4)) == ends


def test_what_a_function_writes_over_counts_once():
    """The third kernel in place of what it reads."""
    over = replace(CHAIN, overwrites=((Overwrite(2, 4, ()),),))
    assert ends_of_functions(CHAIN, 12, scheduled(*[True] * 4)) == {2}
    assert ends_of_functions(over, 12, scheduled(*[True] * 4)) == set()


def test_what_calls_a_library_is_no_part_of_a_function():
    """What was held before it is free when it runs."""
    assert ends_of_functions(CHAIN, 8, scheduled(True, True, False, True)) == {1, 2}
    assert ends_of_functions(CHAIN, 1 << 20, scheduled(True, False, True, True)) == {0, 1}


def test_fused_kernels_are_judged_together():
    """The first two as one, in the order in which they are generated."""
    fused = [Scheduled((0, 1), True), Scheduled((2,), True), Scheduled((3,), True)]
    assert ends_of_functions(CHAIN, 12, fused) == {1}


def test_a_part_that_is_drawn_ahead_takes_the_memory_of_its_concatenation():
    """Of two parts, made at 2 and 3 and read at 4, the later one: beside what is made at 1."""
    x, large = ScheduledBuffer(0, 2, (), (3,), is_kept=False), value(1, 2, nbytes=20)
    parts = ScheduledBuffer(8, 8, (2, 3), (4,), is_kept=False)
    first, last = value(0, 1), value(4, nbytes=1, is_kept=True)
    kernels = Kernels({}, ((), (0,), (1,), (), (2, 3)), (x, first, large, parts, last), ())
    assert peak_nbytes(kernels, range(5)) == 2 + 20 + 8
    assert peak_nbytes(kernels, [0, 1, 2, 0, 4]) == 8 + 4 + 20


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
        free.setattr(autoremat.inductor.hook, "_with_own", dict)
        assert limited < smallest(inputs)
    model = optimized(Blocks, limited, compiler="inductor")
    ours = step(model, inputs)
    peak = measured(model, inputs)
    assert peak <= limited
    assert autoremat.report(model).predicted_peak_nbytes == pytest.approx(peak, rel=0.05)
    close(step(optimized(Blocks, UNBOUNDED, compiler="inductor"), inputs), ours, 1e-5)
