"""LoRA by PEFT under a budget, with what its users call beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from tests.integrations.metered import Meter, between, weights
from tests.integrations.test_own_checkpoints import enable_checkpointing
from tests.integrations.tiny_llama import VOCABULARY, llama

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# PEFT asks transformers 5 by names that it had before.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated")

ROWS, LENGTH, STEPS = 8, 32, 4


def lora() -> nn.Module:
    """A Llama of which a few small products are trained."""
    torch.manual_seed(0)
    own = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), own).train()


def trained(model: nn.Module) -> Meter:
    """A loop of one's own with AdamW."""
    meter = Meter()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        take = partial(_forward_and_backward, model, ids)
        meter.step(take, model, ids, optimizer) if number else take()
        optimizer.step()
        optimizer.zero_grad()
    return meter


def _forward_and_backward(model: nn.Module, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def checkpointed(model: Any, *, use_reentrant: bool) -> None:
    """As PEFT's users do: the older kind of checkpoint needs an input that requires gradients."""
    model.enable_input_require_grads()
    enable_checkpointing(model, use_reentrant=use_reentrant)


@dataclass(frozen=True)
class Prepared:
    """What users call before they train, and the share of the room that the budget leaves."""

    call: Callable[[Any], object]
    share: float = 0.5


PREPARED = {
    "as it is": Prepared(lambda model: None),
    "inputs that require gradients": Prepared(lambda model: model.enable_input_require_grads()),
    "checkpoints": Prepared(partial(checkpointed, use_reentrant=False), 0.9),
    "older checkpoints": Prepared(partial(checkpointed, use_reentrant=True), 0.9),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("prepared", list(PREPARED))
def test_lora_keeps_the_budget(prepared: str) -> None:
    """From the second step on, and what is trained is that of the run without a plan."""
    plain, model = lora(), lora()
    PREPARED[prepared].call(plain)
    PREPARED[prepared].call(model)
    budget = between(trained(plain), plain, PREPARED[prepared].share)
    torch._dynamo.reset()
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=4.0)
    peaks = trained(model).peaks
    assert len(peaks) == STEPS - 1
    assert max(peaks) <= budget
    assert not autoremat.report(model).fallbacks
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-5)
