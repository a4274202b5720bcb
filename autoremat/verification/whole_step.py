"""Eager and ours, side by side: the same loss, gradients and buffers, and the real peak.

Enters: an optimised model and one batch. Leaves: a `Verification`. Both steps start from the same
parameters, buffers and random state; afterwards the model is as it was, gradients included.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.meter import measure_peak
from autoremat.optimized import OptimizedCall, call_of_one
from autoremat.session.session import Session
from autoremat.verification.replay import explain_difference
from autoremat.verification.tensor_error import absolute_error, largest, relative_error

FLOAT32_TOLERANCE = 1e-4
FLOAT64_TOLERANCE = 1e-9
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Verification:
    """What one step of ours gives against the same step in eager mode.

    Attributes:
        loss_error: absolute difference of the losses; infinite if only one of them is NaN.
        gradient_error: largest absolute error of any gradient over the largest gradient; a
            gradient of None counts as zeros.
        worst_gradient: name of the parameter with the largest error.
        buffer_error: largest absolute error of any buffer over the largest buffer.
        reference: what ours was compared with: "eager", or "torch.compile" where compiled code
            draws other random numbers than eager code.
        measured_peak_nbytes: highest bytes of the step, resident ones included.
        predicted_peak_nbytes: what the plan says of it.
        budget_nbytes: what was allowed.
        tolerance: errors up to this are rounding.
        loss: the reference's.
        first_difference: if results differ, the first value of the planned step, by its name in
            the report, that is not the one of the same step without recompute; else "".
        first_difference_source: the line that makes it, as "model.py:88".
        explanation: a sentence on it, or on where else the difference comes from.
    """

    loss_error: float
    gradient_error: float
    worst_gradient: str
    buffer_error: float
    reference: str
    measured_peak_nbytes: int
    predicted_peak_nbytes: int
    budget_nbytes: int
    tolerance: float
    loss: float = 0.0
    first_difference: str = ""
    first_difference_source: str = ""
    explanation: str = ""

    @property
    def loss_agrees(self) -> bool:
        """Whether the losses differ by rounding at most."""
        scale = max(1.0, abs(self.loss)) if math.isfinite(self.loss) else 1.0
        return self.loss_error <= self.tolerance * scale

    @property
    def gradients_agree(self) -> bool:
        """Whether gradients and buffers differ by rounding at most."""
        return max(self.gradient_error, self.buffer_error) <= self.tolerance

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_peak_nbytes <= self.budget_nbytes

    @property
    def ok(self) -> bool:
        """Whether all promises hold."""
        return self.loss_agrees and self.gradients_agree and self.within_budget


@dataclass(frozen=True)
class _Outcome:
    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def verify(
    model: nn.Module,
    *inputs: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    seed: int = 0,
    **keywords: Any,
) -> Verification:
    """Run one training step in eager mode and one of ours, and compare them.

    If they differ, the step runs once more, op by op, to find the first value that is wrong: that
    keeps all its values at once, so it may take far more memory than the budget.

    Args:
        model: a module that `autoremat.optimize` was called on, in train mode.
        inputs: positional inputs of one batch.
        loss_fn: from the model's output to the loss. Without it the output's `loss`, or the
            output itself if it is one number, or the sum of its floating-point tensors.
        seed: of the random numbers that both steps draw.
        keywords: keyword inputs of the batch.

    Raises:
        ValueError: if the model was not optimised, shares its budget or is in eval mode.
    """
    optimized = call_of_one(model, "verify compares steps of")
    if not model.training:
        raise ValueError("The model is in eval mode, where nothing is planned: call model.train().")
    step = _Step(model, (inputs, keywords), loss_fn or _default_loss, seed)
    with _left_as_found(model) as restore:
        step.run(model)  # plans and compiles
        restore()
        while optimized.session.settle():  # the next call is under another plan
            step.run(model)
            restore()
        session = optimized.session
        reference, call = _reference(model, session)
        theirs = _detached(step.run(call))
        restore()
        ours = _measured(step, optimized)
        report = session.report()
        result = Verification(
            **_compare(theirs, ours),
            reference=reference,
            measured_peak_nbytes=report.measured_peak_nbytes or 0,
            predicted_peak_nbytes=report.predicted_peak_nbytes,
            budget_nbytes=report.budget_nbytes,
            tolerance=_tolerance(model),
        )
        if not (result.loss_agrees and result.gradients_agree):
            restore()
            result = _explained(result, session, step, theirs)
    return result


@dataclass(frozen=True)
class _Step:
    """The step that runs in each way.

    Attributes:
        model: the user's.
        inputs: the batch, positional and by keyword.
        loss_of: from the model's output to the loss.
        seed: of the random numbers that it draws.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    loss_of: Callable[[Any], torch.Tensor]
    seed: int

    def run(self, call: Callable[..., Any]) -> _Outcome:
        """Forward and backward, the forward by `call`."""
        args, keywords = self.inputs
        torch.manual_seed(self.seed)
        # No variable holds what the model returns: it would be live through the backward as well.
        loss = self.loss_of(call(*args, **keywords))
        loss.backward()
        return _Outcome(
            float(_local(loss.detach())),
            {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None},
            dict(self.model.named_buffers()),
        )


def _reference(model: nn.Module, session: Session) -> tuple[str, Callable[..., Any]]:
    """What ours is compared with: eager mode, or torch's compiled code where that draws others."""
    call: Callable[..., Any] = _torch.own_call(model)
    if session.compiled_draws_differently:
        return "torch.compile", torch.compile(call)
    return "eager", call


def _measured(step: _Step, optimized: OptimizedCall) -> _Outcome:
    """What our step makes; the session notes what it takes."""
    gc.collect()
    session = optimized.session
    device = session.steps.device
    resident = optimized.training.members.resident(device, step.inputs)
    outcome: list[_Outcome] = []
    peak = measure_peak(lambda: outcome.append(step.run(step.model)), device=device)
    session.note_measured(resident.nbytes + max(peak, resident.transient_nbytes))
    return _detached(outcome[0])


def _explained(
    result: Verification, session: Session, step: _Step, theirs: _Outcome
) -> Verification:
    """The result with the first value that is wrong, which one more step finds."""

    def agrees(call: Callable[..., Any]) -> bool:
        again = replace(result, **_compare(theirs, _detached(step.run(call))))
        return again.loss_agrees and again.gradients_agree

    explanation = explain_difference(session, _torch.own_call(step.model), agrees)
    found = explanation.difference
    return replace(
        result,
        first_difference=found.value if found is not None else "",
        first_difference_source=found.source if found is not None else "",
        explanation=explanation.sentence,
    )


def _compare(theirs: _Outcome, ours: _Outcome) -> dict[str, Any]:
    gradient_error, worst = _largest_error(
        _with_zeros(theirs.gradients, ours.gradients), _with_zeros(ours.gradients, theirs.gradients)
    )
    buffer_error, _ = _largest_error(theirs.buffers, ours.buffers)
    return {
        "loss": theirs.loss,
        "loss_error": absolute_error(
            torch.tensor(theirs.loss, dtype=torch.float64),
            torch.tensor(ours.loss, dtype=torch.float64),
        ),
        "gradient_error": gradient_error,
        "worst_gradient": worst,
        "buffer_error": buffer_error,
    }


def _with_zeros(
    gradients: dict[str, torch.Tensor], others: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradients, and zeros for parameters that got one only from the other step.

    Eager mode leaves None where nothing reads what a parameter made. Compiled code does not: if a
    graph returns such a value, torch passes zeros into its backward for the value's gradient.
    """
    return {name: torch.zeros_like(other) for name, other in others.items()} | gradients


def _largest_error(
    theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Largest absolute error over the largest finite reference value, and whose it is."""
    for name in theirs.keys() ^ ours.keys():
        return math.inf, name
    scale = max((largest(tensor) for tensor in theirs.values()), default=0.0)
    worst, worst_name = 0.0, ""
    for name, tensor in theirs.items():
        error = absolute_error(tensor, ours[name])
        if error > worst:
            worst, worst_name = error, name
    return relative_error(worst, scale), worst_name


def _detached(outcome: _Outcome) -> _Outcome:
    return _Outcome(
        outcome.loss,
        {name: _local(tensor.detach()).clone() for name, tensor in outcome.gradients.items()},
        {name: _local(tensor.detach()).clone() for name, tensor in outcome.buffers.items()},
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is spread over processes, this process's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _default_loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output
    floating = [tensor for tensor in _torch.tensor_leaves(output) if tensor.requires_grad]
    if not floating:
        raise ValueError("The output has no tensor to differentiate: pass loss_fn.")
    return torch.stack([leaf.sum().float() for leaf in floating]).sum()


def _tolerance(model: nn.Module) -> float:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes <= {torch.float64, torch.complex128}:
        return FLOAT64_TOLERANCE
    if dtypes & {torch.float16, torch.bfloat16}:
        return HALF_TOLERANCE
    return FLOAT32_TOLERANCE


@contextlib.contextmanager
def _left_as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yields a function that takes the model back to how it was; calls it at the end as well."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(keep_gradients: bool = False) -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name] if keep_gradients else None

    restore()
    try:
        yield restore
    finally:
        restore(keep_gradients=True)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
