"""Process groups: of this process alone, for tests that import the fixture, and of several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

PRELOADED = ["autoremat.api", "autoremat._torch.compiling"]

# Now and then gloo's connections fail under load. That says nothing of what is tested: the ranks
# are started again.
ATTEMPTS = 3
NOT_CONNECTED = 77  # how a rank ends that met the others in vain
LIMIT_S = 60.0  # for what ranks say to each other
LATE = timedelta(minutes=10)  # longer than any scenario of a rank takes

LOOKS, MOST_LOOKS = 4, 40  # at a peak


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    """The group is there during each test of the module."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def lowest_peak(look: Callable[[], int], predicted_nbytes: float) -> int:
    """The lowest of what a peak is found to be: that is what a rank's own step takes.

    A thread of gloo that gets no processor frees its tensors late, under load in one step after
    the other. So the ranks look until all have seen the peak that was predicted, or for long.
    """
    lowest = min(look() for _ in range(LOOKS))
    for _ in range(MOST_LOOKS - LOOKS):
        is_above = torch.tensor(float(lowest > predicted_nbytes))
        distributed.all_reduce(is_above)
        if not is_above:
            break
        lowest = min(lowest, look())
    return lowest


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
    for attempt in range(ATTEMPTS):
        of_attempt = folder / f"attempt {attempt}"
        of_attempt.mkdir()
        if _ran(scenarios, of_attempt, size, limit_s):
            break
    else:
        pytest.fail(f"gloo did not connect {size} ranks in {ATTEMPTS} attempts")
    found = [pickle.loads((of_attempt / f"rank {rank}").read_bytes()) for rank in range(size)]
    return {name: [of_rank.get(name) for of_rank in found] for name in scenarios}


def _ran(scenarios: Mapping[str, Scenario], folder: Path, size: int, limit_s: float) -> bool:
    """Whether the ranks were connected each time; the first that was not ends them all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = [(dict(scenarios), folder, rank, size) for rank in range(size)]
    processes = [context.Process(target=_run, args=given) for given in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    running = {process.sentinel: process for process in processes}
    connected = True
    while running and connected and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(running), left_s):
            ended = running.pop(sentinel)
            ended.join()
            connected = connected and ended.exitcode != NOT_CONNECTED
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not (hung and connected), f"ranks {hung} did not come to an end within {limit_s:g} s"
    return connected


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
    limit_s = getattr(scenario, "timeout_s", LIMIT_S)
    connect(store, rank, size, limit_s)
    try:
        return scenario(rank)
    except Exception as error:
        return error
    finally:
        distributed.destroy_process_group()
        torch._dynamo.reset()


def connect(path: Path, rank: int, size: int, limit_s: float = LIMIT_S) -> None:
    """A process group, once all ranks are there: the limit is for what they say to each other."""
    limit = timedelta(seconds=limit_s)
    store = distributed.FileStore(str(path), size)
    try:
        _await_all(store, "there", rank, size)
        store.set_timeout(limit)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=limit
        )
        # Whoever has nothing to say leaves at once, and would close what others still connect.
        _await_all(store, "connected", rank, size)
    except RuntimeError:
        traceback.print_exc()
        os._exit(NOT_CONNECTED)


def _await_all(store: distributed.Store, state: str, rank: int, size: int) -> None:
    store.set(f"rank {rank} is {state}", "")
    store.wait([f"rank {of} is {state}" for of in range(size)], LATE)
