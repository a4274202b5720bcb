"""Every reason to fall back: really triggered, said with a remedy, raised where strict."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoremat
from autoremat.errors import FallbackError, FallbackWarning
from autoremat.fallbacks import REASONS, fallback
from autoremat.graph import devices as device
from autoremat.planning import pipeline
from autoremat.planning.choice import Choice
from autoremat.session import capturing
from autoremat.session.telling import Told
from tests.training import UNBOUNDED, close, make_seeded, optimized, step

WIDTH = 16
PAGE = Path(__file__).parents[2] / "docs" / "fallbacks.md"
PACKAGE = Path(autoremat.__file__).parent


def rows() -> Tensor:
    """A batch of 32 rows of 16 numbers."""
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


class Chain(nn.Module):
    """Three layers of `tanh(linear)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class SharedRegion(Chain):
    """Its layers are one region, compiled once."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer, x)
        return x.square().mean()

    @staticmethod
    @torch.compiler.nested_compile_region
    def block(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x))


class Skipped(Chain):
    """Dynamo is told to leave it alone."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Recurrent(Chain):
    """Ends in a layer that Dynamo does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.recurrent(torch.tanh(self.layers[0](x)))[0])


class Elsewhere(nn.Parameter):
    """A parameter that claims to be on the second GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:1")


def on_two_devices() -> nn.Module:
    model = Chain()
    model.layers[0].bias = Elsewhere(torch.zeros(WIDTH))
    return model


def _defect(*args: Any, **keywords: Any) -> Any:
    raise KeyError("a defect")


def _break_planning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline, "find_storages", _defect)


def _claim_two_devices(patch: pytest.MonkeyPatch) -> None:
    both = {torch.device("cuda", 0), torch.device("cuda", 1)}
    patch.setattr(device, "devices_of", lambda module: both)


def _leave_regions(patch: pytest.MonkeyPatch) -> None:
    """As where a region's results are used in a way that cannot be written out."""
    patch.setattr(capturing, "write_out_regions", lambda module: None)


def _write_another_plan(patch: pytest.MonkeyPatch) -> None:
    """The forward's last `tanh` becomes a `sin` on its way into the two modules."""
    original = autoremat.planning.choice.rewrite

    def sabotaged(*args: Any, **keywords: Any) -> Any:
        rewritten = original(*args, **keywords)
        nodes = rewritten.module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.tanh.default
        )
        nodes[-1].target = torch.ops.aten.sin.default
        return rewritten

    patch.setattr(autoremat.planning.choice, "rewrite", sabotaged)


TRIGGERS: dict[str, tuple[Callable[[], nn.Module], Callable[[pytest.MonkeyPatch], None] | None]] = {
    "AR101": (Chain, _break_planning),
    "AR102": (Chain, _claim_two_devices),
    "AR103": (SharedRegion, _leave_regions),
    "AR105": (Skipped, None),
    "AR106": (Chain, _write_another_plan),
    "AR109": (Recurrent, None),
    "AR201": (lambda: Chain().requires_grad_(False), None),
    "AR202": (on_two_devices, None),
    "AR203": (lambda: Chain().eval(), None),
}


def one_step(make: Callable[[], nn.Module], *, strict: bool) -> tuple[nn.Module, Any]:
    """What the user does: optimize, and train one step if there is something to train."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    autoremat.optimize(model, UNBOUNDED, compiler="eager", verbose=False, strict=strict)
    if not any(p.requires_grad for p in model.parameters()):
        return model, model(rows())
    return model, step(model, (rows(),))


@pytest.mark.parametrize("code", TRIGGERS)
def test_each_reason_is_told_once_and_the_step_runs(code: str, monkeypatch):
    """The warning has the code, a fact and the table's remedy; results are eager mode's."""
    make, sabotage = TRIGGERS[code]
    if sabotage is not None:
        sabotage(monkeypatch)
    with pytest.warns(FallbackWarning) as told:
        model, ours = one_step(make, strict=False)
    warnings = {w.message.code: w.message for w in told if isinstance(w.message, FallbackWarning)}
    assert next(iter(warnings)) == code  # the graph around a region may not be planned either
    assert warnings[code].sentence.endswith(REASONS[code].remedy)
    assert not re.search(r"[{}]", warnings[code].sentence)
    if isinstance(ours, Tensor) or code == "AR202":
        return
    torch.manual_seed(0)
    close(step(make(), (rows(),)), ours, 1e-6)
    if code.startswith("AR1"):
        (told,) = (f for f in autoremat.report(model).fallbacks if f.code == code)
        assert f"{told} {told.remedy}" == str(warnings[code])


@pytest.mark.parametrize("code", TRIGGERS)
def test_each_reason_is_an_error_where_the_user_is_strict(code: str, monkeypatch):
    """With the same code and sentence."""
    make, sabotage = TRIGGERS[code]
    if sabotage is not None:
        sabotage(monkeypatch)
    with pytest.raises(FallbackError) as raised:
        one_step(make, strict=True)
    assert raised.value.code == code
    assert raised.value.sentence.endswith(REASONS[code].remedy)


def test_a_defect_comes_with_its_traceback_where_the_user_is_strict(monkeypatch):
    """AR101 asks for it to be reported; Dynamo would drop a mere cause."""
    make, sabotage = TRIGGERS["AR101"]
    assert sabotage is not None
    sabotage(monkeypatch)
    with pytest.raises(FallbackError) as raised:
        one_step(make, strict=True)
    (note,) = raised.value.__notes__
    assert note.startswith("Traceback (most recent call last)")


def unknown_to_inductor(x: Tensor) -> Tensor:
    """No operator; found by its name, since Inductor pickles what graphs call."""
    return x


def _with_an_unknown_operator(original: Callable[..., Choice], part: str) -> Callable[..., Choice]:
    """A choice one of whose modules calls what Inductor cannot lower."""
    known = torch.ops.aten.tanh.default if part == "forward" else torch.ops.aten.mm.default

    def choose(*args: Any, **keywords: Any) -> Choice:
        choice = original(*args, **keywords)
        graph: fx.Graph = getattr(choice, part).graph
        first = next(n for n in graph.nodes if n.target is known)
        with graph.inserting_after(first):
            call = graph.call_function(unknown_to_inductor, (first,))
        call.meta = dict(first.meta)
        first.replace_all_uses_with(call, delete_user_cb=lambda user: user is not call)
        return choice

    return choose


@pytest.mark.inductor
@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_planned_graph_that_inductor_cannot_compile(strict: bool, part: str, monkeypatch):
    """AR107: torch's own partition is compiled in its place; strictly it is an error.

    A backward is compiled before anything has run, too.
    """
    broken = _with_an_unknown_operator(pipeline.choose_by_reading, part)
    monkeypatch.setattr(pipeline, "choose_by_reading", broken)
    model = optimized(Chain, UNBOUNDED, compiler="inductor", strict=strict)
    if strict:
        with pytest.raises(FallbackError, match=r"AR107.*Inductor could not"):
            step(model, (rows(),))
        return
    with pytest.warns(FallbackWarning, match=r"AR107.*Inductor could not.*compiler=\"eager\""):
        ours = step(model, (rows(),))
    close(step(make_seeded(Chain), (rows(),)), ours, 1e-5)


# --- the table ---------------------------------------------------------------------------------


def test_every_code_has_a_test_that_triggers_it():
    """Those that stand by themselves: under Inductor, of `plan`, hooks, draws, steps, sizes."""
    elsewhere = {"AR107", "AR108", "AR120", *(f"AR11{number}" for number in range(10))}
    assert set(TRIGGERS) | elsewhere == set(REASONS)


def test_every_code_in_the_package_is_in_the_table_and_used():
    """No sentence stands elsewhere: other modules name codes only."""
    used = {
        code
        for path in PACKAGE.rglob("*.py")
        if path.name != "fallbacks.py"
        for code in re.findall(r'"(AR\d{3})"', path.read_text())
    }
    assert used == set(REASONS)


def test_an_unknown_code_and_a_missing_fact_are_defects():
    """They do not become a sentence with holes."""
    with pytest.raises(KeyError, match="AR999"):
        fallback("AR999")
    with pytest.raises(KeyError, match="devices"):
        fallback("AR202")


def test_the_page_is_the_table():
    """docs/fallbacks.md has each code with its meaning and remedy, word by word."""
    text = " ".join(PAGE.read_text().split())
    for reason in REASONS.values():
        fact = " ".join(re.sub(r"\{(\w+)\}", r"*\1*", reason.fact).split())
        assert f"## {reason.code} {fact} **What to do.** {reason.remedy}" in text
    assert re.findall(r"## (AR\d{3})", text) == list(REASONS)


def test_a_plan_that_was_promised_and_has_not_come_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
):
    """By a later step, in which nobody has told of it yet."""
    monkeypatch.setattr("autoremat.session.telling.is_news", lambda *_, **_keywords: True)
    told, above = Told(is_strict=False), functools.partial(Told.peak, is_final=True)
    with pytest.warns(autoremat.OverBudgetWarning, match="From the next step on"):
        above(told, 1_200_000, 1_000_000, is_planned_anew=True, is_leanest=False)
    with pytest.warns(autoremat.OverBudgetWarning, match="as lean as it can"):
        above(told, 1_200_000, 1_000_000, is_planned_anew=False, is_leanest=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        above(told, 1_200_000, 1_000_000, is_planned_anew=False, is_leanest=True)
