"""`autoremat show`: a stored report on the terminal, and as files for other tools.

Enters: the command's arguments. Leaves: the summary or one JSON object on stdout, messages on
stderr, the files asked for, and the exit code. Guarantees: torch is not imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from autoremat.commands.arguments import Refusal
from autoremat.commands.exits import BAD_INPUT
from autoremat.commands.files import read_text
from autoremat.commands.interrupt import leaving_at_once
from autoremat.commands.outputs import (
    check_outputs,
    print_report,
    report_document,
    write_outputs,
)
from autoremat.reporting import Report, ReportError


def run(path: Path, outputs: Mapping[str, Path], *, as_json: bool, force: bool) -> int:
    """Do what the command says and return its exit code.

    Args:
        path: the report's file.
        outputs: files to write, by "html", "csv", "snapshot" or "trace".
        as_json: one JSON object in place of the summary.
        force: whether files that are not ours may be replaced.
    """
    try:
        with leaving_at_once():
            report = _read(path)
            check_outputs(outputs, source=path, force=force)
        write_outputs(report, outputs)
    except Refusal as error:
        print(f"autoremat: {error}", file=sys.stderr)
        return BAD_INPUT
    if as_json:
        print(json.dumps(report_document(report, outputs), allow_nan=False))
    else:
        print_report(report, outputs)
    return 0


def _read(path: Path) -> Report:
    text = read_text(path)
    try:
        return Report.from_json(text)
    except ReportError as error:
        raise Refusal(f"{path}: {error}") from error
