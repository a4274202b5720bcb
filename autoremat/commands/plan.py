"""`autoremat plan`: what a budget costs, before a step is run.

Enters: the command's arguments. Leaves: the report on the terminal, as one JSON object, as files.
Guarantees: no step runs; of an hf target no weight is made; files are checked before planning
begins, so no long work ends in a path that cannot be written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoremat import _torch, offline
from autoremat.ask.budget import budget_argument
from autoremat.ask.sizes import sizes_argument
from autoremat.commands.arguments import PlanArguments, Refusal
from autoremat.commands.exits import BAD_INPUT, INFEASIBLE
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.outputs import check_outputs, print_report, report_document, write_outputs
from autoremat.commands.telling import print_json, refusal_document, tell, warnings_told
from autoremat.errors import InfeasibleBudget
from autoremat.progress import Progress
from autoremat.reporting import Fact, Report
from autoremat.setup.asked import TrainingSetup
from autoremat.setup.optimizers import optimizer_of
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.hf import load
from autoremat.targets.target import Target, TargetError, last_line

BESIDE = "a function beside the model: what it saves and allocates is not in this plan"


def run(
    target: TargetArguments,
    asked: PlanArguments,
    outputs: Mapping[str, Path],
    *,
    as_json: bool,
    force: bool,
) -> int:
    """Do what the command says and return its exit code.

    Args:
        target: where model and batch come from.
        asked: what to plan for.
        outputs: files to write, by "report", "html", "csv", "snapshot" or "trace".
        as_json: one JSON object in place of the summary.
        force: whether files that are not ours may be replaced.
    """
    told: list[str] = []
    began = time.monotonic()
    try:
        check_outputs(outputs, force=force)
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            report = planned(target, asked, told)
        write_outputs(report, outputs)
    except (Refusal, TargetError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    except InfeasibleBudget as error:
        if as_json:
            print_json({"target": target.text} | refusal_document(error), told, began)
        else:
            print(f"autoremat: {error}", file=sys.stderr)
        return INFEASIBLE
    if as_json:
        document = {"target": target.text} | report_document(report, outputs)
        print_json(document, told, began)
    else:
        print_report(report, outputs)
    return 0


def planned(target: TargetArguments, asked: PlanArguments, told: list[str]) -> Report:
    """The report of a target.

    Args:
        target: where model and batch come from.
        asked: what to plan for.
        told: gets what the user has to know beside the report.

    Raises:
        TargetError: if the target cannot be used.
        Refusal: if it cannot be planned as asked.
        InfeasibleBudget: if no plan fits.
    """
    asked.check()
    sizes = _ranges(asked)
    with Progress() as progress:
        progress.stage("load")
        loaded = load(_largest(target, sizes), without_weights=True)
    device = device_for(loaded, asked.device)
    keywords: dict[str, Any] = dict(loaded.keywords)
    try:
        report = offline.plan(
            loaded.model,
            *loaded.inputs,
            budget=1 << 60 if asked.budget is None else budget_argument(asked.budget),
            device=device,
            optimizer=asked.optimizer,
            setup=TrainingSetup(**asked.setup),
            code=asked.code,
            compiler=asked.compiler,
            offload=None if asked.offload is None else budget_argument(asked.offload),
            link=asked.link,
            time_limit=asked.time_limit,
            curve=asked.points,
            sizes=sizes or None,
            goal=asked.goal,
            **keywords,
        )
    except ValueError as error:
        raise Refusal(str(error)) from error
    except (InfeasibleBudget, TargetError, Refusal):
        raise
    except Exception as error:
        _require_sound_forward(loaded, error)
        raise
    return report if loaded.loss_fn is None else _without_loss(report, told)


def _ranges(asked: PlanArguments) -> dict[str, Any]:
    """Ranges of sizes, or none.

    Raises:
        Refusal: if they mean nothing.
    """
    try:
        return {} if asked.sizes is None else sizes_argument(asked.sizes)
    except ValueError as error:
        raise Refusal(f"--sizes: {error}") from error


def _largest(target: TargetArguments, sizes: Mapping[str, Any]) -> TargetArguments:
    """An hf target whose batch is the largest of its ranges, for which the plan is made."""
    words = {"batch": "batch", "sequence": "seq"}
    return replace(target, **{words[n]: said[1] for n, said in sizes.items() if n in words})


def _without_loss(report: Report, told: list[str]) -> Report:
    """The report of a model whose loss is a function beside it, which no plan of it covers."""
    tell(f"The loss is {BESIDE}. Let the model return its loss to have both planned.", told)
    return replace(report, facts=(*report.facts, Fact("Loss", BESIDE)))


def device_for(target: Target, asked: str | None) -> str | None:
    """What to plan for: as asked; else where the model is, or would be if it had weights."""
    if asked is None and target.on_meta:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def optimizer_named(target: Target, name: str | None) -> torch.optim.Optimizer | None:
    """An optimizer of the target's parameters, by name.

    Raises:
        Refusal: if no optimizer has that name.
    """
    if name is None:
        return None
    try:
        return optimizer_of(target.model, name)
    except ValueError as error:
        raise Refusal(str(error)) from error


def _require_sound_forward(target: Target, error: Exception) -> None:
    """Tell a target whose forward fails by itself from a failure of ours."""
    try:
        _torch.own_call(target.model)(*target.inputs, **target.keywords)
    except Exception as own:
        raise Refusal(
            f"The forward of {target.name} fails in eager mode too: {last_line(own)}. Check that "
            "model(*inputs) runs by itself."
        ) from error
