"""Hooks on parameters and modules run as often, and see the same, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from tests.tiny import Layers, Residual, rows
from tests.training import (
    UNBOUNDED,
    close,
    gradients_hold,
    make_seeded,
    optimized,
    refusal,
    step,
)

Add = Callable[[nn.Module], Any]


def doubled(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before the forward: twice the input."""
    return (2 * inputs[0],)


def bent(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """After the forward: the sine of the output."""
    return torch.sin(output)


ADDED: dict[str, Add] = {
    "before a layer": lambda m: m.first.register_forward_pre_hook(doubled),
    "after a layer": lambda m: m.second.register_forward_hook(bent),
    "before the model": lambda m: m.register_forward_pre_hook(doubled),
    "after the model": lambda m: m.register_forward_hook(bent),
    "on a gradient": lambda m: m.first.weight.register_hook(lambda gradient: 3 * gradient),
}


def test_hooks_on_modules_and_parameters():
    """All at once, at every budget."""

    def make() -> nn.Module:
        model = Residual()
        for add in ADDED.values():
            add(model)
        return model

    gradients_hold(make, (rows(),), time_limit=60.0)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ADDED)
def test_a_hook_that_comes_and_goes_between_steps(where: str):
    """The first step has planned without it; the next one runs with it, the last without."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    before = step(ours, (rows(),))
    handles = [ADDED[where](model) for model in (ours, eager)]
    with_hook = step(ours, (rows(),))
    close(step(eager, (rows(),)), with_hook, 1e-6)
    assert not torch.equal(
        with_hook.gradients["layers.0.weight"], before.gradients["layers.0.weight"]
    )
    for handle in handles:
        handle.remove()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)


@pytest.mark.thorough
def test_an_optimizer_that_runs_inside_the_backward():
    """`register_post_accumulate_grad_hook` steps and drops each gradient as soon as it is there."""

    class StepsEarly(Residual):
        def __init__(self) -> None:
            super().__init__()
            for parameter in self.parameters():
                optimizer = torch.optim.SGD([parameter], 0.1)
                parameter.register_post_accumulate_grad_hook(self.taker(optimizer))

        @staticmethod
        def taker(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
            def take(parameter: Tensor) -> None:
                optimizer.step()
                optimizer.zero_grad()

            return take

    smallest = refusal(StepsEarly, (rows(),), time_limit=60.0).smallest_peak_nbytes
    trained = []
    for model in (
        optimized(StepsEarly, smallest, time_limit=60.0),
        optimized(StepsEarly, UNBOUNDED),
        make_seeded(StepsEarly),
    ):
        for _ in range(3):
            model(rows()).backward()
        assert all(p.grad is None for p in model.parameters())
        trained.append(list(model.parameters()))
    for tight, loose, eager in zip(*trained, strict=True):
        assert torch.equal(tight, loose)
        torch.testing.assert_close(loose, eager)


class ScalesGradient(Layers):
    """The second of three layers has a backward hook; `looped` calls them in a loop."""

    looped = False

    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda module, into, out_of: (2 * into[0],))

    def forward(self, x: Tensor) -> Tensor:
        if self.looped:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return torch.tanh(self.layers[2](h)).square().mean()


class ScalesGradientInLoop(ScalesGradient):
    looped = True


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_backward_hook_on_a_module_breaks_the_graph():
    """What stands around it is planned; gradients are eager's."""
    model = optimized(ScalesGradient, UNBOUNDED)
    close(step(make_seeded(ScalesGradient), (rows(),)), step(model, (rows(),)), 1e-6)
    assert autoremat.report(model).graphs


def test_a_backward_hook_inside_a_loop_is_named():
    """Dynamo skips the whole frame: the message tells of hooks."""
    model = optimized(ScalesGradientInLoop, UNBOUNDED, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match=r"AR105.*backward hook on a module"):
        ours = step(model, (rows(),))
    close(step(make_seeded(ScalesGradientInLoop), (rows(),)), ours, 1e-6)


def test_hooks_on_all_modules_see_the_users_modules_only():
    """Not the graphs that stand in for them."""
    model = optimized(Residual, UNBOUNDED)
    seen: set[str] = set()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: seen.add(type(module).__name__)
    )
    try:
        step(model, (rows(),))
        step(model, (rows(),))
    finally:
        handle.remove()
    assert seen <= {"Linear", "Residual"}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _tripled(module: nn.Module, *gradients: Any) -> Any:
    found = gradients[0]
    return tuple(g if g is None else 3 * g for g in found) if _is_linear(module) else None


ADDED_TO_ALL: dict[str, Callable[[], Any]] = {
    "forward pre": lambda: nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: doubled(module, inputs) if _is_linear(module) else None
    ),
    "forward": lambda: nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: bent(module, inputs, output) if _is_linear(module) else None
    ),
    "backward pre": lambda: nn.modules.module.register_module_full_backward_pre_hook(_tripled),
    "backward": lambda: nn.modules.module.register_module_full_backward_hook(_tripled),
}


def same_with_and_without(ours: nn.Module, eager: nn.Module, kind: str) -> None:
    """Two steps with a hook on all modules, one when it is gone."""
    handle = ADDED_TO_ALL[kind]()
    try:
        for _ in range(2):
            close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    finally:
        handle.remove()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ADDED_TO_ALL)
def test_a_hook_on_all_modules_that_comes_after_the_first_step(kind: str):
    """Eager mode takes over while it is there, which is told once (AR110)."""
    ours, eager = optimized(Residual, UNBOUNDED, strict=False), make_seeded(Residual)
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    with pytest.warns(autoremat.FallbackWarning, match="AR110") as told:
        same_with_and_without(ours, eager, kind)
    assert len([w for w in told if isinstance(w.message, autoremat.FallbackWarning)]) == 1
    strict = optimized(Residual, UNBOUNDED)
    step(strict, (rows(),))
    with pytest.raises(autoremat.FallbackError, match="AR110"):
        same_with_and_without(strict, eager, kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["forward pre", "forward"])
def test_a_hook_on_all_modules_that_is_there_from_the_start(kind: str):
    """It is compiled in; when it goes, and another comes in its place, the step is eager's."""
    ours, eager = optimized(Residual, UNBOUNDED), make_seeded(Residual)
    first = ADDED_TO_ALL[kind]()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    second = ADDED_TO_ALL[kind]()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    first.remove()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    second.remove()
    close(step(eager, (rows(),)), step(ours, (rows(),)), 1e-6)
    assert autoremat.report(ours).graphs


@pytest.mark.thorough
def test_hooks_on_saved_tensors():
    """They pack what the plan saves, and the backward gets what they unpack."""
    smallest = refusal(Residual, (rows(),), time_limit=60.0).smallest_peak_nbytes
    ours, eager = optimized(Residual, smallest, time_limit=60.0), make_seeded(Residual)
    packed = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value.shape)
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = ours(rows())
    loss.backward()
    assert packed
    eager(rows()).backward()
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
