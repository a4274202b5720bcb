"""What a session is given: the user's options, and whether a step is going to run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import Budget
from autoremat.ask.steering import Steering, parse_steering
from autoremat.cost.device_specs import DeviceSpec
from autoremat.graph.devices import device_nbytes
from autoremat.graph.dropout_policy import DropoutPolicy, parse_dropout
from autoremat.graph.selectors import Selection


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

    @classmethod
    def parse(
        cls,
        *,
        budget: str | int | None = None,
        compiler: str = "inductor",
        policy: str = "optimal",
        save: Selection = None,
        recompute: Selection = None,
        plan: str | Path | None = None,
        dropout: str | None = None,
        time_limit: float = 30.0,
        strict: bool = False,
        verbose: bool = True,
        inductor: Mapping[str, Any] | None = None,
        memory_nbytes: int = 0,
    ) -> Options:
        """The options of a user, as they are documented at `optimize`.

        Raises:
            ValueError: naming the option at fault.
            OSError: if a stored plan cannot be read.
        """
        if compiler not in ("inductor", "eager"):
            raise ValueError(f'compiler is "inductor" or "eager", not {compiler!r}.')
        steering = parse_steering(
            policy=policy, save=save, recompute=recompute, plan=plan, compiler=compiler
        )
        return cls(
            budget=_budget(budget, steering),
            compiler=compiler,
            time_limit_s=_time_limit_s(time_limit),
            dropout=parse_dropout(dropout),
            strict=bool(strict),
            verbose=bool(verbose),
            steering=steering,
            inductor=dict(inductor or {}),
            memory_nbytes=memory_nbytes,
        )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Options:
        """Our options out of a mapping; the rest goes to Inductor.

        Raises:
            ValueError: naming the option at fault.
            OSError: if a stored plan cannot be read.
        """
        ours = {name: value for name, value in given.items() if name in _NAMES}
        others = {name: value for name, value in given.items() if name not in _NAMES}
        for unknown in others.keys() - set(_torch.list_options()):
            near = difflib.get_close_matches(str(unknown), _NAMES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{unknown!r} is no option of autoremat, nor of Inductor.{hint}")
        return cls.parse(**ours, inductor=others)

    def of(self, model: nn.Module) -> Options:
        """The same, compared with the model.

        Raises:
            SteeringError: if the model has no such modules, or no layers.
        """
        return replace(self, steering=self.steering.of(model))

    def budget_nbytes(self, device: torch.device) -> int:
        """Allowed peak of the whole step on a device, which is asked only for a share of it."""
        if not self.budget.is_share:
            return self.budget.nbytes()
        return self.budget.nbytes(self.memory_nbytes or device_nbytes(device))


_NAMES = inspect.signature(Options.parse).parameters.keys() - {"inductor", "memory_nbytes"}


def _budget(given: str | int | None, steering: Steering) -> Budget:
    """The budget that the user wrote; the whole device where a policy or a plan decides alone."""
    if given is None and not steering.choice:
        raise ValueError(
            'autoremat needs a budget: only a fixed policy such as "every-layer", or a stored '
            'plan, does without. Accepted: a size such as "40GB" or "40GiB", bytes as an int, or '
            '"80%" of the device\'s memory; for the backend, as options={"budget": "40GB"}.'
        )
    return Budget.parse("100%" if given is None else given)


def _time_limit_s(given: object) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and given >= 0:
        with suppress(OverflowError):
            return float(given)
    raise ValueError(f"time_limit is a number of seconds, not {given!r}.")


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
