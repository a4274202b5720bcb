"""How a command ends: by its exit code.

Enters: the module of a command, and what its `run` takes. Leaves: what that prints, and an exit
code: 0 for success, 1 for input that cannot be used, 2 for a budget that no plan found fits, 3 for
a verification that failed, 130 after Ctrl-C.
Guarantees: importing this needs no torch; a command is imported when it runs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from autoremat.commands.interrupt import INTERRUPTED, SENTENCE, leaving_at_once

BAD_INPUT, INFEASIBLE, DIFFERENT = 1, 2, 3


class Commands(TyperGroup):
    """Commands whose usage errors exit with 1, since 2 means that no plan fits."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command, and end with its exit code."""
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            # Both the exit code of a command and a usage error end here; the cause tells.
            if end.code == INFEASIBLE and not isinstance(end.__context__, typer.Exit):
                raise SystemExit(BAD_INPUT) from None
            raise


def run_and_exit(command: str, *args: Any, **keywords: Any) -> NoReturn:
    """Import a command's module, run it, and exit with its code."""
    try:
        with leaving_at_once():
            module = importlib.import_module(f"autoremat.commands.{command}")
        code = module.run(*args, **keywords)
        sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        typer.echo(f"autoremat: The result cannot be printed: {error.strerror}.", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        code = BAD_INPUT
    raise typer.Exit(code)
