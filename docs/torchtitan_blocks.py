"""The blocks of torchtitan's main trainer under a budget: its own functions, on CPUs with gloo.

Enters: torchtitan's Llama debug model as its graph trainer builds it (with `sdpa` attention, which
the main trainer's builder refuses), its `apply_compile` and `apply_fsdp_to_decoder`, called as its
`parallelize_llama` does. Leaves: a row for each variant, of the rank where it is worst; each has a
group of processes of its own.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from own_process import forget_plans
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.experiments.graph_trainer.llama3 import model_registry

import autoremat
from autoremat.ask.options import BUDGET_VARIABLE

BATCH, LENGTH, VOCABULARY = 4, 256, 2048
SHARES = (80, 65)
WORLD = 2
SETTLED = 5  # steps before one is measured
Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """How the blocks run.

    Attributes:
        name: in the table.
        backend: of `--compile.backend`.
        is_checkpointed: whether each block is, by torchtitan's `FullAC`.
        budget_nbytes: of the whole step, for our backend.
    """

    name: str
    backend: str = "inductor"
    is_checkpointed: bool = False
    budget_nbytes: int | None = None


def rows() -> list[Row]:
    """The step as it is, with checkpoints, and under budgets in shares of the first one's peak."""
    whole = _measured(Variant("nothing recomputed"))
    checked = _measured(Variant("`FullAC`", is_checkpointed=True))
    budgets = {f"autoremat, {share} %": share * whole["peak"] // 100 for share in SHARES}
    budgets["autoremat, at the peak of `FullAC`"] = checked["peak"]
    planned = [_measured(Variant(n, "autoremat", budget_nbytes=b)) for n, b in budgets.items()]
    found, expected = [whole, checked, *planned], whole["gradients"]
    scale = max(float(g.abs().max()) for g in expected)
    for row in found:
        pairs = zip(row.pop("gradients"), expected, strict=True)
        row["error"] = max(float((a - b).abs().max()) for a, b in pairs if a.numel()) / scale
    return found


def _measured(variant: Variant) -> Row:
    """The row of a group of processes."""
    if variant.budget_nbytes is not None:
        os.environ[BUDGET_VARIABLE] = str(variant.budget_nbytes)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_serve, (variant, folder), nprocs=WORLD)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]
    worst = max(found, key=lambda row: int(row["peak"]))
    return {"name": variant.name, "budget": variant.budget_nbytes, **worst}


def _serve(rank: int, variant: Variant, folder: str) -> None:
    torch.set_num_threads(1)
    forget_plans()
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    try:
        torch.save(_row(variant, rank, folder), Path(folder) / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def _row(variant: Variant, rank: int, folder: str) -> Row:
    model = _parallelized(variant, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)

    def take() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).backward()
        optimizer.step()

    for _ in range(SETTLED):
        optimizer.zero_grad(set_to_none=True)
        take()
    gradients = [_own(p.grad) for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad(set_to_none=True)
    held_nbytes = autoremat.resident_nbytes(model, (tokens, labels), optimizer)
    peak_nbytes = held_nbytes + autoremat.measure_peak(take, device="cpu")
    row: Row = {"peak": peak_nbytes, "gradients": gradients}
    if variant.budget_nbytes is not None:
        report = autoremat.report(next(iter(model.layers.values())))
        row["predicted"] = report.predicted_peak_nbytes
    return row


def _parallelized(variant: Variant, folder: str) -> nn.Module:
    """The model, as torchtitan's `parallelize_llama` makes it without tensor parallelism."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = model_registry("debugmodel", attn_backend="sdpa").model.build()
    if variant.is_checkpointed:
        FullAC.Config().build(dump_folder=folder).apply(model)
    config = CompileConfig(enable=True, backend=variant.backend)
    apply_compile(model, compile_config=config, parallel_dims=SimpleNamespace(tp_enabled=False))
    mesh = distributed.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    precision = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    apply_fsdp_to_decoder(model, mesh, **precision, pp_enabled=False)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):  # gloo cannot scale what it reduces, as torchtitan asks
            unit.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states(buffer_device=None)
    trained: nn.Module = model.train()
    return trained


def _own(gradient: Tensor) -> Tensor:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach().clone()


if __name__ == "__main__":
    for found in rows():
        print(found)
