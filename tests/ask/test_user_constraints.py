"""`save=` and `recompute=`: what the user decides, and the planner works around."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.backend import autoremat as backend
from autoremat.errors import SteeringError
from autoremat.graph.selectors import Selector, parse_selectors
from autoremat.reporting import ValueAction, ValueReport
from tests.tiny import WIDTH, many_rows
from tests.training import UNBOUNDED, optimized, same, step


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.down(self.act(self.up(x)))))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(budget: int = UNBOUNDED, **options: Any) -> nn.Module:
    model = optimized(Layers, budget, **options)
    step(model, (many_rows(),))
    return model


def values_of(model: nn.Module, *ops: str) -> list[ValueReport]:
    return [value for value in autoremat.report(model).values if value.op in ops]


@pytest.mark.thorough
def test_what_is_to_be_saved_is_saved_in_a_tight_budget():
    """Without it, the same budget recomputes them."""
    lean = trained(policy="every-layer", save="layers.1")
    budget = autoremat.report(lean).predicted_peak_nbytes
    assert recomputed_in("layers.1", trained(budget))
    assert not recomputed_in("layers.1", trained(budget, save="layers.1"))


def recomputed_in(module: str, model: nn.Module) -> list[ValueReport]:
    return [v for v in autoremat.report(model).values if module in v.module and v.recomputes]


def test_a_refusal_says_that_constraints_play_a_part():
    """Without them, a smaller budget might be met."""
    model = optimized(Layers, 100_000, save="layers.*")
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        step(model, (many_rows(),))
    assert any("save= and recompute=" in note for note in caught.value.__notes__)


def test_what_is_to_be_recomputed_is_recomputed_with_all_the_memory_of_the_world():
    free = trained()
    assert not any(value.recomputes for value in values_of(free, "gelu"))
    model = trained(recompute="*.act.*")
    assert [value.action for value in values_of(model, "gelu")] == [ValueAction.RECOMPUTE] * 3


def test_constraints_do_not_change_the_step():
    """Bit for bit, dropout included."""
    reference = step(trained(), (many_rows(),))
    model = trained(save="layers.0", recompute=["layers.1", "*.2.act"])
    same(reference, step(model, (many_rows(),)))


@pytest.mark.parametrize(
    "operator",
    [
        "aten.gelu",
        "aten.gelu.default",
        "torch.ops.aten.gelu",
        torch.ops.aten.gelu,
        torch.ops.aten.gelu.default,
    ],
)
def test_an_operator_by_any_of_its_names(operator: Any):
    (selector,) = parse_selectors("recompute", operator)
    assert selector.is_operator
    graph = torch.fx.Graph()
    assert selector.matches(graph.call_function(torch.ops.aten.gelu.default))
    assert not selector.matches(graph.call_function(torch.ops.aten.gelu_backward.default))


def test_an_operator_is_recomputed():
    model = trained(recompute=torch.ops.aten.gelu)
    assert all(value.recomputes for value in values_of(model, "gelu"))


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers.3", "layers.3", True),
        ("layers.3", "layers.30", False),
        ("*.attn.*", "layers.0.attn", True),
        ("*.attn.*", "attn.qkv", True),
        ("*.attn.*", "layers.0.attn_norm", False),
        ("layers.[01]", "layers.1", True),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool):
    assert Selector("save", pattern, is_operator=False).matches_path(path) == matches


def test_the_report_says_what_was_asked_for():
    model = trained(save="layers.0", recompute="layers.1.*")
    sentences = autoremat.report(model).constraints
    assert any(text.startswith('save="layers.0" holds for') for text in sentences)
    assert any(text.startswith('recompute="layers.1.*" holds for') for text in sentences)


def test_a_module_that_does_not_exist_is_refused_at_once_with_the_nearest():
    with pytest.raises(
        SteeringError, match=r'save="layer.0.up" matches no module.*"layers\.0\.up"'
    ):
        optimized(Layers, UNBOUNDED, save="layer.0.up")


def test_an_operator_that_does_not_occur_is_refused_at_the_first_step():
    model = optimized(Layers, UNBOUNDED, recompute="aten.relu")
    with pytest.raises(SteeringError, match=r"aten\.relu.*matches no operator.*aten\.gelu"):
        step(model, (many_rows(),))


def test_the_backend_knows_no_modules_and_refuses_at_the_first_step():
    options = {"budget": "1GB", "compiler": "eager", "verbose": False, "save": "layrs.1"}
    compiled = torch.compile(Layers().train(), backend=backend, options=options)
    with pytest.raises(SteeringError, match=r'save="layrs.1" matches no module'):
        compiled(many_rows())


def test_saved_and_recomputed_contradict_each_other():
    model = optimized(Layers, UNBOUNDED, save="layers.*", recompute="aten.gelu")
    with pytest.raises(SteeringError, match=r"both select gelu.*saved or recomputed, not both"):
        step(model, (many_rows(),))


def test_what_runs_once_cannot_be_recomputed():
    """Masks that are saved are drawn once."""
    model = optimized(Layers, UNBOUNDED, recompute="aten.native_dropout", dropout="save_masks")
    with pytest.raises(SteeringError, match=r"cannot be done: .*draws random numbers"):
        step(model, (many_rows(),))


def test_what_runs_once_inside_a_module_is_told():
    """The rest of the module is recomputed."""
    model = trained(recompute="layers.0", dropout="save_masks")
    sentences = autoremat.report(model).constraints
    assert any("not for 1 that run once" in text and "random" in text for text in sentences)
    assert values_of(model, "gelu")[0].recomputes


@pytest.mark.parametrize("given", [3, "", [None], F.gelu])
def test_malformed_selections(given: Any):
    with pytest.raises(SteeringError, match=r"save= takes patterns of module paths"):
        optimized(Layers, UNBOUNDED, save=given)


def test_constraints_hold_for_policies_too():
    """Every layer is recomputed, but for what is to be saved."""
    model = trained(policy="every-layer", save="aten.gelu")
    assert not any(value.recomputes for value in values_of(model, "gelu"))
    assert any(value.recomputes for value in values_of(model, "tanh"))


class Broken(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[2](self.layers[1](x)).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_pattern_may_match_in_a_later_graph():
    """`optimize` has compared it with the model."""
    model = optimized(Broken, UNBOUNDED, recompute="layers.2")
    step(model, (many_rows(),))
    assert [value.recomputes for value in values_of(model, "gelu")] == [0, 0, 1]


@pytest.mark.thorough
@pytest.mark.inductor
def test_constraints_under_inductor():
    """A plan that keeps what was asked for; torch's own partition would not."""
    model = optimized(Layers, UNBOUNDED, compiler="inductor", save="layers.0", recompute="layers.1")
    step(model, (many_rows(),))
    assert autoremat.verify(model, many_rows()).ok
    products = values_of(model, "addmm")
    assert products[2].recomputes
    assert not products[0].recomputes
