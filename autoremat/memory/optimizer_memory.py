"""What an optimizer's first step allocates, found without running it.

Enters: an optimizer, perhaps wrapped. Leaves: an `OptimizerFootprint`. Guarantees: the step runs
on a copy whose tensors are fake, so the user's optimizer, parameters and gradients are not touched
and no memory of the model's size is taken; where the step refuses fake tensors, or changes no
parameter of them, the figures are cautious: two states and two temporaries of its parameters' size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoremat._torch import (
    FakeTensorMode,
    foreach_by_default,
    real_execution,
    step_hooks,
    tensor_leaves,
)
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import state_of, storages_nbytes
from autoremat.memory.optimizers import layers_of

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


def optimizer_footprint(optimizer: torch.optim.Optimizer) -> OptimizerFootprint:
    """Size an optimizer's next step by running it on fake tensors.

    Every trainable parameter is taken to have a gradient. Hooks around `step` do not run, nor do
    wrappers: what steps is the optimizer inside them.
    """
    optimizer = layers_of(optimizer)[-1]
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not params:
        return OptimizerFootprint(0, 0)
    device = params[0].device
    try:
        with real_execution():
            found = _run_on_fakes(optimizer, device)
    except Exception:
        # Any optimizer may need values, closures or kernels that fake tensors lack.
        found = None
    return found or _cautious(optimizer, params, device)


def _run_on_fakes(
    optimizer: torch.optim.Optimizer, device: torch.device
) -> OptimizerFootprint | None:
    """The footprint; None if the step changed no parameter, so that it was none."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        twin = _fake_twin(optimizer, mode)
        state_before = storages_nbytes(state_of([twin]), device)
        tracker = _OnFakes(device)
        for leaf in _tensors_of(twin):
            tracker.ignore(leaf)
        for group in twin.param_groups:
            tracker.watch(group["params"])
        with tracker:
            twin.step()
        state_after = storages_nbytes(state_of([twin]), device)
    if not tracker.has_changed_any:
        return None
    created = max(state_after - state_before, tracker.live_nbytes)  # some keep it elsewhere
    return OptimizerFootprint(created, max(0, tracker.peak_nbytes - created))


def _cautious(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], device: torch.device
) -> OptimizerFootprint:
    params_nbytes = storages_nbytes(params, device)
    exists = any(True for _ in optimizer.state)
    return OptimizerFootprint(0 if exists else 2 * params_nbytes, 2 * params_nbytes)


def _fake_twin(optimizer: torch.optim.Optimizer, mode: FakeTensorMode) -> torch.optim.Optimizer:
    """A copy of the optimizer with every tensor fake, a gradient for each parameter."""
    # deepcopy takes what the memo holds instead of copying: no real tensor is ever cloned.
    memo: dict[int, Any] = {id(t): _fake(t, mode) for t in _tensors_of(optimizer)}
    twin = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        # Learning-rate schedulers bind a wrapped `step` of the original to the instance.
        if name != "step":
            twin.__dict__[name] = copy.deepcopy(value, memo)
    for name in step_hooks():
        if name in twin.__dict__:
            twin.__dict__[name].clear()
    for real, fake in zip(optimizer.param_groups, twin.param_groups, strict=True):
        _settle_foreach(real, fake)
    return twin


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor that an optimizer's attributes hold: parameters, state, a learning rate."""
    for name, value in vars(optimizer).items():
        if name == "param_groups":
            value = [dict(group) for group in value]
        elif name == "state":
            yield from (key for key in value if isinstance(key, torch.Tensor))
            value = list(value.values())
        yield from tensor_leaves(value)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    fake: torch.Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if tensor.requires_grad:
            fake.grad = torch.empty_like(fake)
    return fake


def _settle_foreach(real: dict[str, Any], fake: dict[str, Any]) -> None:
    """Decide the multi-tensor form by the real parameters; for fake ones torch declines it."""
    if "foreach" in real and real["foreach"] is None and not real.get("fused"):
        differentiable = bool(real.get("differentiable"))
        fake["foreach"] = foreach_by_default(real["params"], differentiable)


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
