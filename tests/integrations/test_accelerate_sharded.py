"""Accelerate shards a model by FSDP2 in two processes, and the budget holds on each of them.

Accelerate prepares FSDP2 on accelerators only. Here its state is told to on a CPU, by the two
attributes that `Accelerator(fsdp_plugin=...)` sets on the others.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import autoremat
from autoremat.memory.meter import measuring_peak, resident_nbytes
from tests.process_group import on_ranks

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")

ROWS, LENGTH, VOCABULARY, STEPS = 8, 64, 256, 4
CPU = torch.device("cpu")
SHARE = 0.7  # of what the run as it is takes
QUICK = {"compiler": "eager", "verbose": False, "time_limit": 4.0}
SECONDS = 240  # until processes that wait for each other are ended


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, use_cache=False)
    )
    model.loss_type = "ForCausalLM"
    return model


class Loop:
    """A training script of one rank."""

    def __init__(self, rank: int) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        size = distributed.get_world_size()
        as_launched = {"RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
        as_launched |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in as_launched.items()})
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        self.model = llama()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1 + rank)
        self.ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)

    def prepare(self) -> None:
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def optimize(self, budget: int) -> None:
        autoremat.optimize(self.model, budget, optimizer=self.optimizer, **QUICK)

    def attach(self, budget: int) -> None:
        from autoremat.integrations.accelerate import attach

        attach(self.accelerator, self.model, self.optimizer, budget, **QUICK)

    def step(self) -> None:
        self.accelerator.backward(self.model(input_ids=self.ids, labels=self.ids).loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peaks(self) -> list[int]:
        """Of the steps from the second on, with what is there as each begins."""
        # Dynamo looks at what FSDP2 has made of a block's input, which is no leaf any more.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
            self.step()
        found = []
        for _ in range(STEPS - 1):
            held = resident_nbytes(self.model, self.ids, self.optimizer.optimizer)
            with measuring_peak(CPU, until_compile=True) as peak:
                self.step()
            found += [held + above for above in peak]
        return found

    def weights(self) -> Tensor:
        whole = [parameter.full_tensor().detach() for parameter in self.model.parameters()]
        return torch.cat([one.flatten() for one in whole])


def trained(how: str, is_prepared: bool, rank: int) -> tuple[list[int], int, str, float]:
    """Peaks, the budget of all ranks, the report, and how far weights are from the plain run's."""
    plain = Loop(rank)
    plain.prepare()
    unplanned = torch.tensor(min(plain.peaks()))
    distributed.all_reduce(unplanned, distributed.ReduceOp.MIN)
    budget = int(SHARE * int(unplanned))
    loop = Loop(rank)
    if is_prepared:
        loop.prepare()
    getattr(loop, how)(budget)
    if not is_prepared:
        loop.prepare()
    peaks, report = loop.peaks(), autoremat.report(loop.model).to_json()
    return peaks, budget, report, float((loop.weights() - plain.weights()).abs().max())


@pytest.mark.thorough
def test_a_model_that_accelerate_shards_keeps_the_budget_on_each_rank(tmp_path: Path) -> None:
    """Optimised before `prepare`, or attached to after it; weights are the unplanned run's."""
    runs = {
        "optimize before": functools.partial(trained, "optimize", False),
        "attach after": functools.partial(trained, "attach", True),
    }
    for name, ranks in on_ranks(runs, tmp_path, limit_s=SECONDS).items():
        assert not any(isinstance(of_rank, Exception) for of_rank in ranks), (name, ranks)
        for peaks, budget, text, difference in ranks:
            report = autoremat.Report.from_json(text)
            assert len(peaks) == STEPS - 1
            assert 0.8 * budget < max(peaks) <= report.budget_nbytes == budget
            assert not report.fallbacks
            assert report.optimizer == "AdamW"
            assert difference < 1e-5
