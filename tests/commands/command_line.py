"""The command line as a user meets it: what tests of several commands call."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from autoremat.commands.app import app


def run(*arguments: object) -> Result:
    """Run `autoremat` with these arguments, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """What stderr says of input that cannot be used."""
    result = run(*arguments)
    assert result.exit_code == 1, (result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())
