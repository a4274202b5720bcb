"""What every test starts from: clean compilers, one thread, one seed, and a cost cache of its own.

The smoke tests of torch's private names run first: where a torch release has moved one, they say
which, before the tests that merely fail for it. With TEST_MINUTES=25 in the environment no test
begins later than that, and each day others are the first. Hypothesis repeats the same examples each
time, unless `--hypothesis-profile=nightly` asks for thousands of new ones. Torch is touched only
where a test module has imported it, so that the solver's tests stay fast.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from autoremat_solver.bounds import certified
from hypothesis import settings

IN_MEMORY = Path("/dev/shm")
SOLVER = Path(__file__).parent / "solver"
MEASURED = {Path(__file__).parent / "cost"}  # tests of what operators really take

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("nightly", max_examples=5000, print_blob=True)
settings.load_profile("repeatable")


MINUTES = float(os.environ.get("TEST_MINUTES", "inf"))
BEGAN_S = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Private names of torch first, everything else in its order; of a limited time, from a day's.

    A slow machine does not come to the end of them: after a few days it has run all.
    """
    if math.inf > MINUTES and items:
        first = date.today().toordinal() * len(items) // 5 % len(items)
        items[:] = items[first:] + items[:first]
    items.sort(key=lambda item: not item.nodeid.startswith("tests/house/test_torch_names.py"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Whoever limits the time is told how many tests were left out."""
    if time.monotonic() - BEGAN_S > 60 * MINUTES:
        pytest.skip(f"no time is left of {MINUTES:g} minutes")


def pytest_collection_finish() -> None:
    """What was imported stays: no search for garbage, or for tensors, goes through it again.

    A measurement of memory does both. What it would miss, memory of such an object that a step
    frees, makes its figure too high, never too low.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_is_left_stays() -> Iterator[None]:
    """The same of what outlives the tests of a module: more imports, and the compilers' caches.

    There is ever more of it, and each measurement would go through all of it.
    """
    yield
    if "torch" in sys.modules:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def cost_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Operator times are measured once per session, and the user's own cache is left alone.

    It is in memory where that can be: a disk takes longer to sync than most tests that write take.
    """
    with ExitStack() as cleanup:
        folder = tmp_path_factory.mktemp("cache")
        if os.access(IN_MEMORY, os.W_OK):
            folder = Path(cleanup.enter_context(TemporaryDirectory(dir=IN_MEMORY)))
        patch = cleanup.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(autouse=True, scope="module")
def short_proofs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Proofs of how good a plan is take a twentieth of their work, but in the solver's own tests.

    They were most of the search's time, and say nothing of whether the plan is right.
    """
    with pytest.MonkeyPatch.context() as patch:
        if SOLVER not in request.path.parents:
            patch.setattr(certified, "WORK", certified.WORK // 20)
        yield


@pytest.fixture(autouse=True, scope="module")
def times_that_load_does_not_change(request: pytest.FixtureRequest) -> Iterator[None]:
    """Operators run once and are priced by what they move and compute, but where said above.

    Which plan is best, and by how much, is then the same on every machine at every load. What
    other processes do, which a test starts, is measured, and kept under other keys.
    """
    is_measured = not MEASURED.isdisjoint([request.path, *request.path.parents])
    with pytest.MonkeyPatch.context() as patch:
        if {"autoremat", "torch"} <= sys.modules.keys() and not is_measured:
            op_times = importlib.import_module("autoremat.cost.op_times")
            key_of = op_times.call_key
            patch.setattr(op_times, "call_key", lambda call: f"nominal|{key_of(call)}")
            patch.setattr(op_times, "call_time_us", functools.partial(_nominal_us, op_times))
        yield


def _nominal_us(op_times: Any, call: Any, inputs: Any) -> float:
    """What a call takes at nominal ceilings; it raises what the call raises."""
    op_times.execute(call, inputs)
    work = op_times.flop_count(call), op_times.bytes_moved(call)
    return op_times.roofline_us(*work, op_times.NOMINAL_CEILINGS["cpu"])


@pytest.fixture(autouse=True, scope="module")
def no_plans_of_other_modules() -> None:
    """None that the tests of another module have found."""
    _forget_plans()


@pytest.fixture(autouse=True)
def no_plans_of_other_tests(request: pytest.FixtureRequest) -> None:
    """A search that a test expects is not spared by what another one has found.

    But in modules that are marked `shares_plans`: none of their tests is of the search itself, and
    many of them ask for the same plans.
    """
    if request.node.get_closest_marker("shares_plans") is None:
        _forget_plans()


def _forget_plans() -> None:
    found_before = sys.modules.get("autoremat.planning.found_before")
    if found_before is not None:
        found_before.FoundBefore.remove()


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """No compiled code of another test, seed 0, one thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ledger = sys.modules.get("autoremat.watch.ledger")
    if ledger is not None:  # what other tests still hold is none of this one's step
        ledger._books = ledger._Books()
    yield
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
