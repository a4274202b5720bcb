"""What an optimizer's first step allocates, found without running it.

Enters: an optimizer, perhaps wrapped. Leaves: an `OptimizerFootprint`, or the allocations and
frees of its first and of later steps. Guarantees: the step runs on a copy whose
tensors are fake, so the user's optimizer, parameters and gradients are not touched and no memory of
the model's size is taken; where the step refuses fake tensors, or changes no parameter of them, the
figures are cautious: two states and two temporaries of its parameters' size.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autoremat._torch import (
    FakeTensorMode,
    foreach_by_default,
    real_execution,
    step_hooks,
    tensor_leaves,
)
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import kept_beside_state, state_of
from autoremat.memory.optimizers import count_values, layers_of, steps_itself, tensors_in_state
from autoremat.memory.storage_sizes import storages_nbytes
from autoremat.reserved.step import Event, Update

_STEPS_TAKEN = 1000  # as a step count reads: an optimizer's warm-up branches are behind


@dataclass(frozen=True, slots=True)
class OptimizerFootprint:
    """Memory of the next `optimizer.step()`.

    Attributes:
        state_nbytes: state that the step creates because it does not exist yet.
        transient_nbytes: highest bytes live inside the step above parameters, gradients and all
            state, the new one included.
    """

    state_nbytes: int
    transient_nbytes: int


def optimizer_footprint(
    optimizer: torch.optim.Optimizer, home: torch.device | None = None
) -> OptimizerFootprint:
    """Size an optimizer's next step by running it on fake tensors.

    Every trainable parameter is taken to have a gradient. Hooks around `step` do not run, nor do
    wrappers: what steps is the optimizer inside them.

    Args:
        optimizer: the optimizer.
        home: where it would step, if its parameters are elsewhere: on a GPU, torch's optimizers
            take their multi-tensor form.
    """
    optimizer = layers_of(optimizer)[-1]
    params = _trained(optimizer)
    if not params or not steps_itself(optimizer):
        return OptimizerFootprint(0, 0)
    device = home or params[0].device
    if device.type == "meta":  # which has no fused step
        device = torch.device("cpu")
    facts = _facts_of(optimizer, device)
    known = _footprints.get(optimizer)
    if known is None or known[0] != facts:
        found = _run_on_fakes(optimizer, device, is_once=True)
        footprint = found.footprint if found else _cautious(optimizer, params, params[0].device)
        _footprints[optimizer] = known = facts, footprint
    return known[1]


def update_of(optimizer: torch.optim.Optimizer | None, home: torch.device) -> Update:
    """What an optimizer allocates and frees in its next step and in those after it.

    Args:
        optimizer: as for `optimizer_footprint`; None for nothing.
        home: where it would step.
    """
    layers = layers_of(optimizer)
    if not layers or not _trained(layers[-1]) or not steps_itself(layers[-1]):
        return Update()
    found = _run_on_fakes(layers[-1], home)
    if found is not None:
        return found.update
    params = _trained(layers[-1])
    cautious = _cautious(layers[-1], params, params[0].device)
    passing = (Event("temporaries", cautious.transient_nbytes), Event("temporaries", 0))
    state = [Event("state", cautious.state_nbytes)] if cautious.state_nbytes else []
    return Update((*state, *passing), passing)


# Asked for by each graph of a step, and each time for all parameters.
_footprints: WeakKeyDictionary[torch.optim.Optimizer, tuple[Hashable, OptimizerFootprint]]
_footprints = WeakKeyDictionary()


def _facts_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Hashable:
    """What decides what its next step takes: settings, parameters, and how much state there is."""
    groups = [
        (
            tuple((id(p), p.shape, p.dtype, p.device, p.requires_grad) for p in group["params"]),
            tuple((name, repr(value)) for name, value in group.items() if name != "params"),
        )
        for group in optimizer.param_groups
    ]
    own = (
        value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")
    )
    settings = tuple(repr(value) for value in own if isinstance(value, str | int | float | None))
    kept = count_values(optimizer), len(kept_beside_state(optimizer))
    return device, tuple(groups), settings, kept


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class _Ran:
    """What two steps on fakes have shown."""

    footprint: OptimizerFootprint
    update: Update


def _run_on_fakes(
    optimizer: torch.optim.Optimizer, device: torch.device, *, is_once: bool = False
) -> _Ran | None:
    """What two steps take, or one; None if they changed no parameter, or cannot run so."""
    try:
        with real_execution(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            twin = _fake_twin(optimizer, mode, device)
            state_before = storages_nbytes(state_of([twin]), device)
            tracker = _OnFakes(device, events=[])
            for leaf in _tensors_of(twin):
                tracker.ignore(leaf)
            for group in twin.param_groups:
                tracker.watch(group["params"])
            with tracker:
                twin.step()
            footprint = _footprint(tracker, storages_nbytes(state_of([twin]), device), state_before)
            first = _events(tracker)
            later: tuple[Event, ...] = ()
            if not is_once:
                with suppress(Exception), tracker:  # what the first takes is known all the same
                    twin.step()
                    later = _events(tracker)
    except Exception:
        # Any optimizer may need values, closures or kernels that fake tensors lack.
        return None
    return _Ran(footprint, Update(first, later)) if tracker.has_changed_any else None


def _footprint(tracker: _OnFakes, state_nbytes: int, before_nbytes: int) -> OptimizerFootprint:
    created = max(state_nbytes - before_nbytes, tracker.live_nbytes)  # some keep it elsewhere
    return OptimizerFootprint(created, max(0, tracker.peak_nbytes - created))


def _events(tracker: _OnFakes) -> tuple[Event, ...]:
    """What was noted since the last time."""
    found = tuple(Event(number, nbytes) for number, nbytes in tracker.events or () if number)
    tracker.events = []
    return found


def _cautious(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], device: torch.device
) -> OptimizerFootprint:
    params_nbytes = storages_nbytes(params, device)
    # Some keep all of it elsewhere, and others tables alone, as bitsandbytes, or another model.
    elsewhere = kept_beside_state(optimizer)
    kept = [t for t in elsewhere if t.requires_grad or not isinstance(t, nn.Parameter)]
    elsewhere_nbytes = storages_nbytes(kept, device)
    exists = any(True for _ in optimizer.state) or elsewhere_nbytes >= params_nbytes
    return OptimizerFootprint(0 if exists else 2 * params_nbytes, 2 * params_nbytes)


def _fake_twin(
    optimizer: torch.optim.Optimizer, mode: FakeTensorMode, home: torch.device
) -> torch.optim.Optimizer:
    """A copy of the optimizer with every tensor fake, a gradient for each parameter."""
    # deepcopy takes what the memo holds instead of copying: no real tensor is ever cloned.
    memo: dict[int, Any] = {id(t): _fake(t, mode, home) for t in _tensors_of(optimizer)}
    twin = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # Learning-rate schedulers bind a wrapped `step` of the original to the instance.
        if name != "step":
            twin.__dict__[name] = copy.deepcopy(value, memo)
    for name in step_hooks():
        if name in twin.__dict__:
            twin.__dict__[name].clear()
    for real, fake in zip(optimizer.param_groups, twin.param_groups, strict=True):
        _settle_foreach(real, fake, home)
    return twin


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor that an optimizer's attributes hold: parameters, state, a learning rate."""
    for name, value in vars(optimizer).items():
        if name == "param_groups":
            value = [dict(group) for group in value]
        elif name == "state":
            yield from (key for key in value if isinstance(key, torch.Tensor))
            value = tensors_in_state(optimizer)
        yield from tensor_leaves(value)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode, home: torch.device) -> torch.Tensor:
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    is_parameter = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
    # Counts of steps are single numbers, which optimizers keep on the CPU.
    if (is_parameter or tensor.dim()) and tensor.device.type != home.type:
        with mode:
            sizes = tensor.shape, tensor.stride()
            fake = torch.empty_strided(*sizes, dtype=tensor.dtype, device=home)
    if is_parameter:
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if tensor.requires_grad:
            fake.grad = torch.empty_like(fake)
    return fake


def _settle_foreach(real: dict[str, Any], fake: dict[str, Any], home: torch.device) -> None:
    """Decide the multi-tensor form by the real parameters; for fake ones torch declines it."""
    if "foreach" not in real or real["foreach"] is not None or real.get("fused"):
        return
    differentiable, params = bool(real.get("differentiable")), real["params"]
    if home.type == "cuda" and all(p.device.type != home.type for p in params):
        plain = all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in params)
        fake["foreach"] = plain and not differentiable  # as torch has it for tensors on a GPU
    else:
        fake["foreach"] = foreach_by_default(params, differentiable)


@dataclass(eq=False)
class _OnFakes(LiveStorages):
    """The same for a step on fakes, whose values nobody knows."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # Optimizers read step counts back; the value decides no size.
            return _stand_in(args[0].dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _stand_in(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float(_STEPS_TAKEN) if dtype.is_floating_point else _STEPS_TAKEN
