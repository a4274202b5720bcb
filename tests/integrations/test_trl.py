"""TRL's trainers under a budget: supervised fine-tuning, and preferences beside a reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoremat
from tests.integrations.metered import Meter, between, metered, weights
from tests.integrations.tiny_llama import VOCABULARY, llama
from tests.training import make_seeded

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

ROWS, LENGTH, SAMPLES = 4, 32, 18  # the last batch is half a one

# TRL asks transformers 5 by names that it had before.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's loss takes 4,096 tokens by 32,768 numbers; so small a model would be nothing beside."""
    pytest.importorskip("trl.kernels.chunked_logprob")  # as TRL 1.16 has it
    for name in (
        "kernels.chunked_logprob.TOKEN_CHUNK_SIZE",
        "trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE",
    ):
        monkeypatch.setattr(f"trl.{name}", LENGTH)


def tokenizer() -> Any:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {w: n for n, w in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 4))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def rows(parts: dict[str, tuple[int, int]]) -> Any:
    """Samples of random words, of each part as many as between two numbers."""
    drawn = random.Random(0)

    def words(least: int, most: int) -> str:
        count = drawn.randint(least, most)
        return " ".join(f"w{drawn.randrange(VOCABULARY - 4)}" for _ in range(count))

    samples = [{name: words(*sizes) for name, sizes in parts.items()} for _ in range(SAMPLES)]
    return datasets.Dataset.from_list(samples)


def arguments(folder: Path) -> dict[str, Any]:
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    much = {"per_device_train_batch_size": ROWS, "num_train_epochs": 2, "max_length": LENGTH}
    own = {"bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    return {"output_dir": str(folder), "use_cpu": True, **quiet, **much, **own}


def fine_tuned(model: nn.Module, folder: Path) -> Meter:
    """A run of `SFTTrainer`."""
    meter = Meter()
    metered(trl.SFTTrainer, meter)(
        model=model,
        args=trl.SFTConfig(**arguments(folder)),
        train_dataset=rows({"text": (20, LENGTH)}),
        processing_class=tokenizer(),
    ).train()
    return meter


def preferring(model: nn.Module, reference: nn.Module, folder: Path) -> Meter:
    """A run of `DPOTrainer`."""
    meter = Meter([reference])
    metered(trl.DPOTrainer, meter)(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(**arguments(folder)),
        train_dataset=rows({"prompt": (8, 8), "chosen": (12, 20), "rejected": (12, 20)}),
        processing_class=tokenizer(),
    ).train()
    return meter


def holds(peaks: list[int], budget: int, model: nn.Module, plain: nn.Module) -> None:
    """The budget, the plan and the weights."""
    assert len(peaks) == 2 * 5 - 1
    assert max(peaks) <= budget
    assert not autoremat.report(model).fallbacks
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_sft_keeps_the_budget(tmp_path: Path) -> None:
    """From the second step on, with batches of several lengths, whose loss is outside the model."""
    plain, model = make_seeded(llama), make_seeded(llama)
    budget = between(fine_tuned(plain, tmp_path), plain)
    torch._dynamo.reset()
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=4.0)
    holds(fine_tuned(model, tmp_path).peaks, budget, model, plain)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
def test_dpo_keeps_the_budget(tmp_path: Path) -> None:
    """The reference included, which runs in the same step."""
    frozen = make_seeded(llama).requires_grad_(False)
    plain, model = make_seeded(llama), make_seeded(llama)
    budget = between(preferring(plain, frozen, tmp_path), plain)
    torch._dynamo.reset()
    autoremat.optimize([model, frozen], budget, compiler="eager", verbose=False, time_limit=4.0)
    holds(preferring(model, frozen, tmp_path).peaks, budget, model, plain)
