"""Buffers that the forward reads and then overwrites: the gradient is that of what it read.

The reference is plain eager PyTorch. `torch.compile` without autoremat gets several of these
programs wrong (pytorch#197039), so it is none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoremat

WIDTH = 24


class Overwrites(nn.Module):
    """Calls a program on a weight and a buffer, then adds one to the buffer."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self.w = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
        self.register_buffer(
            "buffer", torch.linspace(0.5, 2.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The program's sum, after deep enough a chain for something to recompute."""
        y = self.program(self.w, self.buffer)
        for _ in range(3):
            y = (y @ x).sin()
        self.buffer.add_(1.0)
        return y.sum()


class TimesBuffer(torch.autograd.Function):
    """Saves a copy of the buffer, scaled, for its backward."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, buffer: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(buffer.clone() * 2)
        return w * buffer * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """By what was saved."""
        (doubled,) = ctx.saved_tensors
        return gradient * doubled, None


def chunked(w: Tensor, buffer: Tensor) -> Tensor:
    """Both halves of the buffer, as views."""
    a, b = buffer.chunk(2)
    return (w[: WIDTH // 2] + a).sin().repeat(2, 1) * (w[WIDTH // 2 :] + b).sin().repeat(2, 1)


PROGRAMS = {
    "sum": lambda w, b: (b + w).sin(),
    "product with a clone": lambda w, b: (b.clone() * w).sin(),
    "lerp": lambda w, b: torch.lerp(w, 2 * w, b.clone()),
    "power": lambda w, b: torch.pow(b.clone(), w),
    "autograd function": lambda w, b: TimesBuffer.apply(w, b),
    "chunk": chunked,
    "unbind": lambda w, b: (w + b.unbind(0)[3]).sin() * (w + b.unbind(1)[2]).cos(),
    "split": lambda w, b: (w.split(8, 1)[0] + b.split(8, 1)[1]).sin().repeat(1, 3),
    "transposed": lambda w, b: (w + b.t()).sin(),
}


def gradient(model: Overwrites, x: Tensor) -> Tensor:
    """Of one step from the initial buffer."""
    model.zero_grad()
    with torch.no_grad():
        model.buffer.copy_(Overwrites(None).buffer)
    model(x).backward()
    assert model.w.grad is not None
    return model.w.grad.clone()


def smallest_budget(program: Any, compiler: str, x: Tensor) -> int:
    """By asking for what is resident, which the refusal of one byte tells."""
    budget = 1
    for _ in range(2):
        with pytest.raises(autoremat.InfeasibleBudget) as refusal:
            gradient(optimized(program, budget, compiler), x)
        budget = refusal.value.resident_nbytes
    return int(refusal.value.smallest_peak_nbytes)


def optimized(program: Any, budget: int, compiler: str) -> Overwrites:
    """A fresh model under a budget; a fallback is an error."""
    torch._dynamo.reset()
    model = Overwrites(program)
    autoremat.optimize(model, budget, compiler=compiler, strict=True, verbose=False)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("tight", [False, True], ids=["loose", "smallest"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_backward_sees_the_buffer_as_the_forward_did(name: str, tight: bool) -> None:
    """At a budget that does not bind, and at the smallest one."""
    x = torch.eye(WIDTH) * 0.9
    wanted = gradient(Overwrites(PROGRAMS[name]), x)
    budget = smallest_budget(PROGRAMS[name], "eager", x) if tight else 1 << 40
    model = optimized(PROGRAMS[name], budget, "eager")
    torch.testing.assert_close(gradient(model, x), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.buffer, Overwrites(None).buffer + 1)


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["product with a clone", "lerp", "chunk"])
def test_inductor_sees_it_as_well(name: str) -> None:
    """Inductor's passes remove the clone that protects the user's read."""
    x = torch.eye(WIDTH) * 0.9
    wanted = gradient(Overwrites(PROGRAMS[name]), x)
    model = optimized(PROGRAMS[name], 1 << 40, "inductor")
    torch.testing.assert_close(gradient(model, x), wanted, rtol=1e-4, atol=1e-5)
