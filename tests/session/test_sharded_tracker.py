"""Our count of what FSDP2 holds, against the tracker that torch has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoremat.memory.meter import resident_nbytes
from tests.session.test_sharded import (
    Blocks,
    batch,
    during_block,
    four_processes,  # noqa: F401  a fixture
    sharded,
    spread_of,
)
from tests.training import make_seeded

MIDDLE = 3  # of the blocks: neither the first nor the last


def half() -> dict[str, Any]:
    """Gathered in 16 bits, reduced in 32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {"mp_policy": policy}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "gathered again": dict,
    "kept gathered": lambda: {"reshard_after_forward": False},
    "kept by pairs": lambda: {"reshard_after_forward": 2},
    "mixed precision": half,
}


def tracked(model: nn.Module) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes by what they are, of the tracker's second step.

    Returns:
        At the peaks of a block's forward and backward, and after the whole backward.
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    optimizer = torch.optim.SGD(model.parameters())
    tracker = FSDPMemTracker(model, optimizer)
    x = batch()
    tracker.track_inputs((x,))
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            model(x).backward()
            after = in_words(tracker.get_tracker_snapshot("current"))
            optimizer.step()
            optimizer.zero_grad()
    stats = tracker.memory_tracking[model.blocks[MIDDLE]]
    peaks = {state.name: found[0] for state, found in stats.snapshots.items()}
    return in_words(peaks["PEAK_FW"]), in_words(peaks["PEAK_BW"]), after


def in_words(snapshot: dict[Any, dict[Any, int]]) -> dict[str, int]:
    """Of the CPU."""
    (found,) = snapshot.values()
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in found.items()}


@pytest.mark.thorough
@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("case", CASES)
def test_what_is_counted_is_what_torch_tracks(case: str):
    """Shards, what is gathered in forward and backward, buffers of reductions, gradients."""
    options = CASES[case]()
    model = sharded(make_seeded(Blocks), **options)
    forward, backward, after = tracked(model)
    shards_nbytes = resident_nbytes(model)
    spread = during_block(model, MIDDLE, lambda: spread_of(model))
    traffic = spread.traffic
    assert forward["Sharded Param"] == backward["Sharded Param"] == shards_nbytes
    # Until its backward each block keeps what it keeps gathered, and so do those before it.
    gathered_nbytes = traffic.window_nbytes + MIDDLE * traffic.run_nbytes
    assert gathered(forward) + split(case, 0) == gathered_nbytes + traffic.forward_nbytes
    assert gathered(backward) + split(case, 1) == gathered_nbytes
    assert backward["Reduce Scatter"] == traffic.reduced_nbytes
    assert after["Sharded Grad"] == shards_nbytes


def gathered(found: dict[str, int]) -> int:
    """Parameters, and buffers that they are gathered into."""
    return found["Unsharded Param"] + found["All Gather"]


def split(case: str, part: int) -> int:
    """What is kept gathered by some of the processes only: to the tracker, activations."""
    if case != "kept by pairs":
        return 0
    with_it, without = (
        tracked(sharded(make_seeded(Blocks), **CASES[name]()))[part]["Activation"]
        for name in (case, "gathered again")
    )
    return with_it - without
