"""Time and workspace of every operator of a graph, measured on the device at hand.

Enters: nodes of a joint graph. Leaves: an `OpCost` for each. Guarantees: equal calls (operator,
shapes, strides, dtypes, constants, device, torch version, threads) are measured once and kept in
an SQLite file that concurrent processes share; times that load has spoilt are taken again, and
never kept; ranks of one job price equal calls equally, whichever of them measured or estimated
them; the user's random streams are not advanced; what cannot run alone on made-up inputs is priced
by `calls.estimate` and marked as not measured. No fault of the cache, and none of an
operator, reaches the caller.

On CUDA the allocator's peak statistics are reset.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx
from torch.profiler import record_function

from autoremat._torch import (
    MemoryEvent,
    fake_value,
    memory_events,
    profiler_is_active,
    real_execution,
    recording_memory,
    tensor_leaves,
)
from autoremat.call_stack import users_level
from autoremat.cost.agreed import ON_MACHINE, agree, agreed
from autoremat.cost.cache import CostCache, DeviceCeilings, Measured
from autoremat.cost.calls import (
    FREE,
    NOMINAL_CEILINGS,
    Call,
    OpCost,
    bytes_moved,
    call_of,
    estimate,
    flop_count,
    is_free,
    matmul_dtype,
    roofline_us,
)
from autoremat.cost.made_up_inputs import Inputs, draw_inputs, runs_alone
from autoremat.cost.timings import Timing, implausible
from autoremat.memory.meter import rounded_nbytes

Progress = Callable[[int, int], None]
Run = Callable[[], object]
Draw = Callable[[], Run]
Drawn = TypeVar("Drawn")

_ROUNDS = 2
_PAUSES_S = (0.05, 0.1, 0.2, 0.4)  # before each round over what is implausible: load passes
_TIMED_RUNS = 6
_TIMED_NS = 10_000_000
_MARK = "autoremat::workspace::"
# Beside the model and under its budget: no more than it takes. On the CPU, what is larger measures
# how fast the system hands out pages; on a GPU, what is smaller stays in its cache.
_COPY_NBYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_MATMUL_SIZE = {"cpu": 768, "cuda": 8192}


def profile_nodes(
    nodes: Sequence[fx.Node],
    *,
    as_compiled: Callable[[Call], Call] | None = None,
    cache_path: Path | None = None,
    progress: Progress | None = None,
) -> dict[fx.Node, OpCost]:
    """Price every node, measuring each distinct operator call once.

    Args:
        nodes: nodes of a joint graph, which have fake values.
        as_compiled: each call as the compiler will make it, if not as the graph has it.
        cache_path: the SQLite file; the user's cache directory if not given.
        progress: called with (measurements done, measurements to do).
    """
    calls = {node: call_of(node) for node in nodes if not is_free(node)}
    if as_compiled is not None:
        calls = {node: call and as_compiled(call) for node, call in calls.items()}
    keys = {node: call_key(call) for node, call in calls.items() if call is not None}
    costs = dict.fromkeys(nodes, FREE)
    devices = {call.device for call in calls.values() if call is not None}
    with CostCache.open(cache_path) as cache, quiet_execution(devices):
        by_key = agreed(set(keys.values()), OpCost)
        fresh = {keys[n]: n for n in keys if keys[n] not in by_key}
        todo = {k: call for k, n in fresh.items() if (call := calls[n]) is not None}
        own = _costs(todo, cache, progress)
        estimated = {k: _estimated(n, calls[n], cache) for k, n in fresh.items() if k not in own}
        by_key |= agree(own | estimated, OpCost)
        for node, call in calls.items():
            is_known = node in keys
            costs[node] = by_key[keys[node]] if is_known else _estimated(node, call, cache)
    return costs


def _costs(
    calls: Mapping[str, Call], cache: CostCache, progress: Progress | None
) -> dict[str, OpCost]:
    """By key, what the calls cost on this machine; those that cannot be measured are left out."""
    known = cache.read(calls, Measured)
    fresh, doubtful = _measure_calls(calls, known, progress)
    cache.write({key: found for key, found in fresh.items() if key not in doubtful})
    # What another process stored first counts: two ranks plan with the same times.
    known |= fresh | cache.read(fresh, Measured)
    measured = {key: _measured_cost(calls[key], found) for key, found in known.items()}
    return measured | {key: replace(measured[key], is_doubtful=True) for key in doubtful}


def _estimated(node: fx.Node, call: Call | None, cache: CostCache) -> OpCost:
    device = call.device if call is not None else _node_device(node)
    return estimate(node, call, _ceilings(device, matmul_dtype(call), cache))


def call_key(call: Call) -> str:
    """Text that is equal for calls that cost the same."""
    text = f"{call.target}|{call.args!r}|{call.kwargs!r}|{settings_key(call.device)}"
    # Equal devices of one machine, one per rank, share their figures.
    return re.sub(r", index=\d+", "", text)


@functools.lru_cache(maxsize=64)
def _settings_key(device: torch.device, threads: int, settings: tuple[Any, ...]) -> str:
    name = torch.cuda.get_device_name(device) if _is_present(device) else _cpu_name()
    machine = f"{ON_MACHINE}{name}|threads {threads}"
    return f"torch {torch.__version__}|{device.type}|{settings}{machine}"


def settings_key(device: torch.device) -> str:
    """Text that names the device, the torch version and the settings that choose kernels."""
    settings = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.enabled,
    )
    return _settings_key(device, torch.get_num_threads(), settings)


@functools.cache
def _cpu_name() -> str:
    """The processor's model, which tells machines apart that share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, "") or platform.processor() or platform.machine()
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"


def _is_present(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or _is_present(device)


@contextmanager
def quiet_execution(devices: Collection[torch.device]) -> Iterator[None]:
    """Suspend fake tensors and gradients, and leave the random generators as they are."""
    present = {device for device in devices if _is_present(device)}
    current = torch.cuda.current_device() if present else 0
    indices = sorted({current if d.index is None else d.index for d in present})
    with real_execution(), torch.no_grad(), torch.random.fork_rng(devices=indices):
        yield


def _measured_cost(call: Call, found: Measured) -> OpCost:
    """What was measured, beside the bytes of the results, which the shapes alone decide."""
    charged = sum(rounded_nbytes(nbytes, call.device) for nbytes in call.fresh_nbytes)
    return OpCost(
        time_us=found.time_us,
        workspace_nbytes=max(0, found.peak_nbytes - max(charged, found.kept_nbytes)),
        excess_nbytes=max(0, found.kept_nbytes - charged),
        measured=True,
    )


# --- running the calls -------------------------------------------------------------------------


def _measure_calls(
    calls: Mapping[str, Call], known: Mapping[str, Measured], progress: Progress | None
) -> tuple[dict[str, Measured], set[str]]:
    """Time and peak of every call that is not known and runs, and which times are implausible.

    Calls that raise or do not fit are left out.
    """
    todo = {k: call for k, call in calls.items() if k not in known and runs_alone(call)}
    rounds: dict[str, list[float]] = defaultdict(list)
    report = progress or (lambda done, total: None)
    total = _ROUNDS * len(todo)
    # Whatever else the machine does comes in bursts of seconds, and a burst must not stay in the
    # cache: the rounds over all calls lie apart, and the quieter one counts.
    for turn in range(_ROUNDS):
        for done, (key, call) in enumerate(todo.items()):
            report(turn * len(todo) + done, total)
            if turn == 0 or key in rounds:
                _time_round({key: call}, rounds)
    report(total, total)
    doubtful = _measure_again({key: calls[key] for key in rounds}, rounds, calls, known)
    peaks = _peaks({key: calls[key] for key in rounds})
    found = {key: Measured(min(rounds[key]), *peaks[key]) for key in peaks}
    return found, doubtful & set(found)


def _time_round(calls: Mapping[str, Call], rounds: dict[str, list[float]]) -> None:
    """One more time for each call that runs."""
    for key, call in calls.items():
        timed = _attempt(functools.partial(_inputs, call), functools.partial(_time_us, call))
        if timed is not None:
            rounds[key].append(timed)


def _measure_again(
    timed: Mapping[str, Call],
    rounds: dict[str, list[float]],
    calls: Mapping[str, Call],
    known: Mapping[str, Measured],
) -> set[str]:
    """Take implausible times again, a few times; returns those that stay implausible."""
    # What is known agreed with something when it was stored: it is compared with, never doubted.
    kept = {key: _timing(calls[key], [known[key].time_us] * len(_PAUSES_S)) for key in known}

    def doubtful() -> set[str]:
        return implausible(kept | {key: _timing(timed[key], rounds[key]) for key in timed})

    for pause_s in _PAUSES_S:
        again = doubtful()
        if not again:
            break
        time.sleep(pause_s)
        _time_round({key: timed[key] for key in timed if key in again}, rounds)
    return doubtful()


def _timing(call: Call, rounds_us: Iterable[float]) -> Timing:
    expected_us = roofline_us(flop_count(call), bytes_moved(call), NOMINAL_CEILINGS["cpu"])
    return Timing(tuple(rounds_us), f"{call.target} on {call.device}", expected_us)


def _attempt(draw: Callable[[], Drawn], measure: Callable[[Drawn], Any]) -> Any | None:
    """Measure on made-up inputs; None if they do not fit into memory or the operator refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure(draw())
    except Exception:
        # Any operator may refuse made-up inputs, in any way it likes; it is then estimated.
        return None


def _inputs(call: Call) -> Inputs:
    """Made-up inputs, where the call's device is here and they leave most of its memory free."""
    taken_nbytes = sum(spec.span_nbytes for spec in (*call.inputs, *call.outputs))
    if not _is_here(call.device) or taken_nbytes > free_nbytes(call.device) // 3:
        raise MemoryError(f"{call.target} is too large to be run beside the model")
    return draw_inputs(call)


def _time_us(call: Call, inputs: Inputs) -> float:
    """Median time of one warm execution."""
    _execute(call, inputs)
    if call.device.type == "cuda":
        return _cuda_time_us(call, inputs)
    taken: list[int] = []
    while len(taken) < _TIMED_RUNS and sum(taken) < _TIMED_NS:
        start = time.perf_counter_ns()
        result = _execute(call, inputs)
        taken.append(time.perf_counter_ns() - start)
        del result
    return statistics.median(taken) / 1e3


def _cuda_time_us(call: Call, inputs: Inputs) -> float:
    """Median between device events; they are queued together so that launches overlap."""
    taken: list[float] = []
    batch = 1
    while len(taken) < _TIMED_RUNS and sum(taken) < _TIMED_NS / 1e6:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(batch)]
        for start, end in pairs:
            start.record()
            _execute(call, inputs)
            end.record()
        torch.cuda.synchronize(call.device)
        taken += [start.elapsed_time(end) for start, end in pairs]
        batch = _TIMED_RUNS - 1 if taken[0] < 2.0 else 1
    return statistics.median(taken) * 1e3


def _execute(call: Call, inputs: Inputs) -> Any:
    return call.target(*inputs.args, **inputs.kwargs)


# --- peaks -------------------------------------------------------------------------------------


def _peaks(calls: dict[str, Call]) -> dict[str, tuple[int, int]]:
    """Bytes allocated above the inputs at the highest point and at the end of each call."""
    draws = {key: functools.partial(_draw, call) for key, call in calls.items()}
    found: dict[str, tuple[int, int]] = {}
    for device in {call.device for call in calls.values()}:
        found |= peaks_of_runs(
            {k: d for k, d in draws.items() if calls[k].device == device}, device
        )
    return found


def _draw(call: Call) -> Run:
    return functools.partial(_execute, call, _inputs(call))


def peaks_of_runs(draws: Mapping[str, Draw], device: torch.device) -> dict[str, tuple[int, int]]:
    """Bytes allocated at the highest point and at the end of one run each; failures are left out.

    Args:
        draws: by key, a function that makes inputs and returns the run on them.
        device: where the runs allocate.
    """
    if not draws:
        return {}
    if device.type == "cuda":
        ran = {key: _attempt(draw, _cuda_peak) for key, draw in draws.items()}
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
    if profiler_is_active():
        warnings.warn(
            "autoremat: operator workspaces cannot be measured while another torch profiler is "
            "recording; operators are priced by estimate. Compile outside the profiled region.",
            stacklevel=users_level(),
        )
        return {}

    def marked(name: str) -> Callable[[Run], bool]:
        def measure(run: Run) -> bool:
            run()  # libraries fill their caches on the first run
            with record_function(name):
                result = run()
            del result
            return True

        return measure

    with recording_memory() as session:
        ran = [_attempt(draw, marked(f"{_MARK}{i}")) for i, draw in enumerate(draws.values())]
    peaks = _split_at_marks(memory_events(session, _MARK))
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


def free_nbytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, by what the system says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_system_free_nbytes(), _container_free_nbytes())


def _system_free_nbytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 4 << 30


def _container_free_nbytes() -> int:
    """What a container's limit (cgroup v2) leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return max(0, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return sys.maxsize


# --- ceilings ----------------------------------------------------------------------------------


def _ceilings(device: torch.device, dtype: torch.dtype, cache: CostCache) -> DeviceCeilings:
    """A device's ceilings, looked up when an estimate needs them."""
    key = f"ceilings|{dtype}|{settings_key(device)}"
    found = agreed([key], DeviceCeilings) or cache.read([key], DeviceCeilings)
    if not found and _is_here(device):
        found = {key: measure_ceilings(device, dtype)}
        cache.write(found)
    found = found or {key: NOMINAL_CEILINGS["cpu" if device.type == "cpu" else "cuda"]}
    return agree(found, DeviceCeilings)[key]


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> DeviceCeilings:
    """Time a large copy, a matrix product and the smallest operator."""
    size = _MATMUL_SIZE.get(device.type, 1024)
    copied_nbytes = _COPY_NBYTES.get(device.type, 8 << 20)
    aten = torch.ops.aten
    source = torch.ones(copied_nbytes // 4, device=device)
    copy_us = _bare_time_us(aten.clone.default, (source,), device)
    launch_us = _bare_time_us(aten.clone.default, (source[:1],), device)
    del source
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    matmul_us = _bare_time_us(aten.mm.default, (matrix, matrix), device)
    return DeviceCeilings(
        copy_gbps=2 * copied_nbytes / copy_us / 1e3,
        matmul_gflops=2 * size**3 / matmul_us / 1e3,
        launch_us=launch_us,
    )


def _bare_time_us(target: Any, args: tuple[Any, ...], device: torch.device) -> float:
    """Of the quietest round: a ceiling is the fastest that was seen."""
    call = Call(target, args, {}, (), (), placed_on=device)
    return min(_time_us(call, Inputs(args, {})) for _ in range(_ROUNDS + 1))


def _node_device(node: fx.Node) -> torch.device:
    """The device of the first tensor at the node's edges that is not on the CPU."""
    for tensor in tensor_leaves([fake_value(end) for end in (node, *node.all_input_nodes)]):
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")
