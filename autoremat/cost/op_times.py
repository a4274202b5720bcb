"""Time and workspace of every operator of a graph, measured on the device at hand.

Enters: nodes of a joint graph. Leaves: an `OpCost` for each. Guarantees: equal calls (operator,
shapes, strides, dtypes, constants, device, torch version, threads) are measured once and kept in
an SQLite file that concurrent processes share; times that load has spoilt are taken again, and
never kept; ranks of one job price equal calls equally, whichever of them measured or estimated
them; the user's random streams are not advanced; what cannot run alone on made-up inputs is priced
by `estimates.estimate` and marked as not measured. No fault of the cache, and none of an
operator, reaches the caller.

On CUDA the allocator's peak statistics are reset.
"""

from __future__ import annotations

import functools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from autoremat._torch import apart_from_profilers, fake_value, tensor_leaves
from autoremat.cost.agreed import agree, agreed
from autoremat.cost.cache import CostCache, Measured
from autoremat.cost.calls import FREE, Call, OpCost, call_of, is_free
from autoremat.cost.ceilings import ceilings_of
from autoremat.cost.estimates import NOMINAL_CEILINGS, estimate, roofline_us
from autoremat.cost.machine import free_nbytes, is_here, quiet_execution, settings_key
from autoremat.cost.made_up_inputs import Inputs, draw_inputs, runs_alone
from autoremat.cost.runs import Run, attempt, call_time_us, execute, peaks_of_runs
from autoremat.cost.timings import ROUNDS, Timing, implausible, is_settled
from autoremat.cost.work import bytes_moved, flop_count, matmul_dtype
from autoremat.memory.storage_sizes import rounded_nbytes

Progress = Callable[[int, int], None]

_PAUSES_S = (0.05, 0.1, 0.2, 0.4)  # before each round over what is implausible: load passes
_BELIEVED = ROUNDS + len(_PAUSES_S)  # rounds that agree: as many as are ever taken


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
    fresh, doubtful = apart_from_profilers(lambda: _measure_calls(calls, known, progress))
    cache.write({key: found for key, found in fresh.items() if key not in doubtful})
    # What another process stored first counts: two ranks plan with the same times.
    known |= fresh | cache.read(fresh, Measured)
    measured = {key: _measured_cost(calls[key], found) for key, found in known.items()}
    return measured | {key: replace(measured[key], is_doubtful=True) for key in doubtful}


def _estimated(node: fx.Node, call: Call | None, cache: CostCache) -> OpCost:
    device = call.device if call is not None else _node_device(node)
    return estimate(node, call, ceilings_of(device, matmul_dtype(call), cache))


def call_key(call: Call) -> str:
    """Text that is equal for calls that cost the same."""
    text = f"{call.target}|{call.args!r}|{call.kwargs!r}|{settings_key(call.device)}"
    # Equal devices of one machine, one per rank, share their figures.
    return re.sub(r", index=\d+", "", text)


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
    total = ROUNDS * len(todo)
    # Whatever else the machine does comes in bursts of seconds, and a burst must not stay in the
    # cache: the rounds over all calls lie apart, and the quietest counts.
    for turn in range(ROUNDS):
        for done, (key, call) in enumerate(todo.items()):
            report(turn * len(todo) + done, total)
            if turn == 0 or (key in rounds and not is_settled(rounds[key])):
                _time_round({key: call}, rounds)
    report(total, total)
    doubtful = _measure_again({key: calls[key] for key in rounds}, rounds, calls, known)
    peaks = _peaks({key: calls[key] for key in rounds})
    found = {key: Measured(min(rounds[key]), *peaks[key]) for key in peaks}
    return found, doubtful & set(found)


def _time_round(calls: Mapping[str, Call], rounds: dict[str, list[float]]) -> None:
    """One more time for each call that runs."""
    for key, call in calls.items():
        timed = attempt(functools.partial(_inputs, call), functools.partial(call_time_us, call))
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
    kept = {key: _timing(calls[key], [known[key].time_us] * _BELIEVED) for key in known}

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


def _inputs(call: Call) -> Inputs:
    """Made-up inputs, where the call's device is here and they leave most of its memory free."""
    taken_nbytes = sum(spec.span_nbytes for spec in (*call.inputs, *call.outputs))
    if not is_here(call.device) or taken_nbytes > free_nbytes(call.device) // 3:
        raise MemoryError(f"{call.target} is too large to be run beside the model")
    return draw_inputs(call)


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
    return functools.partial(execute, call, _inputs(call))


def _node_device(node: fx.Node) -> torch.device:
    """The device of the first tensor at the node's edges that is not on the CPU."""
    for tensor in tensor_leaves([fake_value(end) for end in (node, *node.all_input_nodes)]):
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")
