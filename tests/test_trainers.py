"""Trainers that people use keep the budget by one line before they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from tests.training import make_seeded

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS, LENGTH, VOCABULARY = 8, 32, 64


def llama() -> nn.Module:
    """Four layers, and the loss in the model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**sizes, **heads, **ids, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, Tensor]]:
    """Random ids, which are their own labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(model: nn.Module, folder: Path, **arguments: Any) -> list[int]:
    """The measured peaks of a trainer's steps but for those that may compile."""
    seen: set[tuple[int, bool]] = set()
    peaks: list[int] = []

    class Metered(transformers.Trainer):
        def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
            has_gradients = any(p.grad is not None for p in model.parameters())
            kind = (len(inputs["input_ids"]), has_gradients)
            is_new, results = kind not in seen or self.state.global_step < 2, []
            seen.add(kind)

            def take() -> None:
                results.append(super(Metered, self).training_step(model, inputs, *rest))

            if is_new:
                take()
            else:
                held = resident_nbytes(model, inputs, self.optimizer)
                peaks.append(held + measure_peak(take, device="cpu"))
            return results[0]

    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    much = {"per_device_train_batch_size": ROWS, "num_train_epochs": 2, "use_cpu": True}
    given = transformers.TrainingArguments(
        output_dir=str(folder), dataloader_pin_memory=False, **quiet, **much, **arguments
    )
    Metered(model=model, args=given, train_dataset=texts(5 * ROWS + ROWS // 2)).train()
    return peaks


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {},
        {"bf16": True},
        {"label_smoothing_factor": 0.1},
    ],
)
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
@pytest.mark.thorough
def test_a_trainer_of_transformers_keeps_the_budget(tmp_path: Path, arguments: dict[str, Any]):
    """From the second optimizer step on, the optimizer's state included, which nobody passed."""
    plain, model = make_seeded(llama), make_seeded(llama)
    unplanned = max(trained(plain, tmp_path, **arguments))
    floor = 4 * sum(p.nbytes for p in model.parameters())
    budget = int(floor + 0.5 * (unplanned - floor))
    torch._dynamo.reset()
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=4.0)
    assert max(trained(model, tmp_path, **arguments)) <= budget
    assert not autoremat.report(model).fallbacks
    tolerance = 1e-2 if "bf16" in arguments else 1e-5
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance)
