"""What a session is given: the user's options, what the step holds anyway, offline or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat.budget import Budget
from autoremat.device import device_nbytes
from autoremat.dropout_policy import DropoutPolicy
from autoremat.hardware import DeviceSpec
from autoremat.reporting.resident import ResidentParts
from autoremat.steering import Steering


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        budget: allowed peak of the whole step.
        compiler: "inductor" or "eager".
        dropout: what becomes of random numbers; None for the safe choice.
        time_limit_s: for the choice of a plan, per graph.
        strict: raise where a graph cannot be planned.
        verbose: show progress and the summary line.
        steering: strategy, constraints, stored plan.
        inductor: options that are not ours.
        memory_nbytes: what a share is of; 0 for the memory of the device at hand.
    """

    budget: Budget
    compiler: str = "inductor"
    dropout: DropoutPolicy | None = None
    time_limit_s: float = 30.0
    strict: bool = False
    verbose: bool = True
    steering: Steering = field(default_factory=Steering)
    inductor: dict[str, Any] = field(default_factory=dict)
    memory_nbytes: int = 0

    def budget_nbytes(self, device: torch.device) -> int:
        """Allowed peak of the whole step on a device, which is asked only for a share of it."""
        if not self.budget.is_share:
            return self.budget.nbytes()
        return self.budget.nbytes(self.memory_nbytes or device_nbytes(device))


@dataclass(frozen=True)
class Resident:
    """Bytes that are live whatever the plan; `residents` makes it.

    Attributes:
        parts: what they are.
        optimizer: class of the optimizer whose state is counted, or "".
        transient_nbytes: what the optimizer's step takes for itself, after the backward.
        storages: identities of the storages that are counted, as far as known.
    """

    parts: ResidentParts = field(default_factory=ResidentParts)
    optimizer: str = ""
    transient_nbytes: int = 0
    storages: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """All of them together."""
        return self.parts.nbytes


@dataclass(frozen=True)
class Offline:
    """Planning on fake tensors: no kernel is compiled, and no step is going to run.

    Attributes:
        spec: the device to plan for, if it is not here: operations are estimated then, not
            measured, and the peak is the simulator's under every compiler.
        curve_points: budgets to plan for beside the one asked for; 0 for none.
        curve_limit_s: seconds for them.
    """

    spec: DeviceSpec | None = None
    curve_points: int = 0
    curve_limit_s: float = 0.0
