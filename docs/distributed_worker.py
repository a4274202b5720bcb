"""One process of a group that trains a model: what each rank measures.

Enters: a `Case`. Leaves, through the sender of rank 0: rows of plain values, the first of the step
without a plan and with checkpoints, then one for each budget. Every figure is that of the rank
where it is worst.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from distributed_models import WAYS, batch, make, with_checkpoints
from own_process import forget_plans
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autoremat
from autoremat import _torch

CPU = torch.device("cpu")
SETTLED = 5  # steps before one is measured: it is promised from the third on
MEASURED = 24  # of six, each may show more than is live: see `peak_nbytes`
SMALLEST, CHECKPOINTS, TORCH = 0, -1, -2  # settings
TORCH_SHARE = 0.5  # of what torch would keep, which its own budget allows

Row = dict[str, Any]

_BY_TORCH = {"eager": "aot_eager_decomp_partition", "inductor": "inductor"}


@dataclass(frozen=True)
class Case:
    """What one group of processes does.

    Attributes:
        model: a name of `MODELS`.
        way: a name of `WAYS`.
        world: how many processes.
        settings: budgets in percent of the step without a plan; 0 as little as can be,
            -1 the peak of the step with checkpoints, -2 that of blocks compiled under torch's own
            budget.
        compiler: "eager" or "inductor".
        time_limit_s: of a solve, in seconds.
        rounds: timed steps.
    """

    model: str
    way: str
    world: int
    settings: tuple[int, ...]
    compiler: str = "eager"
    time_limit_s: float = 5.0
    rounds: int = 30

    @property
    def group(self) -> str:
        """Names the case."""
        return f"{self.model}/{self.way}/{self.world}"

    def key(self, variant: str | int) -> str:
        """Names a row of it."""
        return f"{self.group}/{variant}"


@dataclass
class Training:
    """A model, what is called, its optimizer and its batch."""

    model: nn.Module
    called: nn.Module
    data: tuple[Tensor, Tensor]
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One step; gradients stay."""
        self.called(*self.data).backward()
        self.optimizer.step()

    def timed_step(self) -> float:
        """Seconds of a step that begins without gradients, on all ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        distributed.barrier()
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def peak_nbytes(self) -> int:
        """The least of several: what threads of gloo free is not seen, and seems to live on."""
        return min(self._peak_nbytes() for _ in range(MEASURED))

    def _peak_nbytes(self) -> int:
        """What is there before a step, and its measured peak above that."""
        self.optimizer.zero_grad(set_to_none=True)
        distributed.barrier()
        return self._resident_nbytes() + autoremat.measure_peak(self.step, device=CPU)

    def _resident_nbytes(self) -> int:
        found = autoremat.resident_nbytes(self.model, self.data, self.optimizer)
        if isinstance(self.called, DistributedDataParallel):  # its buckets, which Python cannot see
            found += sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        return found

    def gradients(self) -> list[Tensor]:
        """Of this rank, now."""
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [(g.to_local() if isinstance(g, DTensor) else g).detach().clone() for g in found]


def serve(case: Case, rank: int, store: str, send: Callable[[Row], None]) -> None:
    """Everything that one rank does."""
    torch.set_num_threads(1)
    forget_plans()
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=case.world
    )
    try:
        for row in rows_of(case):
            if rank == 0:
                send(row)
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


def rows_of(case: Case) -> Iterator[Row]:
    """The step without a plan and with checkpoints, then one row for each budget."""
    plain, checked = (_trained(case, prepare) for prepare in (lambda m: m, with_checkpoints))
    expected = plain.gradients()
    eager_nbytes, checked_nbytes = (_worst(t.peak_nbytes()) for t in (plain, checked))
    yield {
        "key": case.key("eager"),
        "status": "ok",
        "eager_peak_nbytes": eager_nbytes,
        "checkpointed_peak_nbytes": checked_nbytes,
    }
    beside = {"eager_peak_nbytes": eager_nbytes, "checkpointed_peak_nbytes": checked_nbytes}
    for setting in case.settings:
        if setting == TORCH:
            row = _beside_torch(case, expected)
        elif setting == SMALLEST:
            row = _timed(_row(case, "min", expected), checked, case.rounds)
        else:
            is_peers = setting == CHECKPOINTS
            budget_nbytes = checked_nbytes if is_peers else eager_nbytes * setting // 100
            row = _timed(_row(case, budget_nbytes, expected), checked, case.rounds)
        yield {"key": case.key(setting), "setting": setting, **beside, **row}


def _trained(case: Case, prepare: Callable[[Any], Any]) -> Training:
    """After the steps that come before a measurement."""
    model = prepare(make(case.model))
    way = WAYS[case.way]
    rank = distributed.get_rank() if way.is_data_parallel else 0
    training = Training(model, way.spread(model), batch(rank))
    for _ in range(SETTLED):
        training.timed_step()
    return training


def _row(case: Case, budget: int | str, expected: list[Tensor]) -> Row:
    """One budget: bytes, or "min", which asks for what the report then predicts."""
    torch.compiler.reset()
    gc.collect()
    started = time.perf_counter()
    told: list[str] = []

    def prepare(model: Any) -> Any:
        return _planned(case, model, budget)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            training = _trained(case, prepare)
        except autoremat.InfeasibleBudget as error:
            return {"status": "refused", "smallest_peak_nbytes": error.smallest_peak_nbytes}
        told = [str(w.message)[:200] for w in caught if "autoremat" in type(w.message).__module__]
    first_seconds = time.perf_counter() - started
    found = training.gradients()
    scale = max(float(g.abs().max()) for g in expected)
    pairs = zip(found, expected, strict=True)
    error = max(float((a - b).abs().max()) for a, b in pairs if a.numel()) / scale
    predicted = _predicted(training.model)
    return {
        "status": "ok",
        "budget_nbytes": predicted["predicted_nbytes"] if budget == "min" else budget,
        "measured_nbytes": _worst(training.peak_nbytes()),
        **predicted,
        "gradient_error": _worst(error),
        "first_steps_seconds": _worst(first_seconds),
        "told": told,
        "training": training,
    }


def _planned(case: Case, model: Any, budget: int | str) -> Any:
    way = WAYS[case.way]
    common = {"budget": budget, "compiler": case.compiler, "time_limit": case.time_limit_s}
    common["repeatable"] = way.repeatable
    if not way.is_by_block:
        return autoremat.optimize(model, **common, verbose=False)
    options = {**common, "verbose": False}
    for block in model.blocks:
        block.compile(backend="autoremat", options=options)
    return model


def _predicted(model: nn.Module) -> Row:
    """The highest prediction of any rank, and whether all have one plan."""
    report = autoremat.report(model)
    plan = [(g.name, [(v.name, v.recomputes) for v in g.values]) for g in report.graphs]
    return {
        "predicted_nbytes": _worst(report.predicted_peak_nbytes),
        "has_one_plan": all(plan == other for other in _of_all(plan)),
    }


def _beside_torch(case: Case, expected: list[Tensor]) -> Row:
    """At the peak of blocks that torch compiles under its own budget, and timed beside them."""

    def prepare(model: Any) -> Any:
        for block in model.blocks:
            block.compile(backend=_BY_TORCH[case.compiler])
        return model

    with _torch.activation_memory_budget(TORCH_SHARE):
        try:
            peer = _trained(case, prepare)
        except _torch.BackendCompilerFailed as error:  # on all ranks: DTensor's meshes have no size
            return {"status": "no peer", "why": str(error.inner_exception).splitlines()[0][:80]}
    peak_nbytes = _worst(peer.peak_nbytes())
    row = _row(case, peak_nbytes, expected)
    with _torch.activation_memory_budget(TORCH_SHARE):
        for _ in range(SETTLED):  # compiled anew: Dynamo has forgotten it
            peer.timed_step()
    return {"torch_peak_nbytes": peak_nbytes, **_timed(row, peer, case.rounds)}


def _timed(row: Row, peer: Training, rounds: int) -> Row:
    """A row with a step's time beside another training's, one step of each in turn.

    Who begins alternates: what a step leaves behind is paid for by the next one.
    """
    if row["status"] != "ok":
        return row
    ours = row.pop("training")
    pairs = []
    for number in range(rounds):
        first, second = (ours, peer) if number % 2 else (peer, ours)
        times = first.timed_step(), second.timed_step()
        pairs.append(times if number % 2 else times[::-1])
    return {
        **row,
        "step_seconds": _worst(statistics.median(a for a, _ in pairs)),
        "time_ratio": _worst(statistics.median(a / b for a, b in pairs)),
    }


def _of_all(value: Any) -> list[Any]:
    """A value of each rank."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def _worst(value: Any) -> Any:
    """The highest of all ranks."""
    return max(_of_all(value))
