"""`autoremat verify`: one planned step of a target against the same step in eager mode.

Enters: the command's arguments. Leaves: a table or one JSON object on stdout, messages on stderr,
and the exit code. Guarantees: what the user's code prints goes to stderr; an error of the user's
own is one message, while a defect of ours keeps its traceback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from autoremat import _torch
from autoremat.api import optimize, report
from autoremat.ask.budget import Budget, budget_argument
from autoremat.commands.arguments import Refusal
from autoremat.commands.exits import BAD_INPUT, DIFFERENT, INFEASIBLE
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.telling import print_json, refusal_document, warnings_told
from autoremat.commands.verify_table import verify_table
from autoremat.errors import InfeasibleBudget
from autoremat.optimized import optimized_call
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.hf import load
from autoremat.targets.target import Target, TargetError, last_line
from autoremat.units import format_nbytes, format_nbytes_apart
from autoremat.verification.whole_step import Verification, verify

_SCHEMA = "autoremat.verification/1"


@dataclass(frozen=True)
class _Asked:
    """The command's arguments, checked."""

    target: TargetArguments
    budget: Budget
    compiler: str
    dropout: str | None
    time_limit: float


def run(
    target: TargetArguments,
    budget: str,
    *,
    compiler: str,
    as_json: bool,
    time_limit: float,
    dropout: str | None = None,
) -> int:
    """Do what the command says and return its exit code.

    Args:
        target: where model and batch come from.
        budget: as the user wrote it.
        compiler: "inductor" or "eager".
        as_json: one JSON object in place of the table.
        time_limit: seconds to choose a plan, per graph.
        dropout: "replay", "save_masks", or None for the safe choice.
    """
    told: list[str] = []
    began = time.monotonic()
    try:
        if not 0 <= time_limit < float("inf"):
            raise Refusal(f"The time limit is {time_limit}: give a finite number of seconds.")
        asked = _Asked(target, _parsed(budget), compiler, dropout, time_limit)
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            document, title = _verified(asked, told)
    except (Refusal, TargetError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    except InfeasibleBudget as error:
        if as_json:
            asked_for = {"schema": _SCHEMA, "target": target.text, "compiler": compiler}
            print_json(asked_for | refusal_document(error), told, began)
        else:
            print(f"autoremat: {error}", file=sys.stderr)
        return INFEASIBLE
    if as_json:
        print_json(document, told, began)
    else:
        Console().print(verify_table(document, title))
    return 0 if document["status"] == "ok" else DIFFERENT


def _verified(asked: _Asked, told: list[str]) -> tuple[dict[str, Any], str]:
    """The document of a verification, and what the table is headed."""
    target = load(asked.target)
    optimize(
        target.model,
        asked.budget.given,
        compiler=asked.compiler,
        dropout=asked.dropout,
        time_limit=asked.time_limit,
    )
    try:
        optimized_call(target.model)
    except ValueError:
        raise Refusal(f"{target.name} cannot be planned: {' '.join(told[-1:])}") from None
    result, loss = _compared(target)
    planned = bool(report(target.model).graphs)
    parameters = sum(p.numel() for p in target.model.parameters())
    title = f"{target.name}: {type(target.model).__name__}, {parameters:,} parameters"
    return _document(asked, result, loss, planned), title


def _parsed(budget: str) -> Budget:
    try:
        return Budget.parse(budget_argument(budget))
    except ValueError as error:
        raise Refusal(str(error)) from error


def _compared(target: Target) -> tuple[Verification, float]:
    """The verification, and the loss of the last step."""
    losses: list[float] = []
    keywords: Mapping[str, Any] = target.keywords

    def loss_of(output: Any) -> torch.Tensor:
        loss = target.loss(output)
        losses.append(float(loss.detach()))
        return loss

    try:
        result = verify(target.model, *target.inputs, loss_fn=loss_of, **keywords)
    except (InfeasibleBudget, TargetError):
        raise
    except Exception as error:
        _require_sound_step(target, error)
        raise
    return result, losses[-1]


def _require_sound_step(target: Target, error: Exception) -> None:
    """Tell a target whose step fails by itself from a failure of ours."""
    try:
        output = _torch.own_call(target.model)(*target.inputs, **target.keywords)
        target.loss(output).backward()
    except TargetError:
        raise
    except Exception as own:
        raise Refusal(
            f"A training step of {target.name} fails in eager mode too: {last_line(own)}. Check "
            "that model(*inputs) and the backward of its loss run by themselves."
        ) from error


def _document(asked: _Asked, result: Verification, loss: float, planned: bool) -> dict[str, Any]:
    failures = _differences(result, loss)
    if not planned:
        failures.append("Nothing was planned, so no budget is kept: see the warning.")
    elif not result.within_budget:
        failures.append(_excess(result))
    return {
        "schema": _SCHEMA,
        "target": asked.target.text,
        "compiler": asked.compiler,
        "status": "failed" if failures else "ok",
        "failures": failures,
        "loss": loss,
        "loss_error": result.loss_error,
        "gradient_error": result.gradient_error,
        "worst_gradient": result.worst_gradient,
        "buffer_error": result.buffer_error,
        "first_difference": result.first_difference or None,
        "first_difference_source": result.first_difference_source or None,
        "tolerance": result.tolerance,
        "reference": result.reference,
        "budget": result.budget_nbytes if planned else None,
        "predicted_peak": result.predicted_peak_nbytes if planned else None,
        "measured_peak": result.measured_peak_nbytes if planned else None,
    }


def _differences(result: Verification, loss: float) -> list[str]:
    """What is not the reference's, a sentence each; a NaN is a difference."""
    failures = []
    allowed, reference = result.tolerance, result.reference
    if not result.loss_error <= allowed * max(1.0, abs(loss)):
        failures.append(f"The loss differs from {reference}'s by {result.loss_error:.2g}.")
    if not result.gradient_error <= allowed:
        failures.append(
            f"The gradient of {result.worst_gradient} differs from {reference}'s by "
            f"{result.gradient_error:.2g} of the largest gradient."
        )
    if not result.buffer_error <= allowed:
        failures.append(
            f"A buffer differs from {reference}'s by {result.buffer_error:.2g} of the largest."
        )
    if result.explanation:
        failures.append(result.explanation)
    return failures


def _excess(result: Verification) -> str:
    measured, budget = format_nbytes_apart(result.measured_peak_nbytes, result.budget_nbytes)
    excess = format_nbytes(result.measured_peak_nbytes - result.budget_nbytes)
    return f"The measured peak {measured} is above the budget {budget} by {excess}."
