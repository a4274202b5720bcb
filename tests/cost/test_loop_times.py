"""What loops of generated code take, by what they move and compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoremat._torch import Loop
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.ceilings import COSTLY, ElementTimes, element_times_of
from autoremat.cost.loop_times import loop_us, loops_us

CPU = torch.device("cpu")
CEILINGS = DeviceCeilings(copy_gbps=10.0, matmul_gflops=100.0, launch_us=2.0)
ELEMENTS = ElementTimes([float(1 + number) for number in range(len(COSTLY))], plain_ns=0.5)


def test_a_loop_moves_and_computes():
    """1 MB at 10 GB/s are 100 us, 1,000 additions 0.5 us; reading is no operation of its own."""
    loop = Loop(1_000_000, {"add": 1000, "load": 5000, "store": 1000})
    assert loop_us(loop, CEILINGS, ELEMENTS) == pytest.approx(2.0 + 100.0 + 0.5)


def test_a_template_computes_its_product():
    """10 MFLOP at 100 GFLOP/s are 100 us."""
    assert loop_us(Loop(0, {}, 10_000_000), CEILINGS, ELEMENTS) == pytest.approx(102.0)


def test_costly_operations_have_times_of_their_own():
    """And each number is drawn by itself."""
    exp_us = loop_us(Loop(0, {"exp": 1000}), CEILINGS, ELEMENTS) - 2.0
    tanh_us = loop_us(Loop(0, {"tanh": 1000}), CEILINGS, ELEMENTS) - 2.0
    rand_us = loop_us(Loop(0, {"rand": 1000}), CEILINGS, ELEMENTS) - 2.0
    assert exp_us == pytest.approx(1.0 + COSTLY.index("exp"))
    assert tanh_us == pytest.approx(1.0 + COSTLY.index("tanh"))
    assert rand_us == pytest.approx(500.0)


def test_elements_are_measured_once(tmp_path: Path):
    """A later process finds them; a GPU computes while it waits for its memory."""
    with CostCache.open(tmp_path / "costs.sqlite3") as cache:
        found = element_times_of(CPU, CEILINGS, cache)
        assert len(found.costly_ns) == len(COSTLY)
        assert found.of("tanh") > found.of("sigmoid") >= 0.0
        assert element_times_of(CPU, CEILINGS, cache) == found
        on_gpu = element_times_of(torch.device("cuda", 0), CEILINGS, cache)
    assert on_gpu.of("exp") == on_gpu.of("add") == 0.0


def test_loops_follow_each_other():
    """Twice the loops take twice as long; none take nothing."""
    loop = Loop(1 << 20, {"add": 1 << 18})
    assert loops_us([loop, loop], CPU) == pytest.approx(2 * loops_us([loop], CPU))
    assert loops_us([], CPU) == 0.0
