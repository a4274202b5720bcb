"""Optimizers whose state is no tensor of a parameter's size and type: in their second step, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, measuring_peak, resident_nbytes
from autoremat.memory.optimizer_memory import optimizer_footprint

# Dynamo looks at `.grad` of what it resumes with after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WIDTH, ROWS, BLOCK = 64, 512, 256


class Net(nn.Module):
    """Layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Stepping(torch.optim.Optimizer):
    """Steps, once there is a state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.keep(parameter)
            parameter.sub_(parameter.grad, alpha=1e-3)
        return loss

    def keep(self, parameter: Tensor) -> None:
        raise NotImplementedError


class EightBit(Stepping):
    """As bitsandbytes: codes, scales, and one table of values for all, beside the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tables = {"dynamic": torch.linspace(-1, 1, 256)}

    def keep(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            blocks = -(-parameter.numel() // BLOCK)
            state |= {"codes": torch.zeros_like(parameter, dtype=torch.uint8), "step": 0}
            state |= {"scales": torch.zeros(blocks), "table": self.tables["dynamic"]}


class Beside(Stepping):
    """Its moments are in lists of its own; the parameters, too, are in one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.moments: list[Tensor] = []
        self.all = [p for group in self.param_groups for p in group["params"]]

    def keep(self, parameter: Tensor) -> None:
        if len(self.moments) < len(self.all):
            self.moments.append(torch.zeros_like(parameter))


class Codes:
    """Quantised values, as an object of an optimizer's own."""

    def __init__(self, like: Tensor) -> None:
        self.values = torch.zeros_like(like, dtype=torch.uint8)
        self.scales = [torch.zeros(-(-like.numel() // BLOCK))]


class Objects(Stepping):
    """As GaLore: its state holds objects that hold tensors."""

    def keep(self, parameter: Tensor) -> None:
        self.state[parameter].setdefault("codes", Codes(parameter))


class Fused(torch.optim.Optimizer):
    """As LOMO: no `step`; each parameter is updated as soon as its gradient is there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.register_post_accumulate_grad_hook(self.take)

    @torch.no_grad()
    def take(self, parameter: Tensor) -> None:
        parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None


STEPPING = [EightBit, Beside, Objects, torch.optim.Adafactor]


@pytest.mark.parametrize("kind", STEPPING)
def test_state_is_known_before_it_is_there_and_counted_after(kind: Any) -> None:
    """To the byte; the second step makes none."""
    model = Net()
    model(torch.randn(4, WIDTH)).backward()
    optimizer = kind(model.parameters())
    before_nbytes = resident_nbytes(model, optimizer=optimizer)
    found = optimizer_footprint(optimizer)
    peak_nbytes = measure_peak(optimizer.step, device="cpu")
    made_nbytes = resident_nbytes(model, optimizer=optimizer) - before_nbytes
    assert 0 < made_nbytes == found.state_nbytes
    assert found.state_nbytes + found.transient_nbytes == pytest.approx(peak_nbytes, abs=64)
    assert optimizer_footprint(optimizer).state_nbytes == 0


def test_an_optimizer_without_a_step_takes_nothing() -> None:
    """It has no state, and no temporaries after the backward."""
    found = optimizer_footprint(Fused(Net().parameters()))
    assert (found.state_nbytes, found.transient_nbytes) == (0, 0)


@pytest.mark.parametrize("kind", [*STEPPING, Fused])
@pytest.mark.parametrize("is_given", [True, False])
def test_steps_keep_the_budget_from_the_second_on(kind: Any, is_given: bool) -> None:
    """Or from the first, where the optimizer is given."""
    model, x = Net(), torch.randn(ROWS, WIDTH)
    optimizer = kind(model.parameters())
    given = {"optimizer": optimizer} if is_given else {}
    budget = 1_200_000
    autoremat.optimize(model, budget, compiler="eager", verbose=False, time_limit=1.0, **given)
    peaks = []
    for _ in range(4):
        held_nbytes = resident_nbytes(model, x, optimizer)
        with measuring_peak(x.device, until_compile=True) as found:
            model(x).backward()
            if kind is not Fused:
                optimizer.step()
            optimizer.zero_grad()
        peaks += [held_nbytes + peak for peak in found]
    report = autoremat.report(model)
    assert peaks
    assert max(peaks) <= report.predicted_peak_nbytes <= budget < report.baseline_peak_nbytes
    assert report.predicted_peak_nbytes < 1.02 * max(peaks)


class Answers:
    """An object that answers nothing it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ValueError("__dict__")


class Odd(Stepping):
    """Keeps what refers to itself, what answers nothing, and a history; and one table."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tree: dict[str, Any] = {"children": []}
        self.tree["children"].append({"parent": self.tree, "table": torch.zeros(100)})
        self.answers = Answers()
        self.history = [0.5] * 100_000

    def keep(self, parameter: Tensor) -> None:
        self.state[parameter].setdefault("answers", self.answers)


def test_what_refers_to_itself_or_answers_nothing_is_looked_through():
    """Whatever an optimizer keeps, its tensors count once and nothing ends."""
    model = Net()
    optimizer = Odd(model.parameters())
    before = resident_nbytes(model, (), torch.optim.SGD(model.parameters()))
    assert resident_nbytes(model, (), optimizer) == before + 400
    model(torch.randn(ROWS, WIDTH)).backward()
    with_gradients = resident_nbytes(model, (), torch.optim.SGD(model.parameters()))
    optimizer.step()
    assert resident_nbytes(model, (), optimizer) == with_gradients + 400
    assert optimizer_footprint(optimizer).state_nbytes >= 0
