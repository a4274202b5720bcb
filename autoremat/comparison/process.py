"""The processes in which variants are measured, and their steps in turn.

Enters: a command line whose process answers with JSON lines on its standard output: first a row,
then, for each line `step` on its standard input, the seconds of one training step. Leaves: rows
and seconds. Guarantees: a process that crashes or hangs is a row that says so; `close` ends the
process and all that it has started.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import statistics
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Message = dict[str, Any]
_MESSAGE_LENGTH = 300


class Worker:
    """A process that measures one variant and then waits to be asked for timed steps.

    Attributes:
        ending: why the process is gone, if it ended while its steps were timed.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            command: program and arguments.
            log: file that receives what it and its libraries print.
            environment: all of it.
        """
        self.ending = ""
        self._log = log
        with log.open("w") as errors:
            # In a session of its own: Ctrl-C on the terminal is for the parent, which ends it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(environment),
                start_new_session=True,
            )
        self._messages: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self, timeout_s: float) -> Message:
        """The next message; `status` is `timeout` or `crash` where none came."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            return {"status": "timeout", "message": f"no answer within {timeout_s:g} s"}
        if message is None:
            code = self._process.wait()
            self.close()
            return {"status": "crash", "message": f"{_ending(code)}{self._last_words()}"}
        return message

    def time_step(self, timeout_s: float) -> float | None:
        """Seconds of one training step, or None once the process is gone: `ending` says why."""
        assert self._process.stdin is not None
        if self.ending or self._process.stdin.closed:
            return None
        with suppress(BrokenPipeError):  # then the answer says that it is gone
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        message = self.receive(timeout_s)
        self.ending = message.get("message", "")
        return message.get("seconds")

    def close(self) -> None:
        """End the process and what it has started."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        why = next((s for s in reversed(lines) if s and not s[0].isspace()), "")
        return f": {why[:_MESSAGE_LENGTH]}" if why else ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # what an import printed before the worker took over
                    self._messages.put(json.loads(line))
        self._messages.put(None)


def rounds(
    workers: Mapping[str, Worker], count: int, timeout_s: float
) -> Iterator[dict[str, float]]:
    """Seconds of one step of each worker, one after the other; then again, `count` times."""
    for worker in workers.values():  # a step that is not counted: caches have gone cold
        worker.time_step(timeout_s)
    for _ in range(count):
        taken = {name: worker.time_step(timeout_s) for name, worker in workers.items()}
        yield {name: seconds for name, seconds in taken.items() if seconds is not None}


def ratios(times: Sequence[Mapping[str, float]], name: str, yardstick: str) -> list[float]:
    """A worker's time over the yardstick's, in each round that has both."""
    return [t[name] / t[yardstick] for t in times if name in t and yardstick in t]


def median_step(times: Sequence[Mapping[str, float]], name: str) -> float:
    """Median of a worker's seconds."""
    return statistics.median(t[name] for t in times if name in t)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = ", perhaps because the machine's memory ran out" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"
