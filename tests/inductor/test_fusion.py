"""What Inductor is expected to compute inside its consumers, by its configuration."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from autoremat import _torch
from autoremat.inductor.hook import generate
from autoremat.inductor.inlining import inlined_nodes
from tests.joint_graphs import CPU, Analysed, analyse, capture, leaf

TERMS = 10  # between torch 2.13's limits of reads: 8 in general, 12 on the CPU


def forecast(analysed: Analysed) -> set[str]:
    """Names of the forward's operations that are expected to take no memory."""
    found = inlined_nodes(analysed.joint, analysed.storages, analysed.constraints)
    return {node.name for node in found if node in analysed.joint.forward}


def sum_of_four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """`add_2` is read by the sine, and by the cosine of its backward."""
    return (a + b + c + d).sin().sum()


@pytest.mark.parametrize(
    ("limit", "number", "materialised"),
    [
        ("realize_reads_threshold", 3, {"add_2"}),  # it reads four, and is read twice
        ("realize_acc_reads_threshold", 2, {"add_1"}),  # then the last sum reads two
        ("realize_opcount_threshold", 6, {"add_2"}),  # four loads and three sums
    ],
)
def test_the_limits_are_inductors(limit: str, number: int, materialised: set[str]):
    """The configuration at the time, never a copy of it, decides what is given memory."""
    analysed = analyse(sum_of_four, *(leaf(8) for _ in range(4)))
    assert {"add", "add_1", "add_2"} <= forecast(analysed)
    with torch._inductor.config.patch({limit: number}):
        assert {"add", "add_1", "add_2"} - forecast(analysed) == materialised


def test_what_is_expensive_is_kept_for_its_readers():
    """An exponential that is read twice, but not a product."""
    analysed = analyse(lambda x: ((x * x).exp() * 2).sin().exp().sum(), leaf(8))
    cheap = analyse(lambda x: (x * x).sin().sum(), leaf(8))
    assert "exp" not in forecast(analysed)
    assert "mul" in forecast(cheap)


def test_what_is_written_into_a_concatenation_takes_no_memory_beside_it():
    """The part that is computed, but not the product."""
    analysed = analyse(lambda x: torch.cat([(x @ x) * 2.0, x @ x]).sum(), leaf(8, 8))
    assert "mul" in forecast(analysed)
    assert "mm" not in forecast(analysed)


def test_one_result_of_several_is_one_that_is_read():
    """Of a variance and its mean, which are two values, each loop reads one."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1)
        return (variance + y).sin().sum() + mean.sum()

    analysed = analyse(function, leaf(8, 8), leaf(8))
    with torch._inductor.config.patch(realize_reads_threshold=2):
        assert "add" in forecast(analysed)  # it is read twice, and reads two
    with torch._inductor.config.patch(realize_reads_threshold=1):
        assert "add" not in forecast(analysed)


@pytest.mark.inductor
def test_a_long_sum_is_forecast_as_inductor_generates_it():
    """In one loop or in two, by the limit of this torch for the CPU."""
    inputs = [leaf(8) for _ in range(TERMS)]
    terms = lambda *xs: sum(xs[1:], start=xs[0])  # noqa: E731
    analysed = analyse(lambda *xs: terms(*xs).sum(), *inputs)
    captured = capture(lambda *xs: terms(*xs).sum(), *inputs)
    forward, _ = _torch.min_cut(captured.module, num_fwd_outputs=1)
    sums = [node for node in analysed.joint.forward if node.name.startswith("add")]
    with _torch.fake_mode_of([node.meta["val"] for node in sums]):
        generated = generate(
            forward, is_backward=False, owned={}, num_visible_outputs=1, device=CPU
        )
    materialised = {node.name for node in sums} - forecast(analysed)
    live_nbytes = (0, *generated.memory.live_nbytes)
    made = sum(before < after for before, after in pairwise(live_nbytes))
    assert len(materialised) == made - 1  # the result
