"""What a report and a refusal advise a user to change about the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat

TOKENS, WIDTH, WORDS = 64, 16, 512
LOGITS_NBYTES = TOKENS * WORDS * 4


class Language(nn.Module):
    """A head whose logits are most of the step."""

    def __init__(self, returns: str = "loss", *, half: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.returns, self.half = returns, half

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.float(), ids)
        if self.returns == "logits":
            return loss, logits
        if self.returns == "detached":
            return loss, logits.detach()
        return (loss, self.embed(ids)) if self.returns == "little" else (loss,)


def planned(budget: int | str = 1 << 30, **options: object) -> autoremat.Report:
    """Without a step being run."""
    torch.manual_seed(0)
    model = Language(**options)  # type: ignore[arg-type]
    ids = torch.randint(WORDS, (TOKENS,))
    return autoremat.plan(model, ids, budget=budget, compiler="eager", verbose=False)


def test_returned_logits_are_told_of_with_bytes_line_and_remedy() -> None:
    """The backward is given a gradient of them."""
    (text,) = planned(returns="logits").advice
    assert "test_advice.py:" in text
    assert "131.1 kB" in text
    assert LOGITS_NBYTES == 131_072
    assert "return the loss alone" in text


@pytest.mark.parametrize("returns", ["loss", "detached", "little"])
def test_what_takes_little_is_not_told_of(returns: str) -> None:
    """Nor what nobody can differentiate."""
    assert planned(returns=returns).advice == ()


def test_detaching_saves_what_was_told() -> None:
    """The remedy is true."""
    saved = [planned(returns=returns).predicted_peak_nbytes for returns in ("logits", "detached")]
    assert saved[0] - saved[1] >= LOGITS_NBYTES


def test_logits_in_two_precisions_are_told_of() -> None:
    """They are held as they are returned, and the loss is computed on a copy of them."""
    texts = planned(half=True, returns="detached").advice
    assert any("in bfloat16" in text and "in float32" in text for text in texts)
    assert any("test_advice.py:" in text and "65.5 kB" in text for text in texts)
    assert planned(half=True).advice == ()


def test_text_page_and_refusal_say_it() -> None:
    """What a user reads when memory is short."""
    report = planned(returns="logits")
    (text,) = report.advice
    assert text in " ".join(report.summary().split())
    assert "What would lower this peak" in report.to_html()
    assert "What would lower this peak" not in planned().to_html()
    with pytest.raises(autoremat.InfeasibleBudget, match="return the loss alone"):
        planned(autoremat.resident_nbytes(Language()) + 200_000, returns="logits")
