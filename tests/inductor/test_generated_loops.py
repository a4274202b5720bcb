"""Loops as Inductor has scheduled them: what they move, and what they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autoremat
from autoremat import _torch
from autoremat._torch import LOADS_OF_BOOLS, STORES_OF_BOOLS, Loop
from tests.tiny import Chain, many_rows

pytestmark = pytest.mark.inductor
MATRIX_NBYTES = 64 * 64 * 4


class Stop(Exception):
    """No kernel is compiled."""


def loops_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[Loop]:
    """The loops that are generated for a function."""
    found: list[list[Loop]] = []

    def stop(graph: Any) -> Any:
        graph.codegen()
        found.append(_torch.generated_loops(graph))
        raise Stop

    torch.compiler.reset()
    compiled = torch.compile(function, options={"fx_graph_cache": False}, **options)
    with _torch.loading_kernels_by(stop), torch.no_grad(), contextlib.suppress(Exception):
        compiled(*inputs)
    (loops,) = found
    return loops


def test_what_stays_inside_of_a_fused_kernel_is_not_moved() -> None:
    """A chain reads and writes once; each of its operations is computed for each element."""
    (loop,) = loops_of(lambda x: (x.sin() + 1).exp(), torch.ones(64, 64))
    assert loop.moved_nbytes == 2 * MATRIX_NBYTES
    assert loop.computed["sin"] == loop.computed["exp"] == 64 * 64


def _both(mask: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A mask, and what a loop makes of it that is fused with the mask's."""
    return mask, torch.where(mask, x, 1.0) + mask


def test_bools_that_are_read_and_written_are_counted() -> None:
    """What stays inside of the kernel is neither."""
    ones = torch.ones(64, 64)
    for function, inputs, read, written in (
        (lambda x: x > 0, [ones], 0, 64 * 64),
        (torch.where, [ones > 0, ones, ones], 64 * 64, 0),
        (lambda x: (x > 0) * x, [ones], 0, 0),
        (lambda x: _both(x.sin() > 0, x), [ones], 0, 64 * 64),
    ):
        (loop,) = loops_of(function, *inputs)
        assert loop.computed.get(LOADS_OF_BOOLS, 0) == read
        assert loop.computed.get(STORES_OF_BOOLS, 0) == written


def test_a_reduction_computes_for_all_that_it_reads() -> None:
    """And writes one number for a row."""
    loops = loops_of(lambda x: x.exp().sum(1), torch.ones(64, 64))
    assert sum(loop.computed.get("exp", 0) for loop in loops) == 64 * 64
    assert sum(loop.moved_nbytes for loop in loops) == MATRIX_NBYTES + 64 * 4


def test_calls_of_libraries_are_no_loops() -> None:
    """Nor are copies of nothing."""
    (loop,) = loops_of(lambda x: (x @ x).relu(), torch.ones(64, 64))
    assert loop.computed["relu"] == 64 * 64
    assert loops_of(lambda x: x @ x, torch.ones(64, 64)) == []


def test_several_results_of_several_loops() -> None:
    """Those of a list of tensors, too."""
    tensors = [torch.ones(64, 64) for _ in range(3)]
    loops = loops_of(lambda *ones: torch._foreach_add(list(ones), 1.0), *tensors)
    assert sum(loop.computed["add"] for loop in loops) == 3 * 64 * 64
    assert sum(loop.moved_nbytes for loop in loops) == 6 * MATRIX_NBYTES


def test_symbolic_sizes_count_as_they_are_now() -> None:
    """By the hint of each."""
    (loop,) = loops_of(lambda x: x.sin(), torch.ones(64, 64), dynamic=True)
    assert loop.computed["sin"] == 64 * 64
    assert loop.moved_nbytes == 2 * MATRIX_NBYTES


def test_a_report_says_what_the_kernels_take() -> None:
    """Of the step without a plan and with it."""
    report = autoremat.plan(Chain(), many_rows(), budget=1 << 40, verbose=False)
    assert report.code_times_us is not None
    before, after = report.code_times_us
    assert 0 < before == after
    assert "as generated: library calls measured" in " ".join(report.summary().split())
    assert "Its kernels:" in report.to_html()
