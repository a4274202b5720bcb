"""Process groups: of this process alone, for tests that import the fixture, and of several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

PRELOADED = ["autoremat.api", "autoremat._torch.compiling"]


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    """The group is there during each test of the module."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


Scenario = Callable[[int], Any]


def on_ranks(
    scenarios: Mapping[str, Scenario], folder: Path, size: int = 2, *, limit_s: float = 150.0
) -> dict[str, list[Any]]:
    """By scenario, what it returned on each rank, or the exception that it raised there.

    Of a rank that ended in it, None.

    The ranks are processes that run one scenario after the other, each in a process group of its
    own, with cost caches of their own. They are forked from one that has run nothing.

    Args:
        scenarios: functions of a rank, found by their names where their modules are imported.
        folder: empty.
        size: how many ranks.
        limit_s: for all of it; whoever hangs is ended, and the test fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = [(dict(scenarios), folder, rank, size) for rank in range(size)]
    processes = [context.Process(target=_run, args=given) for given in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} did not come to an end within {limit_s:g} s"
    found = [pickle.loads((folder / f"rank {rank}").read_bytes()) for rank in range(size)]
    return {name: [of_rank.get(name) for of_rank in found] for name in scenarios}


def _run(scenarios: Mapping[str, Scenario], folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)
    found: dict[str, Any] = {}
    for number, (name, scenario) in enumerate(scenarios.items()):
        (folder / f"rank {rank}").write_bytes(pickle.dumps(found))  # it may end in the next one
        os.environ["XDG_CACHE_HOME"] = str(folder / f"cache {number} of {rank}")
        found[name] = _outcome(scenario, folder / f"store {number}", rank, size)
    (folder / f"rank {rank}").write_bytes(pickle.dumps(found))


def _outcome(scenario: Scenario, store: Path, rank: int, size: int) -> Any:
    limit = timedelta(seconds=getattr(scenario, "timeout_s", 60))
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit
    )
    try:
        return scenario(rank)
    except Exception as error:
        return error
    finally:
        distributed.destroy_process_group()
        torch._dynamo.reset()
