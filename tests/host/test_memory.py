"""The memory of a GPU's host, on a machine without one."""

from __future__ import annotations

import itertools
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from autoremat_solver import Link

import autoremat
from autoremat.ask.hosts import host_of
from autoremat.errors import OffloadError, SteeringError
from autoremat.host import files, measured, pinned
from autoremat.host.disk import Disk, files_of
from autoremat.host.measured import LEAST_NBYTES, VALUE_NBYTES, _lost_share, disk_link
from autoremat.host.memory import HostMemory
from autoremat.host.operators import OFFLOAD, OFFLOADED, RELOAD, RELOADED
from autoremat.planning.pipeline import _link
from tests.session.test_offload import Deep


class OnGpu:
    """What is to wait, as if it were on a GPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.nbytes, self.is_cuda = x.shape, x.dtype, x.nbytes, True
        self.stride = x.stride


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_no_memory_is_locked_ordinary_memory_is_taken_and_that_is_told_once() -> None:
    """With the reason and what to do; what waits lies as it did."""
    pinned._warned.cache_clear()
    x: Any = OnGpu(torch.randn(3, 5).t())
    with pytest.warns(UserWarning, match=r"60 B of page-locked memory .*Free memory"):
        made = pinned.pinned_like(x)
    assert (made.shape, made.stride(), made.dtype) == ((5, 3), (1, 5), torch.float32)
    assert not made.is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinned.pinned_like(x)


def test_without_a_folder_values_wait_in_memory() -> None:
    """Of the machine; what copies there is the operators' of a folder."""
    x = torch.randn(7, 3)
    sent = OFFLOADED(OFFLOAD(x, ""), x)
    back = RELOADED(RELOAD(sent, x.device), sent)
    assert torch.equal(back, x)
    assert len({tensor.data_ptr() for tensor in (x, sent, back)}) == 3


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as what was asked for is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("beside_a_gpu")
def test_a_size_is_memory_of_the_host_where_there_is_a_gpu() -> None:
    """Its way is measured when a step is planned; "auto" leaves a reserve."""
    assert host_of("24MB", None, None) == HostMemory("24MB", 24_000_000)
    auto = host_of("auto", None, None)
    assert isinstance(auto, HostMemory)
    assert auto.free_nbytes > 0
    assert "as measured" in auto.about(Link(20e3, 22e3, 10.0))


@pytest.mark.usefixtures("beside_a_gpu")
@pytest.mark.parametrize(
    ("given", "link", "says"),
    [
        ("900TB", None, "is more than this machine has"),
        ("1GB", "pcie4", "is of a GPU that is not here"),
        ("24", None, "is no number with a unit"),
    ],
)
def test_what_no_host_has_is_refused_at_once(given: str, link: str | None, says: str) -> None:
    """With what is accepted instead."""
    with pytest.raises(ValueError, match=says):
        host_of(given, link, None)


@pytest.mark.usefixtures("beside_a_gpu")
def test_a_model_on_the_cpu_is_told_that_the_host_is_a_gpus() -> None:
    """It may go to the GPU after `optimize`: so it is the graph that tells."""
    with pytest.raises(SteeringError, match=r"for models on a GPU, and this one is on cpu"):
        _link(HostMemory("1GB", 10**9), torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_size_is_refused_at_once() -> None:
    """Before a step is run."""
    with pytest.raises(ValueError, match="On the CPU there is no other memory"):
        autoremat.optimize(Deep(), "1GB", compiler="eager", offload=10**9)


def test_copies_to_a_folder_are_measured_as_a_plan_makes_them(tmp_path: Path) -> None:
    """Both ways, what a small one takes, and what it takes to ask; no file is kept for later."""
    link = disk_link(Disk(str(tmp_path)))
    assert min(link.out_nbytes_per_us, link.in_nbytes_per_us) > 10
    assert link.latency_us > 0
    assert link.ask_us > 0
    assert not link.is_pinned
    assert files_of(str(tmp_path)).idle_nbytes == 0


def test_computing_loses_what_it_loses_beside_copies_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way by what a copy takes there; the mean of both counts."""
    asked = []

    def lost_share(begin: object, takes_us: float, compute_us: Callable[[], float]) -> float:
        asked.append((takes_us, compute_us()))
        return [0.25, 0.75][len(asked) - 1]

    monkeypatch.setattr(measured, "_lost_share", lost_share)
    link = disk_link(Disk(str(tmp_path)))
    assert link.slowdown == 0.5
    (out_us, beside_out_us), (in_us, beside_in_us) = asked
    assert out_us == pytest.approx(link.out_us(VALUE_NBYTES))
    assert in_us == pytest.approx(link.in_us(VALUE_NBYTES))
    assert min(beside_out_us / out_us, beside_in_us / in_us) > 1  # the copies are made meanwhile


def test_what_computing_loses_beside_copies_is_a_share_of_their_time() -> None:
    """Of four that take a second each, 1.2 s; where a round lasted no longer, nothing."""

    def lost(beside_us: float) -> float:
        times = itertools.cycle((5e6, beside_us))
        return _lost_share(lambda: lambda: None, 1e6, lambda: next(times))

    assert lost(6.2e6) == pytest.approx(0.3, rel=1e-3)
    assert lost(4.9e6) == 0.0


def test_a_folder_with_little_room_is_measured_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one with none is told as such."""
    real = files.mapped
    asked: list[int] = []

    def mapped(folder: str, nbytes: int) -> mmap.mmap:
        asked.append(nbytes)
        if nbytes > room:
            raise OffloadError("full")
        return real(folder, nbytes)

    monkeypatch.setattr(files, "mapped", mapped)
    room = LEAST_NBYTES
    assert disk_link(Disk(str(tmp_path))).out_nbytes_per_us > 10
    assert max(asked) == VALUE_NBYTES
    room = 0
    with pytest.raises(OffloadError, match="full"):
        disk_link(Disk(str(tmp_path)))
