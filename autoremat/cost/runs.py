"""How long a run takes, and what it allocates, measured on the device at hand.

Enters: functions that make inputs and return the run on them. Leaves: microseconds and bytes.
Guarantees: what cannot run is left out; no fault of an operator reaches the caller.

On CUDA the allocator's peak statistics are reset.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from autoremat._torch import MemoryEvent, memory_events_of
from autoremat.cost.calls import Call
from autoremat.cost.made_up_inputs import Inputs

Run = Callable[[], object]
Draw = Callable[[], Run]
Drawn = TypeVar("Drawn")

_TIMED_RUNS = 6
_TIMED_NS = 10_000_000
_MARK = "autoremat::workspace::"


def attempt(draw: Callable[[], Drawn], measure: Callable[[Drawn], Any]) -> Any | None:
    """Measure on made-up inputs; None if they do not fit into memory or the operator refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure(draw())
    except Exception:
        # Any operator may refuse made-up inputs, in any way it likes; it is then estimated.
        return None


def call_time_us(call: Call, inputs: Inputs) -> float:
    """Median time of one warm execution of an operator."""
    return time_us(lambda: execute(call, inputs), call.device)


def execute(call: Call, inputs: Inputs) -> Any:
    """The result of an operator on these inputs."""
    return call.target(*inputs.args, **inputs.kwargs)


def time_us(run: Run, device: torch.device) -> float:
    """Median time of one warm execution."""
    run()
    if device.type == "cuda":
        return _cuda_time_us(run, device)
    taken: list[int] = []
    while len(taken) < _TIMED_RUNS and sum(taken) < _TIMED_NS:
        start = time.perf_counter_ns()
        result = run()
        taken.append(time.perf_counter_ns() - start)
        del result
    return statistics.median(taken) / 1e3


def _cuda_time_us(run: Run, device: torch.device) -> float:
    """Median between device events; they are queued together so that launches overlap."""
    taken: list[float] = []
    batch = 1
    while len(taken) < _TIMED_RUNS and sum(taken) < _TIMED_NS / 1e6:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batch)]
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(device)
        taken += [start.elapsed_time(end) for start, end in pairs]
        batch = _TIMED_RUNS - 1 if taken[0] < 2.0 else 1
    return statistics.median(taken) * 1e3


def peaks_of_runs(draws: Mapping[str, Draw], device: torch.device) -> dict[str, tuple[int, int]]:
    """Bytes allocated at the highest point and at the end of one run each; failures are left out.

    Args:
        draws: by key, a function that makes inputs and returns the run on them.
        device: where the runs allocate.
    """
    if not draws:
        return {}
    if device.type == "cuda":
        ran = {key: attempt(draw, _cuda_peak) for key, draw in draws.items()}
        return {key: peak for key, peak in ran.items() if peak is not None}
    return _cpu_peaks(draws)


def _cuda_peak(run: Run) -> tuple[int, int]:
    device = torch.cuda.current_device()
    run()  # libraries take their workspace on the first run
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return torch.cuda.max_memory_allocated(device) - before, kept


def _cpu_peaks(draws: Mapping[str, Draw]) -> dict[str, tuple[int, int]]:
    """One profiler session over one warm run each, cut at the markers."""

    def marked(name: str) -> Callable[[Run], bool]:
        def measure(run: Run) -> bool:
            run()  # libraries fill their caches on the first run
            with record_function(name):
                result = run()
            del result
            return True

        return measure

    ran: list[bool | None] = []

    def run_all() -> None:
        ran.extend(attempt(draw, marked(f"{_MARK}{i}")) for i, draw in enumerate(draws.values()))

    peaks = _split_at_marks(memory_events_of(run_all, _MARK))
    return {key: peaks.get(i, (0, 0)) for i, key in enumerate(draws) if ran[i]}


def _split_at_marks(events: list[MemoryEvent]) -> dict[int, tuple[int, int]]:
    """Highest and last running sum of allocations in each marker's span, by its number."""
    peaks: dict[int, tuple[int, int]] = {}
    current, end, live = -1, -1, 0
    for event in events:
        if event.name:
            current, end, live = int(event.name.removeprefix(_MARK)), event.end_ns, 0
            peaks[current] = (0, 0)
        elif event.start_ns <= end:
            live += event.nbytes
            peaks[current] = (max(peaks[current][0], live), live)
    return peaks
