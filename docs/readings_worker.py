"""One model at one share of its peak: every reading of generated code, beside what was modelled.

Enters: a model's name and a share. Leaves: a row. Nothing is compiled to kernels, nothing is run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from own_process import forget_plans
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from autoremat.planning.read import Reader

sys.path.append(str(Path(__file__).parent.parent))

from tests.models import CASES

Row = dict[str, Any]
Made = tuple[nn.Module, tuple[Tensor, ...]]
VOCABULARY, BATCH, LENGTH = 8192, 4, 256
UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Point:
    """A budget for a model.

    Attributes:
        model: a key of `MODELS`.
        percent: of the unplanned peak above what is resident; 0 for the leanest plan.
        time_limit: of the search, in seconds.
    """

    model: str
    percent: int
    time_limit: float

    @property
    def key(self) -> str:
        """Of its row."""
        return f"{self.model} {self.percent} %" if self.percent else f"{self.model} min"


class Loss(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss."""
        return self.loss_of(self.model, *inputs)


def _case(name: str) -> Made:
    case = CASES[name]()
    return Loss(case.model, lambda m, *x: case.loss_of(case.forward(m, x))), case.inputs


def _language_model(architecture: str, config: str, **settings: Any) -> Made:
    import transformers

    made = getattr(transformers, config)(
        vocab_size=VOCABULARY, use_cache=False, bos_token_id=0, eos_token_id=0, **settings
    )
    model = getattr(transformers, architecture)(made)
    model.loss_type = "ForCausalLM"  # said beforehand: a warning about it would break the graph
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return Loss(model, lambda m, x: m(input_ids=x, labels=x).loss), (ids,)


def _vision_transformer() -> Made:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=112,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config)
    given = torch.randn(8, 3, 112, 112), torch.randint(2, (8,))
    return Loss(model, lambda m, x, y: m(pixel_values=x, labels=y).loss), given


def _llama() -> Made:
    return _language_model(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )


def _gpt2() -> Made:
    return _language_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        n_positions=LENGTH,
        n_embd=256,
        n_layer=12,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def _t5() -> Made:
    return _language_model(
        "T5ForConditionalGeneration",
        "T5Config",
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=6,
        num_decoder_layers=6,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


MODELS: dict[str, Callable[[], Made]] = {
    "Llama, vocabulary 8,192": _llama,
    "GPT-2, vocabulary 8,192": _gpt2,
    "T5, vocabulary 8,192": _t5,
    "ViT": _vision_transformer,
    "ResNet-50": lambda: _case("resnet50"),
    "UNet": lambda: _case("unet"),
    "BERT": lambda: _case("bert"),
}


def row_of(point: Point) -> Row:
    """The budget, the plan that is taken, and what every plan on the way was read to take."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = MODELS[point.model]()
    model.train()
    resident = resident_nbytes(model, inputs)
    forget_plans()
    whole = autoremat.plan(model, *inputs, budget=UNBOUNDED, verbose=False)
    unplanned = whole.predicted_peak_nbytes - resident
    readings: list[Row] = []
    known = Reader._choice

    def choice(self: Any, modules: Any, solution: Any, peaks: Any) -> Any:
        found = known(self, modules, solution, peaks)
        if found.torchs is None and not solution.method.startswith("torch"):
            modelled = solution.timeline.peak_nbytes - resident
            readings.append(
                {"method": solution.method, "modelled": modelled, "read": peaks.nbytes - resident}
            )
        return found

    budget: int | str = resident + unplanned * point.percent // 100 if point.percent else "min"
    started = time.process_time()
    row: Row = {"resident_nbytes": resident, "unplanned": unplanned, "readings": readings}
    with mock.patch.object(Reader, "_choice", choice):
        try:
            found = autoremat.plan(
                model, *inputs, budget=budget, verbose=False, time_limit=point.time_limit
            )
        except autoremat.InfeasibleBudget as error:
            row["refused_at"] = error.smallest_peak_nbytes - resident
        else:
            row["peak"] = found.predicted_peak_nbytes - resident
            row["time"] = found.predicted_time_us / found.graphs[0].baseline_time_us
    return {**row, "status": "ok", "processor_seconds": time.process_time() - started}
