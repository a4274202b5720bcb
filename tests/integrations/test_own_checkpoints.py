"""Models of transformers with their own gradient checkpointing on, by plain `optimize`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import resident_nbytes
from tests.integrations.tiny_llama import VOCABULARY, llama
from tests.training import close, make_seeded, measured, optimized, step

transformers = pytest.importorskip("transformers")

pytestmark = [
    # Dynamo looks at `.grad` of what a graph after a break is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.shares_plans,
]

ROWS, LENGTH = 8, 32
SHARE = 0.75  # of what a step holds without a plan beside what is resident


def gpt2() -> nn.Module:
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY}
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **none, **ids, use_cache=False)
    )


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """By whichever name this release of transformers has for it."""
    name = "gradient_checkpointing"
    if hasattr(model, "activation_checkpointing_enable"):
        name = "activation_checkpointing"
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": use_reentrant}})


def loss_of(output: Any) -> Tensor:
    return output.loss


def batch(model: nn.Module) -> list[Any]:
    """Random ids, which are their own labels, where the model's forward takes them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    names = list(inspect.signature(model.forward).parameters)
    taken = names[: names.index("labels") + 1]
    return [ids if name in ("input_ids", "labels") else None for name in taken]


@pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("make", [pytest.param(llama, marks=pytest.mark.thorough), gpt2])
def test_checkpoints_of_the_model_are_kept_and_told_of(make: Any, use_reentrant: bool) -> None:
    """Peak within the budget, gradients of the plain model. Dynamo has both kinds in one graph."""
    plain = make_seeded(make)
    inputs = batch(plain)
    expected = step(plain, inputs, loss_of)
    held = resident_nbytes(plain, inputs)
    budget = held + int(SHARE * (measured(plain, inputs, loss_of) - held))

    def checkpointed() -> nn.Module:
        model = make()
        enable_checkpointing(model, use_reentrant=use_reentrant)
        return model

    model = optimized(checkpointed, budget, strict=False)
    for _ in range(2):
        close(step(model, inputs, loss_of), expected, 1e-5)
    assert measured(model, inputs, loss_of) <= budget
    report = autoremat.report(model)
    assert report.is_within_budget
    assert "gradient_checkpointing_enable()" in report.own_checkpoints[0]
