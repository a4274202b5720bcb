"""`autoremat doctor --gpu`: what plans predict on the GPU at hand, beside what it measures.

Enters: the command's arguments. Leaves: a table or one JSON object on stdout, perhaps a file of it,
and an exit code. Guarantees: what cannot be used is found before anything is measured.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from autoremat.commands.exits import BAD_INPUT, DIFFERENT
from autoremat.commands.files import OutputError, check_writable, write_whole
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.telling import print_json, warnings_told
from autoremat.cost.card import SCHEMA, Card, card_document, measure_card
from autoremat.trial.model import Trial
from autoremat.trial.run import try_device
from autoremat.trial.table import trial_table


def run(*, compiler: str, out: Path | None, as_json: bool, force: bool) -> int:
    """Do what the command says and return its exit code.

    Args:
        compiler: "inductor" or "eager".
        out: where to write what was found.
        as_json: one JSON object in place of the table.
        force: whether a file that is not ours may be replaced.
    """
    told: list[str] = []
    began = time.monotonic()
    missing = _missing()
    if missing:
        print(f"autoremat: {missing}", file=sys.stderr)
        return BAD_INPUT
    try:
        if out is not None:
            check_writable(out, SCHEMA.partition("/")[0].encode(), force=force)
        with leaving_at_once(), redirect_stdout(sys.stderr), warnings_told(told):
            card, trial = found_on(torch.device("cuda"), compiler)
        document = card_document(card, trial=asdict(trial))
        if out is not None:
            write_whole(out, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except (OutputError, ValueError, MemoryError) as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    if as_json:
        print_json(document, told, began)
    else:
        _tell(card, trial, out)
    return 0 if trial.is_sound else DIFFERENT


def found_on(device: torch.device, compiler: str) -> tuple[Card, Trial]:
    """What a device reaches, and its trial."""
    return measure_card(device), try_device(device, compiler=compiler)


def _tell(card: Card, trial: Trial, out: Path | None) -> None:
    Console().print(trial_table(card, trial))
    if out is not None:
        print(
            f"Written to {out}: plans elsewhere take it as --device {out}. Please attach it to an "
            "issue, since figures of any GPU help."
        )


def _missing() -> str:
    """Why there is no GPU to try, and what to do; "" if there is one."""
    if torch.cuda.is_available():
        return ""
    elsewhere = "To plan for a GPU that is not here: autoremat plan TARGET --device H100."
    if torch.version.cuda is None:
        return (
            f"There is no GPU to try: torch {torch.__version__} is built without CUDA. Install a "
            f"build with it (pytorch.org/get-started). {elsewhere}"
        )
    return (
        f"There is no GPU to try: torch {torch.__version__} is built for CUDA "
        f"{torch.version.cuda}, and finds no device of it. Does nvidia-smi show one, and is "
        f"CUDA_VISIBLE_DEVICES not empty? {elsewhere}"
    )
