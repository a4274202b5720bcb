"""What a report and a refusal advise a user to change about the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.explain import advice

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
        if self.returns == "transposed":
            return (loss + logits.t().exp().sum(),)
        if self.returns == "logits":
            return loss, logits
        if self.returns == "detached":
            return loss, logits.detach()
        return (loss, self.embed(ids)) if self.returns == "little" else (loss,)


def planned(
    budget: int | str = 1 << 30, *, compiler: str = "eager", **options: object
) -> autoremat.Report:
    """Without a step being run."""
    torch.manual_seed(0)
    model = Language(**options)  # type: ignore[arg-type]
    ids = torch.randint(WORDS, (TOKENS,))
    return autoremat.plan(model, ids, budget=budget, compiler=compiler, verbose=False)


@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_returned_logits_are_told_of_with_bytes_line_and_remedy(compiler: str) -> None:
    """The backward is given a gradient of them."""
    (text,) = planned(returns="logits", compiler=compiler).advice
    assert "test_advice.py:" in text
    assert "131.1 kB" in text
    assert LOGITS_NBYTES == 131_072
    assert "return it alone" in text


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


class Block(nn.Module):
    """A layer that casts, with a result beside its hidden states."""

    def __init__(self, *, beside: str) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.beside = beside

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.up(self.norm(x))
        hidden = hidden.float().exp()
        if self.beside == "buffer":
            self.seen.add_(1.0)
        return hidden, hidden.detach().mean()


@pytest.mark.parametrize("beside", ["metric", "buffer"])
def test_a_block_is_told_nothing_of_a_loss(beside: str) -> None:
    """One number that nobody differentiates is none, nor are hidden states in two precisions."""
    x = torch.ones(TOKENS, WIDTH)
    budget = 1 << 30
    options = {"compiler": "eager", "verbose": False}
    assert autoremat.plan(Block(beside=beside), x, budget=budget, **options).advice == ()


def test_advice_adds_no_guard() -> None:
    """A dimension that happens to be as long as another stays free."""
    model = autoremat.optimize(Language("transposed"), 1 << 30, compiler="eager", verbose=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tokens in (WORDS, WORDS + 8, TOKENS, 3 * TOKENS):
        ids = torch.randint(WORDS, (tokens,))
        torch._dynamo.mark_dynamic(ids, 0)
        model(ids)[0].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_no_plan_is_lost_to_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in it."""
    monkeypatch.setattr(advice, "_kind", lambda node: 1 / 0)
    report = planned(returns="logits")
    assert report.advice == ()
    assert not report.fallbacks


def test_text_page_and_refusal_say_it() -> None:
    """What a user reads when memory is short."""
    report = planned(returns="logits")
    (text,) = report.advice
    assert text in " ".join(report.summary().split())
    assert "What would lower this peak" in report.to_html()
    assert "What would lower this peak" not in planned().to_html()
    with pytest.raises(autoremat.InfeasibleBudget, match="return it alone"):
        planned(autoremat.resident_nbytes(Language()) + 200_000, returns="logits")
