"""The processes of a comparison: what they answer, how they end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoremat.comparison.process import Worker, median_step, ratios, rounds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    """Starts a process that runs some code, and ends it after the test."""
    workers: list[Worker] = []

    def started(code: str) -> Worker:
        worker = Worker([sys.executable, "-c", code], tmp_path / "log", os.environ)
        workers.append(worker)
        return worker

    yield started
    for worker in workers:
        worker.close()


Start = Callable[[str], Worker]
ECHO = (
    "import sys\n"
    'print(\'{"status": "ok"}\', flush=True)\n'
    "for line in sys.stdin: print('{\"seconds\": 2.0}', flush=True)\n"
)


def test_a_process_answers_with_a_row_and_then_with_seconds(start: Start) -> None:
    """Round by round; one that is gone has no more times."""
    steady, leaving = (
        start(ECHO),
        start(
            ECHO.replace("for line in", "for line, _ in zip(").replace(
                ": print", ", range(2)): print"
            )
        ),
    )
    for worker in (steady, leaving):
        assert worker.receive(60) == {"status": "ok"}
    times = list(rounds({"a": steady, "b": leaving}, 2, 60))
    assert times == [{"a": 2.0, "b": 2.0}, {"a": 2.0}]
    assert (steady.ending, leaving.ending) == ("", "exit code 0")
    assert ratios(times, "b", "a") == [1.0]
    assert median_step(times, "a") == 2.0


def test_a_crash_is_a_row_with_its_last_words(start: Start) -> None:
    """The exit code or the signal, and what it printed last."""
    crash = start("raise RuntimeError('no such device')").receive(60)
    assert crash == {
        "status": "crash",
        "message": "exit code 1: RuntimeError: no such device",
    }
    killed = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").receive(60)
    assert killed["message"] == "ended by SIGKILL, perhaps because the machine's memory ran out"


def test_a_process_that_hangs_is_ended(start: Start) -> None:
    """With all that it has started, as a compiler's own processes are."""
    worker = start(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "child.wait()\n"
    )
    child = worker.receive(60)["child"]
    assert worker.receive(0.01) == {"status": "timeout", "message": "no answer within 0.01 s"}
    assert worker.time_step(0.01) is None
    deadline = time.monotonic() + 30
    while _runs(child) and time.monotonic() < deadline:
        pass
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
