"""What `torch.distributed._tools.sac_ilp` decides for the blocks of a model, done to them.

Enters: a model of the benchmarks, and a share of its peak. Leaves: the model, whose blocks are
under selective checkpoints that save what the tool's integer programs say. Guarantees: the tool
sees the step as it runs (on the fake tensors that it expects, models of transformers take another
attention); its two constants of a device are measured on this machine; an operation that is not the
one that was decided about is an error.

The tool fits curves with `pwlf`, which the project does not need: `pip install pwlf`.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoremat import _torch
from autoremat.comparison.layers import Checkpointed, Place, repeated_layers
from autoremat.cost.ceilings import measure_ceilings
from tests.models import Case

CPU = torch.device("cpu")
LEAST = 0.0  # a share: the smallest that there is a plan for
SHARES = [number / 20 for number in range(1, 21)]  # where that is looked for
GIB = 2.0**30
# The tool takes two FLOPs for one and three quarters of a device's peak for what can be had.
TFLOPS_PER_GFLOPS = 1e-3 / (2 * 0.75)


class NoPlan(Exception):
    """The tool has none for the model; the message says why."""


@dataclass(frozen=True)
class Decided:
    """For one block: whether each of its operations is saved, in the order in which they run."""

    operations: tuple[str, ...]
    is_saved: tuple[bool, ...]


def checkpoint_as_decided(make: Callable[[], Case], share: float) -> Case:
    """The case with its blocks under checkpoints.

    Args:
        make: makes the case.
        share: of what the tool takes the step's peak to be above the parameters; or `LEAST`.

    Raises:
        NoPlan: if there are no blocks, or the tool finds none.
    """
    case = make()
    runs = repeated_layers(case.model)
    places = {f"{type(case.model).__name__}.{p.path}": p for run in runs for p in run}
    if not places:
        raise NoPlan("no repeated layers found")
    try:
        decided = _decisions(make, list(places), SHARES if share == LEAST else [share])
    except (NoPlan, ImportError):
        raise
    except Exception as error:  # of the tool: at a loss that is made in the forward, for one
        raise NoPlan(f"sac_ilp ends with {type(error).__name__}: {error}") from error
    for name, one in decided.items():
        _put(places[name], one)
    return case


def _decisions(
    make: Callable[[], Case], blocks: list[str], shares: Iterable[float]
) -> dict[str, Decided]:
    """For each block that is to be under a checkpoint, at the first share with a plan."""
    from torch.distributed._tools import ilp_utils, sac_ilp

    logging.getLogger(sac_ilp.__name__).setLevel(logging.CRITICAL)
    info, estimated = _estimates(make)
    graph = ilp_utils.parse_module_info(info)
    peak_nbytes, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
    held_nbytes = graph.nodes[0]["param_per_module"]
    for share in shares:
        budget = (held_nbytes + share * (peak_nbytes - held_nbytes)) / GIB
        discarded, _, found_nbytes = sac_ilp.sac_milp(graph, budget, ac_units=blocks)
        if found_nbytes >= 0:
            return {name: _decided(estimated[name], 1 - discarded[name]) for name in discarded}
    raise NoPlan("sac_ilp: no plan within that share of the peak")


def _decided(stats: Any, kept: float) -> Decided:
    """What one block saves if it may keep so much of what its operations make."""
    from torch.distributed._tools import sac_ilp

    policy = sac_ilp.get_optimal_checkpointing_policy_per_module(stats, min(1.0, max(0.0, kept)))
    if not policy:
        raise NoPlan("sac_ilp: no policy for a block")
    return Decided(tuple(stats.func_names), tuple(map(bool, policy)))


def _estimates(make: Callable[[], Case]) -> tuple[Any, dict[str, Any]]:
    """What the tool knows of each module: memory, times, and what each operation is worth."""
    from torch.distributed._tools import ilp_utils
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    kind = "operator-level-cost-model"
    tracker, times, worth = MemTracker(), RuntimeEstimator(), SACEstimator()
    case = make()
    with _as_on_a_gpu(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it measures
        tracker.track_external(case.model)
        with tracker:
            case.step()
        case.model.zero_grad(set_to_none=True)
        with times(estimate_mode_type=kind):
            case.step()
        case.model.zero_grad(set_to_none=True)
        with worth(estimate_mode_type=kind):
            output = case.forward(case.model, case.inputs)
        _leave_out_what_has_no_backward(tracker, times)
        info = ilp_utils.aggregate_stats(case.model, tracker, times, worth, CPU)
        del output
    return info, worth.sac_mod_stats


def _leave_out_what_has_no_backward(tracker: Any, times: Any) -> None:
    """Modules like a rotary embedding, at which the tool ends with an error."""
    from torch.distributed._tools.mem_tracker import _ModState

    of_module = tracker.memory_tracking
    without = [m for m, found in of_module.items() if _ModState.PRE_BW not in found.snapshots]
    names = {of_module.pop(module).mod_fqn for module in without}
    for order in (times.mod_fw_pre_order, times.mod_fw_post_order):
        order[:] = [name for name in order if name not in names]


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """The tool asks whether there is one, for its constants, and for a mode of fake tensors."""
    found = measure_ceilings(CPU, torch.float32)
    tflops, gbps = found.matmul_gflops * TFLOPS_PER_GFLOPS, found.copy_gbps
    where, tools = "torch.utils._runtime_estimation", "torch.distributed._tools"
    with (
        mock.patch(f"{where}.get_device_tflops", return_value=tflops),
        mock.patch(f"{where}.get_gpu_dram_gbps", return_value=gbps),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch(f"{tools}.runtime_estimator.active_fake_mode", _torch.FakeTensorMode),
        mock.patch(f"{tools}.sac_estimator.active_fake_mode", _torch.FakeTensorMode),
    ):
        yield


def _put(place: Place, decided: Decided) -> None:
    """Put a block under a checkpoint that saves what was decided."""
    place.put(Checkpointed(place.layer, None, lambda: _contexts(decided)))


def _contexts(decided: Decided) -> Any:
    """Of one call: its operations are counted as they run; again where torch asks of a rerun."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = counts[context.is_recompute]
        counts[context.is_recompute] += 1
        name = operation.overloadpacket.__name__
        if decided.operations[number] != name:
            raise RuntimeError(f"{name} runs where {decided.operations[number]} was decided about")
        if decided.is_saved[number]:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
