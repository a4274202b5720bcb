"""`verify` names the first value that differs: a sabotaged recompute, by name and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoremat
from autoremat import Verification, _torch
from autoremat.verification import whole_step as verification
from autoremat.verification.replay import _in_own_memory
from tests.tiny import Chain, Dropout, many_rows, rows
from tests.training import UNBOUNDED, make_seeded, optimized, recomputes, refusal

aten = torch.ops.aten
Change = Callable[[fx.Node], None]


class Marked(nn.Module):
    """Four layers of `tanh(linear)`, the last `tanh` on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x)
        return x.square().mean()


def line_of(text: str) -> str:
    """The line of this file's model that has a text."""
    lines, first = inspect.getsourcelines(Marked.forward)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"test_first_difference.py:{number}"


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[fx.Node], bool], Change], Any]:
    """Change the first node that fits on its way into the two modules, past every check."""

    def install(fits: Callable[[fx.Node], bool], change: Change) -> None:
        original = autoremat.planning.choice.rewrite

        def sabotaged(*args: Any, **keywords: Any) -> Any:
            rewritten = original(*args, **keywords)
            for node in filter(fits, rewritten.module.graph.nodes):
                change(node)
                break
            return rewritten

        monkeypatch.setattr(autoremat.planning.choice, "rewrite", sabotaged)
        monkeypatch.setattr(autoremat.emit.split, "first_difference", lambda *_: None)

    return install


def copies_of(target: Any) -> Callable[[fx.Node], bool]:
    """Whether a node repeats an operator."""
    return lambda node: node.target is target and "_recomputed" in node.name


def become(target: Any) -> Change:
    """Let a node compute something else."""

    def change(node: fx.Node) -> None:
        node.target = target

    return change


def verified(make: Callable[[], nn.Module], budget: int, x: Tensor, **options: Any) -> Verification:
    return autoremat.verify(optimized(make, budget, **options), x)


def test_a_wrong_recompute_is_named_with_its_line(sabotage):
    """The copy that turns into a `sin`, by the name that the report has, and as a copy."""
    budget = refusal(Marked, (many_rows(),)).smallest_peak_nbytes
    sabotage(copies_of(aten.tanh.default), become(aten.sin.default))
    model = optimized(Marked, budget)
    result = autoremat.verify(model, many_rows())
    assert not result.ok
    assert result.first_difference_source == line_of("torch.tanh(x)")
    (named,) = (v for v in autoremat.report(model).values if v.name == result.first_difference)
    assert named.recomputes > 0
    assert named.source == result.first_difference_source
    assert f"{named.name} (tanh, {named.source}), recomputed for the backward: by " in (
        result.explanation
    )


@pytest.mark.thorough
def test_a_wrong_first_run_is_no_copy(sabotage):
    """The loss is wrong as well."""
    sabotage(lambda node: node.target is aten.tanh.default, become(aten.sin.default))
    result = verified(Marked, UNBOUNDED, many_rows())
    assert not result.loss_agrees
    assert result.first_difference == "tanh"
    assert "in its first run" in result.explanation


@pytest.mark.thorough
def test_a_wrong_argument_is_named_where_it_is_read(sabotage):
    """The operator is right, and so is each value that it could read."""

    def swap(node: fx.Node) -> None:
        bias, rows, weight = node.args
        others = node.graph.find_nodes(op="placeholder")
        same_shape = [
            n
            for n in others
            if n is not bias
            and n.meta["val"].shape == (32,)
            and any("_recomputed" in user.name for user in n.users)  # the backward has it
        ]
        node.args = (same_shape[-1], rows, weight)

    budget = refusal(Marked, (many_rows(),)).smallest_peak_nbytes
    sabotage(copies_of(aten.addmm.default), swap)
    result = verified(Marked, budget, many_rows())
    assert result.first_difference.startswith("addmm")
    assert result.first_difference_source == line_of("layer(x)")


@pytest.mark.thorough
def test_masks_that_are_drawn_anew_are_the_first_difference(sabotage, monkeypatch):
    """The recompute of a dropout from a state that is not its own."""
    budget = refusal(Dropout, (rows(),), time_limit=60.0).smallest_peak_nbytes

    def draw_anew(node: fx.Node) -> None:
        _state, target, *args = node.args
        node.target, node.args = target, tuple(args)

    sabotage(lambda node: node.target is _torch.run_with_rng_state, draw_anew)
    result = verified(Dropout, budget, rows(), time_limit=60.0)
    assert not result.ok
    assert "recomputed for the backward" in result.explanation
    assert "(native_dropout, tiny.py:" in result.explanation


class Broken(Chain):
    """A graph break in the middle: two graphs, the first sabotaged."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.layers[1](x)).square().mean()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("right", "name"), [("tanh", "tanh"), ("sigmoid", "sigmoid")])
def test_the_graph_at_fault_is_found_among_several(sabotage, right: str, name: str):
    """What the second graph is given is wrong or right; its values are compared on that."""
    wanted = getattr(aten, right).default
    sabotage(lambda node: node.target is wanted, become(aten.sin.default))
    result = verified(Broken, UNBOUNDED, many_rows())
    assert result.first_difference == name


@pytest.mark.thorough
def test_where_the_plan_is_right_the_sentence_looks_elsewhere(monkeypatch):
    """As where eager mode itself does something else than what torch captured."""
    original = verification._compare
    monkeypatch.setattr(
        verification, "_compare", lambda *given: original(*given) | {"gradient_error": 1.0}
    )
    budget = refusal(Dropout, (rows(),), time_limit=60.0).smallest_peak_nbytes
    model = optimized(Dropout, budget, time_limit=60.0)
    result = autoremat.verify(model, rows())
    assert recomputes(model) > 0
    assert result.first_difference == result.first_difference_source == ""
    assert result.explanation == (
        "No planned value differs from the step without recompute: what torch captures is not the "
        "eager step."
    )


@pytest.mark.thorough
def test_a_step_that_agrees_is_not_run_again(monkeypatch):
    """Nothing is explained."""
    monkeypatch.setattr(verification, "explain_difference", None)
    result = verified(Chain, UNBOUNDED, many_rows())
    assert result.ok
    assert result.explanation == ""


@pytest.mark.thorough
def test_the_model_is_left_as_it_was_found(sabotage):
    """Parameters, buffers, gradients and the random stream, also where the step is explained."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.3).square().mean()

    sabotage(lambda node: node.target is aten.tanh.default, become(aten.sin.default))
    model, untouched = optimized(Images, UNBOUNDED), make_seeded(Images)
    marker = torch.ones(32, 32)
    model.linear.weight.grad = marker
    state = torch.get_rng_state()
    assert autoremat.verify(model, many_rows()).first_difference == "tanh"
    assert torch.equal(state, torch.get_rng_state())
    assert model.linear.weight.grad is marker
    assert torch.equal(marker, torch.ones(32, 32))
    assert model.norm.weight.grad is None
    for name, value in untouched.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.thorough
def test_a_step_that_cannot_run_op_by_op_says_so(sabotage, monkeypatch):
    """The verification is not lost."""
    sabotage(lambda node: node.target is aten.tanh.default, become(aten.sin.default))

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("autoremat.verification.replay._evaluated", fail)
    result = verified(Chain, UNBOUNDED, many_rows())
    assert result.gradient_error > result.tolerance
    assert "run op by op, it fails" in result.explanation


def test_copies_of_inputs_lie_as_the_originals_do():
    """Views of one storage stay views of one; expanded and offset tensors keep their strides."""
    base = torch.arange(12.0)
    values = [base[2:8], base[4:].view(2, 4).t(), torch.ones(1).expand(5), 3]
    copies = _in_own_memory(values)
    for original, copied in zip(values[:3], copies[:3], strict=True):
        assert torch.equal(original, copied)
        assert original.stride() == copied.stride()
        assert original.data_ptr() != copied.data_ptr()
    assert copies[3] == 3
    copies[0].zero_()
    assert copies[1][0, 0] == 0.0
    assert base[4] == 4.0


@pytest.mark.thorough
@pytest.mark.inductor
def test_compiled_by_inductor(sabotage):
    """The modules that Inductor was given run op by op, draws from its seeds included."""
    options = {"compiler": "inductor", "time_limit": 1.0}
    unbounded = optimized(Dropout, UNBOUNDED, **options)
    unbounded(many_rows()).backward()
    report = autoremat.report(unbounded)
    above = report.predicted_peak_nbytes - report.resident_nbytes

    def negate(node: fx.Node) -> None:
        node.kwargs = {"alpha": -1}

    sabotage(lambda node: node.target is aten.addmm.default, negate)
    budget = report.resident_nbytes + int(0.9 * above)
    result = verified(Dropout, budget, many_rows(), **options)
    assert result.reference == "torch.compile"
    assert result.first_difference == "addmm"
    assert result.first_difference_source.startswith("tiny.py:")
    assert "in its first run: by " in result.explanation
