"""`autoremat fit`: the largest and the fastest batch within a budget, before a step is run.

Enters: the command's arguments. Leaves: the answer on the terminal, as one JSON object, as files.
Guarantees: no step runs; files are checked before planning begins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoremat.ask.budget import budget_argument
from autoremat.commands.arguments import FitArguments, Refusal
from autoremat.commands.exits import BAD_INPUT, INFEASIBLE
from autoremat.commands.files import check_writable, write_whole
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.plan import BESIDE, device_for, optimizer_named
from autoremat.commands.telling import print_json, refusal_document, tell, warnings_told
from autoremat.errors import InfeasibleBudget
from autoremat.sizing import plot, text
from autoremat.sizing.fit import fit
from autoremat.sizing.model import Fit
from autoremat.targets.arguments import TargetArguments
from autoremat.targets.sized import BATCH, SEQUENCE, load_sized
from autoremat.targets.target import TargetError

_LENGTHS = 4  # of `--over batch,sequence`: each half of the one before
_RENDER: Mapping[str, tuple[Callable[[Fit], str], str]] = {
    "svg": (plot.plot, plot.MARK),
    "html": (plot.page, plot.MARK),
    "csv": (text.csv, text.HEADER),
}


def run(
    target: TargetArguments,
    asked: FitArguments,
    outputs: Mapping[str, Path],
    *,
    as_json: bool,
    force: bool,
) -> int:
    """Do what the command says and return its exit code.

    Args:
        target: where model and batch come from.
        asked: what to find.
        outputs: files to write, by "svg", "html" or "csv".
        as_json: one JSON object in place of the text.
        force: whether files that are not ours may be replaced.
    """
    told: list[str] = []
    began = time.monotonic()
    try:
        for name, out in outputs.items():
            check_writable(out, _RENDER[name][1].encode(), force=force)
        lengths = _lengths(target, asked, outputs)
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            fits = [_fitted(replace(target, seq=length), asked, told) for length in lengths]
        for name, out in outputs.items():
            write_whole(out, _RENDER[name][0](fits[0]).encode())
    except (Refusal, TargetError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    except InfeasibleBudget as error:
        if as_json:
            print_json({"target": target.text} | refusal_document(error), told, began)
        else:
            notes = getattr(error, "__notes__", ())
            print(f"autoremat: {' '.join((str(error), *notes))}", file=sys.stderr)
        return INFEASIBLE
    if as_json:
        documents = [json.loads(found.to_json()) for found in fits]
        document = documents[0] if len(fits) == 1 else {"fits": documents, "lengths": lengths}
        print_json({"target_text": target.text} | document, told, began)
        return 0
    for length, found in zip(lengths, fits, strict=True):
        if len(fits) > 1:
            print(f"Sequences of {length} tokens, {_tokens(found, length)}")
        print(found.text())
        if len(fits) > 1:
            print()
    for name, out in outputs.items():
        print(f"{name.upper()} written to {out}")
    return 0


def _fitted(target: TargetArguments, asked: FitArguments, told: list[str]) -> Fit:
    over = BATCH if asked.is_over_both else asked.over
    loaded, make_batch, most = load_sized(target, over)
    if loaded.loss_fn is not None:
        tell(f"The loss is {BESIDE}. Let the model return its loss to have both planned.", told)
    limits = [size for size in (most, asked.most) if size is not None]
    try:
        return fit(
            loaded.model,
            make_batch,
            budget_argument(asked.budget),
            over=over,
            global_batch=asked.global_batch,
            device=device_for(loaded, asked.device),
            optimizer=optimizer_named(loaded, asked.optimizer),
            compiler=asked.compiler,
            reserve=asked.reserve,
            most=min(limits, default=None),
            multiple_of=asked.multiple_of,
            points=asked.points,
            time_limit=asked.time_limit,
        )
    except (InfeasibleBudget, TargetError):
        raise
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from error


def _lengths(
    target: TargetArguments, asked: FitArguments, outputs: Mapping[str, Any]
) -> Sequence[int]:
    """The lengths of sequences for which the batch is asked."""
    if not asked.is_over_both:
        return [target.seq]
    if not target.is_hf:
        raise Refusal(f"--over {BATCH},{SEQUENCE} is for hf: targets: give one of the two.")
    if outputs:
        raise Refusal(f"--{next(iter(outputs))} shows one curve: give --over {BATCH} and --seq.")
    return [target.seq >> n for n in range(_LENGTHS) if target.seq >> n]


def _tokens(found: Fit, length: int) -> str:
    best = found.fastest
    return f"at best {best.per_second * length:.0f} tokens per second, by a batch of {best.size}"
