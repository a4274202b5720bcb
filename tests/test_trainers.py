"""Trainers that people use keep the budget by one line before they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from tests.integrations.metered import Meter, between, metered
from tests.integrations.tiny_llama import VOCABULARY, llama
from tests.training import make_seeded

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS, LENGTH = 8, 32


def texts(count: int, *, varies: bool = False) -> list[dict[str, Tensor]]:
    """Random ids, which are their own labels; of several lengths, or of one."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator).tolist()
    sizes = lengths if varies else [LENGTH] * count
    ids = [torch.randint(3, VOCABULARY, (size,), generator=generator) for size in sizes]
    return [{"input_ids": row, "labels": row} for row in ids]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest text."""
    rows = [sample["input_ids"] for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def trained(model: nn.Module, folder: Path, *, varies: bool, **arguments: Any) -> Meter:
    """The measured steps of a trainer's run, from its second one on."""
    meter = Meter()
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    much = {"per_device_train_batch_size": ROWS, "num_train_epochs": 2, "use_cpu": True}
    given = transformers.TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, **quiet, **much, **arguments
    )
    metered(transformers.Trainer, meter)(
        model=model,
        args=given,
        train_dataset=texts(5 * ROWS + ROWS // 2, varies=varies),
        eval_dataset=texts(ROWS + 1) if "eval_strategy" in arguments else None,
        data_collator=padded if varies else None,
    ).train()
    return meter


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"varies": True},
    ],
)
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
@pytest.mark.thorough
def test_a_trainer_of_transformers_keeps_the_budget(tmp_path: Path, arguments: dict[str, Any]):
    """From the second optimizer step on, the optimizer's state included, which nobody passed.

    With a smaller last batch, evaluation in between, and texts of several lengths, which are
    padded to the longest of their batch.
    """
    arguments = {"varies": False} | arguments
    plain, model = make_seeded(llama), make_seeded(llama)
    budget = between(trained(plain, tmp_path, **arguments), plain)
    torch._dynamo.reset()
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=4.0)
    peaks = trained(model, tmp_path, **arguments).peaks
    assert len(peaks) >= 5
    assert max(peaks) <= budget
    assert not autoremat.report(model).fallbacks
    tolerance = 1e-2 if "bf16" in arguments else 1e-5
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance)
