"""What calls are given: each tensor once, as long as it lives."""

from __future__ import annotations

import torch

from autoremat.memory.given import Given

CPU = torch.device("cpu")
SHAPE = (7, 13)  # of no other test's tensors
NBYTES = 4 * 7 * 13


def batches(count: int) -> list[torch.Tensor]:
    return [torch.ones(SHAPE) for _ in range(count)]


def total(given: Given) -> int:
    return sum(given.sizes(CPU).values())


def test_what_is_given_again_counts_once():
    """In each step, as one that is kept for good."""
    given, held = Given(), batches(1)
    for _ in range(3):
        given.begin_step()
        given.note(held)
    assert len(given.tensors) == 1
    assert total(given) == NBYTES


def test_a_batch_that_is_gone_counts_no_more():
    """Each step makes its own."""
    given = Given()
    for _ in range(3):
        given.begin_step()
        batch = batches(1)
        given.note(batch)
        assert total(given) == NBYTES
