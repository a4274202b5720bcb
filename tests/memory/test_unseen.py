"""What CUDA's allocator gives away that no tensor shows; what it says is made up here."""

from __future__ import annotations

import pytest
import torch

from autoremat.memory import unseen
from autoremat.memory.unseen import GRANULARITY_NBYTES, unseen_nbytes

CUDA, MIB = torch.device("cuda"), 1 << 20
WORKSPACE = 33 * MIB  # of one thread on a card of compute capability 9.0
ALLOCATED, REQUESTED = "allocated_bytes.all.current", "requested_bytes.all.current"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of the allocator, as the test says."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: found)
    monkeypatch.setattr(unseen, "workspace_nbytes", lambda device: WORKSPACE)
    return found


def test_a_cpu_has_nothing_of_it() -> None:
    assert unseen_nbytes(torch.device("cpu"), 100 * MIB) == 0


def test_workspaces_of_forwards_and_backwards_count(stats: dict[str, int]) -> None:
    """Whether or not the allocator says what was asked for."""
    assert unseen_nbytes(CUDA, 100 * MIB) == 2 * WORKSPACE
    stats[ALLOCATED] = 100 * MIB
    assert unseen_nbytes(CUDA, 100 * MIB) == 2 * WORKSPACE


def test_what_a_step_will_create_leaves_remainders_as_what_is_there(stats: dict[str, int]) -> None:
    """Gradients and an optimizer's state are four times what is there: so are their remainders."""
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 98 * MIB}
    assert unseen_nbytes(CUDA, 400 * MIB) == 2 * WORKSPACE + 8 * MIB
    assert unseen_nbytes(CUDA, 50 * MIB) == 2 * WORKSPACE + 2 * MIB


def test_ranks_count_what_is_the_same_on_all(stats: dict[str, int]) -> None:
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 98 * MIB}
    assert unseen_nbytes(CUDA, 400 * MIB, is_alone=False) == 2 * WORKSPACE


def test_what_differs_by_little_is_planned_alike(stats: dict[str, int]) -> None:
    """Plans that were found before are found again."""
    stats |= {ALLOCATED: 100 * MIB, REQUESTED: 100 * MIB - 512}
    found = unseen_nbytes(CUDA, 100 * MIB)
    stats[REQUESTED] -= MIB
    assert unseen_nbytes(CUDA, 100 * MIB) == found == 2 * WORKSPACE + GRANULARITY_NBYTES
