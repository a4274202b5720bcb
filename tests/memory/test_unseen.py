"""What CUDA's allocator gives away that no tensor shows; what it says is made up here."""

from __future__ import annotations

import pytest
import torch

from autoremat.memory.unseen import GRANULARITY_NBYTES, unseen_nbytes, workspaces

CUDA, KIB, MIB = torch.device("cuda"), 1 << 10, 1 << 20
HOPPER = (9, 0)
KEPT = 2 * (32 if hasattr(torch.backends.cuda, "cublaslt_workspace_size") else 33) * MIB
ALLOCATED, REQUESTED = "allocated_bytes.all.current", "requested_bytes.all.current"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of the allocator, as the test says."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    return found


def test_a_cpu_has_nothing_of_it() -> None:
    assert unseen_nbytes(torch.device("cpu"), 100 * MIB) == 0


def test_workspaces_of_forwards_and_backwards_count(stats: dict[str, int]) -> None:
    """Whether or not the allocator says what was asked for."""
    assert unseen_nbytes(CUDA, 100 * MIB) == KEPT
    stats[ALLOCATED] = 100 * MIB
    assert unseen_nbytes(CUDA, 100 * MIB) == KEPT


def test_what_a_step_will_create_leaves_remainders_as_what_is_there(stats: dict[str, int]) -> None:
    """Gradients and an optimizer's state are four times what is there: so are their remainders."""
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 98 * MIB}
    assert unseen_nbytes(CUDA, 400 * MIB) == KEPT + 8 * MIB
    assert unseen_nbytes(CUDA, 50 * MIB) == KEPT + 2 * MIB


def test_ranks_count_what_is_the_same_on_all(stats: dict[str, int]) -> None:
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 98 * MIB}
    assert unseen_nbytes(CUDA, 400 * MIB, is_alone=False) == KEPT


def test_what_differs_by_little_is_planned_alike(stats: dict[str, int]) -> None:
    """Plans that were found before are found again."""
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 100 * MIB - 512}
    found = unseen_nbytes(CUDA, 100 * MIB)
    stats[REQUESTED] -= MIB
    assert unseen_nbytes(CUDA, 100 * MIB) == found == KEPT + GRANULARITY_NBYTES


def test_an_allocator_without_statistics_has_workspaces_all_the_same(
    stats: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
    assert unseen_nbytes(CUDA, 100 * MIB) == KEPT


def test_each_thread_has_workspaces_of_its_own() -> None:
    """Forwards and backwards; of what size, the card says, or the environment."""
    assert sum(workspaces(HOPPER, {})) == KEPT
    assert workspaces((8, 0), {})[0] == 8 * MIB + 128 * KIB
    assert workspaces(HOPPER, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"})[0] == 8320 * KIB
    assert workspaces(HOPPER, {"CUBLAS_WORKSPACE_CONFIG": "none"})[0] == 32 * MIB


@pytest.mark.skipif(KEPT == 64 * MIB, reason="one library works where the other does")
def test_the_other_librarys_size_may_be_set() -> None:
    assert workspaces(HOPPER, {"CUBLASLT_WORKSPACE_SIZE": "4096"})[1] == 4 * MIB
