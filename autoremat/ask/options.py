"""What a session is given: the user's options, and whether a step is going to run."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import Budget, budget_argument
from autoremat.ask.free import auto_nbytes, less_reserve
from autoremat.ask.hosts import host_of
from autoremat.ask.sizes import Sizes, parse_sizes
from autoremat.ask.steering import Steering, parse_steering
from autoremat.cost.device_specs import DeviceSpec
from autoremat.elsewhere.present import can_generate_for_gpus
from autoremat.graph.devices import device_name, device_nbytes
from autoremat.graph.dropout_policy import DropoutPolicy, parse_dropout
from autoremat.graph.random_draws import Replays, replays, safe_policy
from autoremat.graph.selectors import Selection
from autoremat.host.memory import Host

BUDGET_VARIABLE = "AUTOREMAT_BUDGET"  # of the environment: for trainers that take a name only
TIME, THROUGHPUT = "time", "throughput"  # goals


@dataclass(frozen=True)
class Setting:
    """How graphs are planned, whichever graph it is.

    Attributes:
        compiler: "inductor" or "eager".
        spec: the data sheet of the device that is planned for, if it is not here: operations are
            estimated then, not measured, and the peak is the simulator's under every compiler.
        dropout: what becomes of random numbers; None for the safe choice.
        steering: strategy, constraints, stored plan.
        time_limit_s: for the choice of a plan, per graph.
        strict: raise where a graph cannot be planned, or a certificate does not hold.
        generates: whether graphs may be those of a device that is not here.
        reads: whether code that Inductor generates for such a device is read: without, the peak is
            that of the model of it.
        offload: where values may wait that leave the device; None if none may.
    """

    compiler: str = "inductor"
    spec: DeviceSpec | None = None
    dropout: DropoutPolicy | None = None
    steering: Steering = field(default_factory=Steering)
    time_limit_s: float = 30.0
    strict: bool = False
    generates: bool = True
    reads: bool = True
    offload: Host | None = None

    @property
    def reads_inductor(self) -> bool:
        """Whether peaks are read from the code that Inductor generates."""
        from_code = self.spec is None or (self.stands_in and self.reads)
        return self.compiler == "inductor" and from_code

    @property
    def stands_in(self) -> bool:
        """Whether a graph is taken for one of a GPU that is not here, down to its code."""
        may = self.compiler == "inductor" and self.spec is not None and self.generates
        return may and can_generate_for_gpus()

    def replays(self, device: torch.device) -> Replays:
        """How draws may be repeated in the graphs."""
        policy = self.dropout or safe_policy(self.compiler, device)
        return replays(policy, self.compiler, device)

    def device_name(self, device: torch.device) -> str:
        """Name of the device that is planned for."""
        return device_name(device) if self.spec is None else self.spec.name


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        budget: allowed peak of the whole step.
        setting: how its graphs are planned.
        verbose: show progress and the summary line.
        inductor: options that are not ours.
        tune: how many of the first steps may try other plans.
        sizes: which sizes of the inputs vary.
        goal: what reports tell beside the plan, which is the fastest within the budget for all.
    """

    budget: Budget
    setting: Setting
    verbose: bool
    inductor: dict[str, Any]
    tune: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    goal: str = TIME

    @classmethod
    def parse(
        cls,
        *,
        budget: str | int | None = None,
        compiler: str = "inductor",
        policy: str = "optimal",
        save: Selection = None,
        recompute: Selection = None,
        repeatable: Selection = None,
        plan: str | Path | None = None,
        known_plan: str | Path | None = None,
        dropout: str | None = None,
        offload: str | int | None = None,
        time_limit: float = 30.0,
        strict: bool = False,
        tune: int = 0,
        verbose: bool = True,
        inductor: Mapping[str, Any] | None = None,
        spec: DeviceSpec | None = None,
        sizes: object = None,
        on_larger: str = "raise",
        goal: str = TIME,
        link: object = None,
    ) -> Options:
        """The options of a user, as they are documented at `optimize`.

        Raises:
            ValueError: naming the option at fault.
            OSError: if a stored plan cannot be read.
        """
        if compiler not in ("inductor", "eager"):
            raise ValueError(f'compiler is "inductor" or "eager", not {compiler!r}.')
        steering = parse_steering(
            policy=policy,
            save=save,
            recompute=recompute,
            repeatable=repeatable,
            plan=plan,
            known_plan=known_plan,
            compiler=compiler,
        )
        limit_s, policy_of_draws = _time_limit_s(time_limit), parse_dropout(dropout)
        setting = Setting(compiler, spec, policy_of_draws, steering, limit_s, bool(strict))
        tries, varying = _tune(tune, steering), parse_sizes(sizes, on_larger)
        if offload is not None:
            host = host_of(offload, link, spec)
            _require_alone(host, setting, tries, varying)
            setting = replace(setting, offload=host)
        elif link is not None:
            raise ValueError(f"link={link!r} is the way of values that wait: give offload=, too.")
        found = _budget(budget, steering)
        aim = _goal(goal, steering)
        return cls(found, setting, bool(verbose), dict(inductor or {}), tries, varying, aim)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Options:
        """Our options out of a mapping; the rest goes to Inductor.

        Raises:
            ValueError: naming the option at fault.
            OSError: if a stored plan cannot be read.
        """
        ours = {name: value for name, value in given.items() if name in _NAMES}
        others = {name: value for name, value in given.items() if name not in _NAMES}
        if ours.get("sizes") is not None:
            raise ValueError(
                "sizes= is of autoremat.optimize, which sees what a model is called with. Under "
                "torch.compile, mark inputs: torch._dynamo.mark_dynamic(t, dim, min=, max=)."
            )
        for unknown in others.keys() - set(_torch.list_options()):
            near = difflib.get_close_matches(str(unknown), _NAMES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{unknown!r} is no option of autoremat, nor of Inductor.{hint}")
        return cls.parse(**ours, inductor=others)

    def of(self, *models: nn.Module) -> Options:
        """The same, compared with the model, or with several that are trained together.

        Raises:
            SteeringError: if none of them has such modules, or layers.
        """
        steering = self.setting.steering.of(*models)
        return replace(self, setting=replace(self.setting, steering=steering))

    def asked(self) -> dict[str, str]:
        """What decides the plan beside the budget's size, by argument, to be compared."""
        setting = self.setting
        return {
            "budget": self.budget.word if self.budget.is_least else "a size",
            "compiler": setting.compiler,
            **setting.steering.asked(),
            "dropout": str(setting.dropout),
            "time_limit": f"{setting.time_limit_s:g}",
            "tune": str(self.tune),
            "sizes": self.sizes.asked(),
            **({} if setting.offload is None else {"offload": setting.offload.asked}),
        }

    def without_code(self) -> Options:
        """The same, for a device that is not here by its data sheet alone."""
        return replace(self, setting=replace(self.setting, generates=False))

    def without_reading(self) -> Options:
        """The same, for a device that is not here by the model of its code."""
        return replace(self, setting=replace(self.setting, reads=False))

    @property
    def can_be_op_by_op(self) -> bool:
        """Whether what is asked for can be had without Inductor.

        Stored plans are of its graphs, and operators that are named may be in no others.
        """
        steering = self.setting.steering
        is_of_its_graphs = steering.plan is not None or any(s.is_operator for s in steering.decided)
        return self.setting.compiler == "inductor" and not is_of_its_graphs

    def op_by_op(self) -> Options:
        """The same without Inductor."""
        steering = replace(self.setting.steering, known=None)
        return replace(self, setting=replace(self.setting, compiler="eager", steering=steering))

    def on(self, device: torch.device) -> Options:
        """The same, what a device has free being a number of bytes from now on.

        Raises:
            SteeringError: if nothing is free, or nobody knows how much.
        """
        if not self.budget.is_free:
            return self
        spec = self.setting.spec
        if spec is None:
            found_nbytes = auto_nbytes(device)
        else:
            found_nbytes = less_reserve(spec.memory_nbytes, spec.memory_nbytes, spec.name)
        return replace(self, budget=replace(self.budget, size_nbytes=found_nbytes, word=""))

    def budget_nbytes(self, device: torch.device) -> int:
        """Allowed peak of the whole step on a device, which is asked only if that depends on it.

        As little as can be is 0.
        """
        if self.budget.is_free:
            return self.on(device).budget.nbytes()
        if not self.budget.is_share:
            return self.budget.nbytes()
        spec = self.setting.spec
        return self.budget.nbytes(device_nbytes(device) if spec is None else spec.memory_nbytes)


_NAMES = inspect.signature(Options.parse).parameters.keys() - {"inductor", "spec", "link"}


def _budget(given: str | int | None, steering: Steering) -> Budget:
    """The budget that the user wrote; the whole device where a policy or a plan decides alone."""
    if given is None and BUDGET_VARIABLE in os.environ:
        given = budget_argument(os.environ[BUDGET_VARIABLE])
    if given is None and not steering.choice:
        raise ValueError(
            'autoremat needs a budget: only a fixed policy such as "every-layer", or a stored '
            'plan, does without. Accepted: a size such as "40GB" or "40GiB", bytes as an int, or '
            '"80%" of the device\'s memory, "auto" or "min"; for the backend, as '
            f'options={{"budget": "40GB"}}, or in the environment, as {BUDGET_VARIABLE}.'
        )
    found = Budget.parse("100%" if given is None else given)
    if found.of_reserved:
        raise ValueError(
            f"Budget {found.given!r} is of what a GPU's allocator reserves. Only plan(..., "
            'device="H100"), for a GPU, emulates that: plan there, and give what it finds as the '
            "budget here, in bytes of what is allocated."
        )
    return found


def _require_alone(host: Host, setting: Setting, tune: int, sizes: Sizes) -> None:
    """Refuse values that wait where something else that is asked for is against it."""
    against = ""
    if setting.steering.policy.is_fixed:
        against = f"{setting.steering.choice}: leave one of the two out"
    elif sizes.given:
        against = "sizes=: nothing is proven yet of sizes of what waits elsewhere"
    elif tune:
        against = f"tune={tune}: leave one of the two out"
    if against:
        raise ValueError(f"offload={host.asked!r} does not go with {against}.")


def _tune(given: object, steering: Steering) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given in (1, 2) or given < 0:
        raise ValueError(
            f"tune is a number of steps, 0 or at least 3, not {given!r}: one by the plan that was "
            "chosen, one in which another is compiled, and one by that."
        )
    if given and steering.choice:
        raise ValueError(
            f"tune={given} tries other plans than {steering.choice}: give one of the two."
        )
    return given


def _goal(given: object, steering: Steering) -> str:
    if given not in (TIME, THROUGHPUT):
        raise ValueError(f'goal is "{TIME}" or "{THROUGHPUT}", not {given!r}.')
    if given == THROUGHPUT and steering.choice:
        raise ValueError(
            f'goal="{THROUGHPUT}" tells what plans for other budgets do, which {steering.choice} '
            "does not heed: give one of the two."
        )
    return str(given)


def _time_limit_s(given: object) -> float:
    if isinstance(given, (int, float)) and not isinstance(given, bool) and given >= 0:
        with suppress(OverflowError):
            return float(given)
    raise ValueError(f"time_limit is a number of seconds, not {given!r}.")


@dataclass(frozen=True)
class Offline:
    """Planning on fake tensors: no kernel is compiled, and no step is going to run.

    Attributes:
        curve_points: budgets to plan for beside the one asked for; 0 for none.
        curve_limit_s: seconds for them.
        has_gradients: whether the step adds to gradients that exist, as those of one batch in
            several parts do from the second one on.
        varying: sizes of the batch that are to be symbols: number of the tensor, dimension.
        autocast: type to which the forward is under autocast; None where only the model says.
        window_nbytes: what is held beside all that a graph or a tensor shows: of parameters that
            are divided among GPUs, what is gathered and reduced ahead of its use.
    """

    curve_points: int = 0
    curve_limit_s: float = 0.0
    has_gradients: bool = False
    varying: tuple[tuple[int, int], ...] = ()
    autocast: torch.dtype | None = None
    window_nbytes: int = 0
