"""What reports and refusals advise: each figure beside a step that was really changed so."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.explain import advice
from autoremat.reporting import Remedy, Report
from autoremat.reporting.remedies import MOST, ranked

TOKENS, WIDTH, WORDS = 256, 16, 512
LOGITS_NBYTES = TOKENS * WORDS * 4


class Language(nn.Module):
    """A head whose logits are most of the step."""

    def __init__(self, returns: str = "loss", *, half: bool = False, chunks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.returns, self.half, self.chunks = returns, half, chunks

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        if self.chunks > 1:
            return (self.by_chunks(self.embed(ids), ids),)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.float(), ids)
        if self.returns == "transposed":
            return (loss + logits.t().exp().sum(),)
        if self.returns == "logits":
            return loss, logits
        if self.returns == "detached":
            return loss, logits.detach()
        return (loss, self.embed(ids[:8])) if self.returns == "little" else (loss,)

    def by_chunks(self, hidden: Tensor, ids: Tensor) -> Tensor:
        def loss_of(rows: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.head(rows), targets, reduction="sum")

        parts = zip(hidden.chunk(self.chunks), ids.chunk(self.chunks), strict=True)
        losses = [checkpoint(loss_of, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / ids.numel()


def ids_of(tokens: int = TOKENS) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(WORDS, (tokens,))


def planned(
    budget: int | str = 1 << 30,
    *,
    compiler: str = "eager",
    policy: str = "optimal",
    **options: object,
) -> Report:
    """Without a step being run."""
    model = Language(**options)  # type: ignore[arg-type]
    return autoremat.plan(
        model, ids_of(), budget=budget, compiler=compiler, policy=policy, verbose=False
    )


def named(found: Iterable[Remedy], name: str) -> Remedy:
    (remedy,) = (one for one in found if one.name == name)
    return remedy


def names(found: Iterable[Remedy]) -> set[str]:
    return {one.name for one in found}


@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_returned_logits_are_told_of_with_bytes_line_and_peak(compiler: str) -> None:
    """The caller holds them, and the backward is given a gradient of them."""
    report = planned(returns="logits", compiler=compiler)
    remedy = named(report.advice, "return only the loss")
    assert "test_advice.py:" in remedy.sentence
    assert "524.3 kB" in remedy.sentence
    assert LOGITS_NBYTES == 524_288
    assert "a gradient for it" in remedy.sentence
    assert remedy.peak_nbytes + remedy.saved_nbytes == report.predicted_peak_nbytes


@pytest.mark.parametrize("returns", ["loss", "little"])
def test_what_takes_little_is_not_told_of(returns: str) -> None:
    """A change is not worth it."""
    assert "return only the loss" not in names(planned(returns=returns).advice)


def test_a_number_that_trains_little_is_no_loss() -> None:
    """Features and a temperature: the loss is made of them elsewhere."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x).sin(), self.scale.exp()

    given = {"compiler": "eager", "verbose": False}
    report = autoremat.plan(Features(), torch.randn(512, 64), budget="1GB", **given)
    assert "return only the loss" not in names(report.advice)


@pytest.mark.parametrize("returns", ["logits", "detached"])
@pytest.mark.parametrize("policy", ["save-all", "recompute-all"])
def test_returning_only_the_loss_has_the_peak_that_is_told(returns: str, policy: str) -> None:
    """The changed model under the same strategy; what is detached is held all the same."""
    remedy = named(planned(returns=returns, policy=policy).advice, "return only the loss")
    changed = planned(returns="loss", policy=policy)
    assert remedy.peak_nbytes == pytest.approx(changed.predicted_peak_nbytes, rel=0.01)


@pytest.mark.inductor
def test_the_peak_of_generated_code_falls_as_told() -> None:
    """Where code is fused it may take less than is simulated: never more."""
    remedies, changed = [], []
    for policy in ("save-all", "optimal"):
        ask = {"compiler": "inductor", "policy": policy}
        report = planned(returns="logits", **ask)
        remedies.append(named(report.advice, "return only the loss").peak_nbytes)
        changed.append(planned(returns="loss", **ask).predicted_peak_nbytes)
    assert remedies[0] == pytest.approx(changed[0], rel=0.03)
    assert changed[1] <= remedies[1]


@pytest.mark.parametrize(
    ("returns", "compiler", "chunks"),
    [
        ("loss", "eager", 8),
        ("logits", "eager", 4),
        pytest.param("logits", "inductor", 2, marks=pytest.mark.inductor),
        *(
            pytest.param("loss", "inductor", n, marks=[pytest.mark.inductor, pytest.mark.thorough])
            for n in (4, 8)
        ),
    ],
)
def test_a_loss_by_chunks_takes_what_is_told(
    monkeypatch: pytest.MonkeyPatch, returns: str, compiler: str, chunks: int
) -> None:
    """The model that computes its head and its loss for some of the tokens at a time."""
    monkeypatch.setattr(advice, "_CHUNKS", (chunks,))
    report = planned(returns=returns, policy="save-all", compiler=compiler)
    remedy = named(report.advice, "chunk the loss")
    changed = planned(chunks=chunks, policy="save-all", compiler=compiler)
    assert remedy.peak_nbytes == pytest.approx(changed.predicted_peak_nbytes, rel=0.03)
    assert ("return only the loss" in remedy.sentence) == (returns == "logits")


def test_a_step_that_is_measured_takes_what_is_told() -> None:
    """The model with its loss by chunks, under a plan."""
    remedy = named(planned(returns="logits").advice, "chunk the loss")
    (chunks,) = map(int, re.findall(r"in (\d) chunks", remedy.sentence))
    model, ids = Language(chunks=chunks), ids_of()
    budget = int(1.01 * remedy.peak_nbytes)
    autoremat.optimize(model, budget, compiler="eager", verbose=False)
    assert autoremat.verify(model, ids).measured_peak_nbytes <= 1.01 * remedy.peak_nbytes


def test_rows_that_depend_on_each_other_are_not_chunked() -> None:
    """A loss of the transposed logits."""
    assert "chunk the loss" not in names(planned(returns="transposed").advice)


def test_gradients_that_exist_already_are_told_of() -> None:
    """Such as after `zero_grad(set_to_none=False)`: the step is that much lower without them."""
    ids, peaks = ids_of(), []
    for has_gradients in (True, False):
        model = Language()
        if has_gradients:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        autoremat.optimize(model, 1 << 30, compiler="eager", policy="save-all", verbose=False)
        model(ids)[0].backward()
        report = autoremat.report(model)
        if has_gradients:
            remedy = named(report.advice, "gradients to None")
            assert "set_to_none=True" in remedy.sentence
        peaks.append(report.predicted_peak_nbytes)
    assert remedy.peak_nbytes == pytest.approx(peaks[1], rel=0.01)
    assert "gradients to None" not in names(report.advice)


def trained(*, batches: int, begins_with_zeros: bool, budget: int, form: str) -> Report:
    """After three steps, each of which takes so many batches and leaves zeros."""
    model, ids = Language(), ids_of()
    options = {"compiler": "eager", "verbose": False}
    if form == "backend":
        called = torch.compile(model, backend="autoremat", options={"budget": budget, **options})
    else:
        called = autoremat.optimize(model, budget, **options)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if begins_with_zeros:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        for _ in range(batches):
            called(ids)[0].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not begins_with_zeros)
    return autoremat.report(model)


@pytest.mark.parametrize("form", ["optimize", "backend"])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_who_accumulates_is_not_told_to_drop_gradients(batches: int, form: str) -> None:
    """What no optimizer has taken yet is needed; what one has taken is not."""
    report = trained(batches=batches, begins_with_zeros=True, budget=1 << 30, form=form)
    assert report.resident.gradients_nbytes
    assert ("gradients to None" in names(report.advice)) == (batches == 1)


def test_a_plan_for_later_batches_of_a_step_asks_for_no_fewer_gradients() -> None:
    """It is a plan of its own, beside that of the first batch; here it does not fit."""
    budget = int(1.01 * planned().predicted_peak_nbytes)
    with pytest.warns(autoremat.OverBudgetWarning, match="as lean as it can") as told:
        report = trained(batches=2, begins_with_zeros=False, budget=budget, form="optimize")
    assert not any("to None" in str(one.message) for one in told)
    assert report.resident.gradients_nbytes
    assert "gradients to None" not in names(report.advice)


def test_a_run_that_is_described_as_accumulating_is_not_told_to_drop_gradients() -> None:
    """Neither in its report nor where it is refused."""
    setup = autoremat.TrainingSetup(accumulate=2)
    ask = {"compiler": "eager", "verbose": False, "setup": setup}
    report = autoremat.plan(Language("logits"), ids_of(), budget=1 << 30, **ask)
    assert report.resident.gradients_nbytes
    assert "return only the loss" in names(report.advice)
    assert "gradients to None" not in names(report.advice)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        autoremat.plan(Language("logits"), ids_of(), budget=300_000, **ask)
    assert "gradients to None" not in names(caught.value.advice)


class Tower(nn.Module):
    """Layers of which the batch takes most."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("policy", ["save-all", "recompute-all"])
def test_half_of_the_batch_takes_what_is_told(policy: str) -> None:
    """With the gradients of the first half beside it."""
    x = torch.ones(256, 64)
    torch._dynamo.mark_dynamic(x, 0)
    ask = {"budget": 1 << 30, "compiler": "eager", "verbose": False, "policy": policy}
    remedy = named(autoremat.plan(Tower(), x, **ask).advice, "smaller batch")
    assert "of 256 (first dimension) as two of 128" in remedy.sentence
    halved = Tower()
    autoremat.optimize(halved, 1 << 30, compiler="eager", policy=policy, verbose=False)
    for _ in range(2):
        halved(torch.ones(128, 64)).backward()
    autoremat.optimize(halved, 1 << 30, compiler="eager", policy=policy, verbose=False)
    halved(torch.ones(128, 64)).backward()
    report = autoremat.report(halved)
    assert report.resident.gradients_nbytes
    assert remedy.peak_nbytes == pytest.approx(report.predicted_peak_nbytes, rel=0.02)


class AdamIn8Bits(torch.optim.Optimizer):
    """The layout of 8-bit optimizers: a byte for a number, a scale for each block of 256."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            count, state = parameter.numel(), self.state[parameter]
            if not state:
                for moment in ("first", "second"):
                    is_small = count < 4096
                    kind = torch.float32 if is_small else torch.uint8
                    state[moment] = torch.zeros(count, dtype=kind)
                    if not is_small:
                        state[f"{moment}_scale"] = torch.ones(-(-count // 256))
            parameter.add_(parameter.grad, alpha=-1e-3)


def test_an_8_bit_optimizer_takes_what_is_told() -> None:
    """Of the moments of Adam: all but small tensors in a byte each."""
    peaks, ids = [], ids_of(16)
    for kind in (torch.optim.AdamW, AdamIn8Bits):
        model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
        ask = {"budget": 1 << 30, "compiler": "eager", "policy": "save-all", "verbose": False}
        x = torch.ones(len(ids), 256)
        report = autoremat.plan(model, x, optimizer=kind(model.parameters()), **ask)
        peaks.append(report)
    remedy = named(peaks[0].advice, "8-bit optimizer")
    held = peaks[1].predicted_peak_nbytes
    # What either takes for itself as it steps is no part of the remedy.
    passing = peaks[0].predicted_peak_nbytes - peaks[0].resident_nbytes
    passing -= peaks[1].predicted_peak_nbytes - peaks[1].resident_nbytes
    assert remedy.peak_nbytes == pytest.approx(held + passing, rel=0.01)
    assert "8-bit optimizer" not in names(peaks[1].advice)


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
    advised = names(autoremat.plan(Block(beside=beside), x, budget=budget, **options).advice)
    assert advised <= {"smaller batch"}


def test_advice_adds_no_guard() -> None:
    """A dimension that happens to be as long as another stays free."""
    model = autoremat.optimize(Language("transposed"), 1 << 30, compiler="eager", verbose=False)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tokens in (WORDS, WORDS + 8, TOKENS, 3 * TOKENS):
        ids = torch.randint(WORDS, (tokens,))
        torch._dynamo.mark_dynamic(ids, 0)
        model(ids)[0].backward()
        _ = autoremat.report(model).advice
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_no_plan_is_lost_to_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in one leaves the report, and the others."""
    monkeypatch.setattr(advice, "chunked", lambda *_, **__: 1 / 0)
    report = planned(returns="logits")
    assert names(report.advice) == {"return only the loss", "smaller batch"}
    assert not report.fallbacks


def test_a_few_are_named_that_save_most() -> None:
    """What saves less than 2 % is none of them."""
    found = [Remedy(f"{saved}", "Do it.", saved, 1000 - saved) for saved in (10, 50, 40, 30, 20)]
    assert [one.name for one in ranked(found)] == ["50", "40", "30"]
    assert len(ranked(found)) == MOST
    assert ranked(found[:1]) == ()


def test_text_page_json_and_refusal_end_in_it() -> None:
    """What a user reads when memory is short."""
    report = planned(returns="logits")
    text = str(named(report.advice, "return only the loss"))
    assert text in " ".join(report.summary().split())
    assert "What would lower this peak" in report.to_html()
    (graph,) = json.loads(report.to_json())["graphs"]
    assert graph["advice"][0]["peak_nbytes"] == report.advice[0].peak_nbytes
    assert Report.from_json(report.to_json()) == report
    floor = autoremat.resident_nbytes(Language()) + 200_000
    with pytest.raises(autoremat.InfeasibleBudget, match="return only the loss") as caught:
        planned(floor, returns="logits")
    refused = pickle.loads(pickle.dumps(caught.value))
    assert refused.advice == caught.value.advice
    remedy = named(refused.advice, "return only the loss")
    with pytest.raises(autoremat.InfeasibleBudget) as after:
        planned(floor, returns="loss")
    assert after.value.smallest_peak_nbytes <= 1.01 * remedy.peak_nbytes
