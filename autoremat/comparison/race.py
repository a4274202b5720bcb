"""The measurement: a process for each variant, then one step of each in turn.

Enters: a target, variants, options. Leaves: a `Comparison`. Guarantees: one variant is measured at
a time; however the run ends, its processes end with it; what was measured before an interruption
is in `Race.result`.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autoremat.comparison.model import OK, Comparison, Row
from autoremat.comparison.process import Message, Worker, median_step, ratios, rounds
from autoremat.comparison.variants import BUDGETS, Task, Variant, budget_nbytes, chosen_variants
from autoremat.progress import Progress

_FIGURES = (
    "message",
    "peak_nbytes",
    "reserved_nbytes",
    "resident_nbytes",
    "budget_nbytes",
    "smallest_peak_nbytes",
    "predicted_peak_nbytes",
    "first_step_seconds",
)


class ComparisonError(ValueError):
    """A target whose step cannot be run at all; the message says what was found."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure.

    Attributes:
        rounds: timed steps of each variant.
        time_limit: seconds to choose a plan, per graph.
        timeout: seconds for one variant to be built and measured.
        alone: time each variant before the next one is built, not in turn.
        threads: of torch; None leaves torch's own choice.
        verbose: show progress.
    """

    rounds: int = 7
    time_limit: float = 30.0
    timeout: float = 900.0
    alone: bool = False
    threads: int | None = None
    verbose: bool = True

    def __post_init__(self) -> None:
        """Refuses numbers that mean nothing.

        Raises:
            ValueError: naming the option.
        """
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: time at least one step of each variant.")
        if not 0 <= self.time_limit < float("inf"):
            raise ValueError(f"time_limit is {self.time_limit}: give a finite number of seconds.")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout is {self.timeout}: give a number of seconds above 0.")


def compare(
    make: Callable[[], tuple[Any, ...]] | str,
    *,
    budgets: Iterable[str | int] = BUDGETS,
    variants: Iterable[str] | None = None,
    compiler: str = "inductor",
    rounds: int = 7,
    time_limit: float = 30.0,
    timeout: float = 900.0,
    alone: bool = False,
    verbose: bool = True,
) -> Comparison:
    """Measure a model's training step under autoremat and under what else there is.

    Each variant is built anew in a process of its own by calling `make` there. The step is forward
    and backward; the optimizer is not part of it.

    Args:
        make: a function of a module or script, without arguments, that returns (model, inputs) or
            (model, inputs, loss_fn); or its name, "path/to/file.py:function" or
            "package.module:function".
        budgets: of autoremat: "75%" of what eager's step needs above its resident bytes,
            "smallest", or a size of the whole step as for `optimize`.
        variants: what else to measure: "every-layer", "every-2" (one checkpoint for two layers),
            "sqrt", "selective-attention", "compile" (torch.compile), "torch:0.5" (with that
            `activation_memory_budget`). All of them if not given; with compiler "eager" those that
            need no Inductor. Eager mode is always measured.
        compiler: what runs autoremat's graphs and the checkpointed models.
        rounds: timed steps of each variant.
        time_limit: seconds to choose a plan, per graph.
        timeout: seconds for one variant to be built and measured.
        alone: time each variant before the next one is built, for models of which the device
            holds one only; times are then less comparable.
        verbose: show progress.

    Raises:
        ValueError: for malformed options, and a target that is not there, raises, or whose step
            fails in eager mode.
    """
    torch = sys.modules.get("torch")
    options = Options(
        rounds=rounds,
        time_limit=time_limit,
        timeout=timeout,
        alone=alone,
        threads=None if torch is None else torch.get_num_threads(),
        verbose=verbose,
    )
    target = make if isinstance(make, str) else _name_of(make)
    race = Race(target, chosen_variants(variants, budgets, compiler), options)
    race.run()
    return race.result()


class Race:
    """One comparison while it is measured."""

    def __init__(self, target: str, variants: Iterable[Variant], options: Options) -> None:
        """Measures nothing yet.

        Args:
            target: as the user wrote it.
            variants: eager first.
            options: how to measure.
        """
        self._target, self._variants, self._options = target, tuple(variants), options
        self._messages: dict[str, Message] = {}
        self._times: list[dict[str, float]] = []
        self._workers: dict[str, Worker] = {}
        self._is_complete = False
        self._began, self._seconds = time.monotonic(), 0.0

    def run(self) -> None:
        """Measure all variants.

        Raises:
            ComparisonError: if the target's own step does not run.
        """
        self._began = time.monotonic()
        try:
            with (
                tempfile.TemporaryDirectory(prefix="autoremat-") as logs,
                Progress(self._options.verbose) as progress,
            ):
                self._measure_all(Path(logs), progress)
                if not self._options.alone:
                    self._time_all(progress)
            self._is_complete = True
        finally:
            for worker in self._workers.values():
                worker.close()
            self._seconds = time.monotonic() - self._began

    def result(self) -> Comparison:
        """What was measured so far."""
        known = next((m for m in self._messages.values() if m["status"] == OK), {})
        timed = {name for times in self._times for name in times}
        yardstick = next((v.name for v in self._variants if v.name in timed), "")
        return Comparison(
            target=self._target,
            model=known.get("model", ""),
            parameters=known.get("parameters", 0),
            batch=known.get("batch", 0),
            device=known.get("device", ""),
            torch_version=known.get("torch_version", ""),
            yardstick=yardstick,
            is_complete=self._is_complete,
            seconds=self._seconds,
            rows=tuple(
                self._row(variant, self._messages[variant.name], yardstick)
                for variant in self._variants
                if variant.name in self._messages
            ),
        )

    def _measure_all(self, logs: Path, progress: Progress) -> None:
        for number, variant in enumerate(self._variants):
            progress.stage(f"measure {variant.name}")
            progress.advance(number, len(self._variants), "variants")
            message = self._measured(variant, logs / f"{number}.log")
            if number == 0:
                self._require_a_step(message)
            self._messages[variant.name] = message
            worker = self._workers.get(variant.name)
            if worker is not None and (self._options.alone or message["status"] != OK):
                if message["status"] == OK:
                    self._time({variant.name: worker}, progress)
                worker.close()

    def _measured(self, variant: Variant, log: Path) -> Message:
        eager = self._messages.get(self._variants[0].name, {})
        resident, peak = eager.get("resident_nbytes", 0), eager.get("peak_nbytes")
        above = None if peak is None else peak - resident
        try:
            budget = budget_nbytes(variant.budget, resident, above)
        except ValueError as error:
            return {"status": "not applicable", "message": str(error)}
        options = self._options
        said = replace(variant, budget=None)
        task = Task(self._target, said, budget, options.time_limit, options.threads)
        command = [sys.executable, "-m", "autoremat.comparison.worker", json.dumps(asdict(task))]
        worker = self._workers[variant.name] = Worker(command, log, _environment())
        return worker.receive(options.timeout)

    def _require_a_step(self, message: Message) -> None:
        if message["status"] == "bad target":
            raise ComparisonError(message["message"])
        if message["status"] == "failed":
            raise ComparisonError(
                f"A training step of {self._target} fails in eager mode: {message['message']}. "
                "Check that model(*inputs) and the backward of its loss run by themselves."
            )

    def _time_all(self, progress: Progress) -> None:
        sound = {n: w for n, w in self._workers.items() if self._messages[n]["status"] == OK}
        self._time(sound, progress)

    def _time(self, workers: dict[str, Worker], progress: Progress) -> None:
        """Add the rounds of some workers to the times of all, round by round."""
        names = next(iter(workers), "") if len(workers) == 1 else f"{len(workers)} variants in turn"
        progress.stage(f"time {names}")
        count = self._options.rounds
        for number, taken in enumerate(rounds(workers, count, self._options.timeout)):
            progress.advance(number + 1, count, "rounds")
            if number == len(self._times):
                self._times.append({})
            self._times[number] |= taken

    def _row(self, variant: Variant, message: Message, yardstick: str) -> Row:
        row = Row(variant.name, variant.kind, variant.compiler, message["status"])
        row = replace(row, **{name: message[name] for name in _FIGURES if name in message})
        worker = self._workers.get(variant.name)
        if worker is not None and worker.ending:
            row = replace(row, message=f"its process ended while steps were timed: {worker.ending}")
        count = sum(variant.name in times for times in self._times)
        if not count:
            return row
        step = median_step(self._times, variant.name)
        found = ratios(self._times, variant.name, yardstick)
        return replace(
            row,
            step_seconds=step,
            time_ratio=statistics.median(found) if found else None,
            time_ratio_range=(min(found), max(found)) if found else None,
            samples_per_second=message["batch"] / step,
            rounds=count,
        )


def _environment() -> dict[str, str]:
    """Ours, with our path of imports: the target is found where the caller would find it."""
    paths = [entry or os.getcwd() for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _name_of(make: Callable[..., Any]) -> str:
    """The target that names a function."""
    name = getattr(make, "__qualname__", "")
    if not name.isidentifier():
        raise ValueError(
            f"make is {name or type(make).__name__!r}, which other processes cannot find by name: "
            "each variant is built in a process of its own. Give a function that a module or "
            'script defines at its top level, or its name, "path/to/file.py:function".'
        )
    module = make.__module__
    if module != "__main__":
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(make)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ValueError(
            f"make is {name!r} of an interactive session, which other processes cannot import: "
            "each variant is built in a process of its own. Write it to a file and give its name, "
            '"path/to/file.py:function".'
        )
    return f"{file}:{name}"
