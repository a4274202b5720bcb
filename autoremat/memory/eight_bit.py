"""Optimizers whose state is kept in 8 bits, by their bytes alone.

Enters: parameters. Leaves: optimizers that allocate what those of bitsandbytes allocate: for each
state one byte per element and a float32 for each block of 256 elements; parameters of fewer than
4,096 elements keep float32 states (`bitsandbytes.optim`, 0.44 and later: `min_8bit_size`,
block-wise quantization). Its kernels update in place. Guarantees: they only state bytes: on tensors
that hold numbers a step is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_BLOCK = 256  # elements that share one scale
_LEAST = 4096  # elements of a parameter whose state is in 8 bits


class EightBit(torch.optim.Optimizer):
    """The base of those below."""

    states = 2

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        """Of these parameters; the rate decides nothing."""
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Allocate what a step would.

        Raises:
            RuntimeError: on tensors that hold numbers.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if type(parameter.data) is torch.Tensor and parameter.device.type != "meta":
                    raise RuntimeError("This optimizer states bytes for plans; it does not train.")
                if parameter not in self.state:
                    self.state[parameter] = self._state(parameter)
                parameter.mul_(1.0)  # in place, as the kernel does

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        numel = parameter.numel()
        for number in range(1, self.states + 1):
            if numel < _LEAST:
                found[f"state{number}"] = parameter.new_zeros(parameter.shape, dtype=torch.float32)
                continue
            found[f"state{number}"] = parameter.new_zeros(parameter.shape, dtype=torch.uint8)
            found[f"absmax{number}"] = parameter.new_zeros(-(-numel // _BLOCK), dtype=torch.float32)
        return found


class AdamW8bit(EightBit):
    """Two states for each parameter."""


class Adam8bit(EightBit):
    """Two states for each parameter."""


class Lion8bit(EightBit):
    """One state for each parameter."""

    states = 1
