"""What loops of generated code take, by what they move and compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoremat._torch import LOADS_OF_BOOLS, STORES_OF_BOOLS, Loop
from autoremat.cost import ceilings, loop_times
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.calls import Call
from autoremat.cost.ceilings import COSTLY, ElementTimes, element_times_of
from autoremat.cost.estimates import NOMINAL_CEILINGS
from autoremat.cost.loop_times import loop_us
from autoremat.cost.made_up_inputs import Inputs

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
    """And each number is drawn by itself, as each bool is read and written."""
    exp_us = loop_us(Loop(0, {"exp": 1000}), CEILINGS, ELEMENTS) - 2.0
    tanh_us = loop_us(Loop(0, {"tanh": 1000}), CEILINGS, ELEMENTS) - 2.0
    rand_us = loop_us(Loop(0, {"rand": 1000}), CEILINGS, ELEMENTS) - 2.0
    assert exp_us == pytest.approx(1.0 + COSTLY.index("exp"))
    assert tanh_us == pytest.approx(1.0 + COSTLY.index("tanh"))
    assert rand_us == pytest.approx(500.0)
    read_us = loop_us(Loop(0, {LOADS_OF_BOOLS: 1000}), CEILINGS, ELEMENTS) - 2.0
    written_us = loop_us(Loop(0, {STORES_OF_BOOLS: 1000}), CEILINGS, ELEMENTS) - 2.0
    assert (read_us, written_us) == (pytest.approx(160.0), pytest.approx(500.0))


def test_elements_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Less what moving and launching takes; a GPU computes while it waits for its memory."""
    moving_us = 2 * 4 * ceilings._NUM_ELEMENTS / 10e3
    taken_us = {"aten.tanh.default": moving_us + 2.0 + ceilings._NUM_ELEMENTS / 1e3}
    asked: list[str] = []

    def timer(call: Call, inputs: Inputs) -> float:
        asked.append(str(call.target))
        return taken_us.get(str(call.target), 1.0)

    monkeypatch.setattr(ceilings, "call_time_us", timer)
    with CostCache.open(tmp_path / "costs.sqlite3") as cache:
        found = element_times_of(CPU, CEILINGS, cache)
        assert {"aten.tanh.default", "aten.pow.Tensor_Tensor"} <= set(asked)
        assert found.of("tanh") == pytest.approx(1.0)
        assert found.of("exp") == 0.0
        assert found.of("add") == pytest.approx(2.0 / 100.0)
        asked.clear()
        assert element_times_of(CPU, CEILINGS, cache) == found
        on_gpu = element_times_of(torch.device("cuda", 0), CEILINGS, cache)
    assert not asked
    assert on_gpu.of("exp") == on_gpu.of("add") == 0.0


def test_what_cannot_be_measured_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where the model leaves no memory for a product: nominal figures, which are not kept."""

    def full(call: Call, inputs: Inputs) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ceilings, "call_time_us", full)
    with CostCache.open(tmp_path / "costs.sqlite3") as cache:
        assert ceilings.ceilings_of(CPU, torch.float64, cache) == NOMINAL_CEILINGS["cpu"]
        assert element_times_of(CPU, CEILINGS, cache).of("exp") == 0.0
        assert cache.count() == 0


def test_every_operation_that_is_measured_is_one_of_torchs():
    """Its name is asked for when a first loop is priced."""
    assert all(hasattr(torch.ops.aten, name) for name in COSTLY)


def test_a_template_has_the_ceiling_of_its_type(monkeypatch: pytest.MonkeyPatch):
    """A product of halves is not as slow as one of floats."""
    flops, priced = {torch.float32: 100.0, torch.bfloat16: 1000.0}, []
    monkeypatch.setattr(
        loop_times,
        "ceilings_of",
        lambda device, dtype, cache: replace(CEILINGS, matmul_gflops=flops[dtype]),
    )

    def elements(device: torch.device, given: DeviceCeilings, cache: CostCache) -> ElementTimes:
        priced.append(given.matmul_gflops)
        return ELEMENTS

    monkeypatch.setattr(loop_times, "element_times_of", elements)
    half = Loop(0, {}, 10_000_000, torch.bfloat16)
    assert loop_times.loops_us([half], CPU) == pytest.approx(12.0)
    assert loop_times.loops_us([half, Loop(0, {})], CPU) == pytest.approx(14.0)
    assert set(priced) == {100.0}  # whichever comes first
    assert loop_times.loops_us([], CPU) == 0.0
