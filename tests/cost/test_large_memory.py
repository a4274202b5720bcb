"""What large memory takes on a processor: to move it, and to be given it anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoremat._torch import Loop
from autoremat.cost import large_memory, loop_times
from autoremat.cost.cache import CostCache, DeviceCeilings
from autoremat.cost.ceilings import COSTLY, ElementTimes
from autoremat.cost.large_memory import MAPPED_NBYTES, ceilings_for, fresh_us

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CEILINGS = DeviceCeilings(copy_gbps=20.0, matmul_gflops=100.0, launch_us=2.0)
MIB = 1 << 20


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Sizes that were measured, on a machine whose cache holds no two times 40 MiB."""
    asked: list[int] = []

    def measured(nbytes: int, device: torch.device) -> large_memory.CopyRate:
        asked.append(nbytes)
        return large_memory.CopyRate(20.0 if nbytes < 40 * MIB else 10.0)

    monkeypatch.setattr(large_memory, "_measured_copy", measured)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def test_what_is_too_large_for_a_cache_is_moved_at_the_rate_of_memory(copied: list[int]):
    """One copy is measured for each power of two, once, and none larger than what a loop moves."""
    with CostCache.open() as cache:
        moved = [3 * MIB, 63 * MIB, 64 * MIB, 150 * MIB, 200 * MIB, 3000 * MIB, 9000 * MIB]
        found = [ceilings_for(nbytes, CEILINGS, CPU, cache).copy_gbps for nbytes in moved]
    assert found == [20.0, 20.0, 20.0, 10.0, 10.0, 10.0, 10.0]
    assert copied == [16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB]


def test_a_gpu_is_measured_by_one_copy(copied: list[int]):
    """Which is larger than its caches."""
    with CostCache.open() as cache:
        assert ceilings_for(900 * MIB, CEILINGS, GPU, cache) == CEILINGS
    assert not copied


def test_loops_are_priced_by_what_each_moves(copied: list[int], monkeypatch: pytest.MonkeyPatch):
    """200 MiB at 10 GB/s beside 8 MiB at 20, and two launches."""
    nothing = ElementTimes([0.0] * len(COSTLY), 0.0)
    monkeypatch.setattr(loop_times, "ceilings_of", lambda *_: CEILINGS)
    monkeypatch.setattr(loop_times, "element_times_of", lambda *_: nothing)
    found_us = loop_times.loops_us([Loop(200 * MIB, {}), Loop(8 * MIB, {})], CPU)
    assert found_us == pytest.approx(200 * MIB / 10e3 + 8 * MIB / 20e3 + 2 * 2.0)


def test_a_copy_that_does_not_fit_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The rate of a small one stands in for it: a system may end who takes all of its memory."""
    monkeypatch.setattr(large_memory, "free_nbytes", lambda device: 1200 * MIB)
    with CostCache.open(tmp_path / "costs.sqlite3") as cache:
        assert ceilings_for(900 * MIB, CEILINGS, CPU, cache) == CEILINGS
        assert cache.count() == 0


def test_buffers_that_are_mapped_anew_have_their_price(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each time that they are allocated; smaller ones are kept, and by a GPU all."""
    asked: list[torch.device] = []

    def measured(device: torch.device) -> large_memory.FreshMemory:
        asked.append(device)
        return large_memory.FreshMemory(us_per_mb=300.0)

    monkeypatch.setattr(large_memory, "_measured_fresh", measured)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fresh_us([MAPPED_NBYTES - 1] * 9, CPU) == fresh_us([MAPPED_NBYTES], GPU) == 0.0
    assert not asked
    found_us = fresh_us([100_000_000, 8, 100_000_000], CPU)
    assert found_us == pytest.approx(60_000.0)
    assert fresh_us([100_000_000], CPU) == pytest.approx(30_000.0)
    assert asked == [CPU]


def test_another_allocator_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """One that keeps what is freed takes nothing."""
    rates = iter([300.0, 0.0])
    monkeypatch.setattr(
        large_memory, "_measured_fresh", lambda _: large_memory.FreshMemory(next(rates))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fresh_us([100_000_000], CPU) == pytest.approx(30_000.0)
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2")
    assert fresh_us([100_000_000], CPU) == 0.0


def test_what_is_measured_is_a_rate():
    """Of this machine, whatever it is."""
    assert 0.1 < large_memory._measured_copy(1 << 20, CPU).gbps < 10_000.0
    assert 0.0 <= large_memory._measured_fresh(CPU).us_per_mb < 1e5
