"""`autoremat show`, as a user meets it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from autoremat.commands.files import OutputError, check_writable
from autoremat.reporting import Fallback, Report
from tests.commands import command_line
from tests.reporting.report_samples import layered_report

REPORT = layered_report()


def run(*arguments: object) -> Result:
    return command_line.run("show", *arguments)


def refused(*arguments: object) -> str:
    return command_line.refused("show", *arguments)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A report's file."""
    path = tmp_path / "report.json"
    path.write_text(REPORT.to_json(), encoding="utf-8")
    return path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing can be created."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    folder.chmod(0o500)
    if os.access(folder, os.W_OK):  # as root, permissions forbid nothing
        folder = Path("/proc")
    if not folder.is_dir():
        pytest.skip("no directory refuses this user")
    yield folder
    (tmp_path / "read_only").chmod(0o700)


def test_the_summary_is_printed(stored: Path) -> None:
    """In a pipe it is the plain text of the report, line by line."""
    result = run(stored)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{REPORT.summary()}\n"


def test_every_format_is_written(stored: Path, tmp_path: Path) -> None:
    """In one call; each file is what its name says, and the command tells where it is."""
    names = ("html", "csv", "snapshot", "trace")
    options = [part for name in names for part in (f"--{name}", tmp_path / f"out.{name}")]
    result = run(stored, *options)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out.html").read_text("utf-8").startswith("<!doctype html>")
    assert (tmp_path / "out.csv").read_text("utf-8").startswith("graph,name,action")
    assert pickle.loads((tmp_path / "out.snapshot").read_bytes())["device_traces"]
    assert json.loads((tmp_path / "out.trace").read_text("utf-8"))["traceEvents"]
    assert f"Page written to {tmp_path / 'out.html'}" in result.stdout
    assert len(list(tmp_path.iterdir())) == 5


def test_json_has_totals_and_values(stored: Path, tmp_path: Path) -> None:
    """One object on stdout, nothing else."""
    result = run(stored, "--json", "--csv", tmp_path / "values.csv")
    found = json.loads(result.stdout)
    assert found["predicted_peak_nbytes"] == REPORT.predicted_peak_nbytes
    assert found["is_within_budget"] is True
    assert found["gap"] == pytest.approx(REPORT.gap)
    assert found["values"][1]["action"] == "recompute"
    assert found["written"] == {"csv": str(tmp_path / "values.csv")}


def test_a_step_left_to_torch_is_shown(tmp_path: Path) -> None:
    """Without a plan there is still a verdict, in every format."""
    report = replace(REPORT, graphs=(), fallbacks=(Fallback("AR101", "Not understood."),))
    path = tmp_path / "report.json"
    path.write_text(report.to_json(), encoding="utf-8")
    result = run(path, "--html", tmp_path / "a.html", "--snapshot", tmp_path / "a.pickle")
    assert result.exit_code == 0, result.stderr
    assert "AR101: Not understood." in result.stdout


@pytest.mark.parametrize("name", ["html", "csv", "snapshot", "trace"])
def test_our_own_output_is_replaced(stored: Path, tmp_path: Path, name: str) -> None:
    """Rendering again after the next plan needs no flag."""
    out = tmp_path / "out"
    assert run(stored, f"--{name}", out).exit_code == 0
    before = out.read_bytes()
    stored.write_text(layered_report(3, 3).to_json(), encoding="utf-8")
    assert run(stored, f"--{name}", out).exit_code == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("name", ["html", "csv", "snapshot", "trace"])
def test_a_file_that_is_not_ours_is_kept(stored: Path, tmp_path: Path, name: str) -> None:
    """Unless --force gives it up."""
    out = tmp_path / "thesis.txt"
    out.write_text("three years of work", encoding="utf-8")
    message = refused(stored, f"--{name}", out)
    assert "is there already, and autoremat did not write it" in message
    assert "--force" in message
    assert out.read_text("utf-8") == "three years of work"
    assert run(stored, f"--{name}", out, "--force").exit_code == 0
    assert out.read_bytes() != b"three years of work"


def test_nothing_is_written_if_one_output_cannot_be(stored: Path, tmp_path: Path) -> None:
    """All are checked before the first is written."""
    missing = tmp_path / "nowhere" / "trace.json"
    message = refused(stored, "--html", tmp_path / "a.html", "--trace", missing)
    assert "there is no directory" in message
    assert not (tmp_path / "a.html").exists()


def test_outputs_that_cannot_be_written_are_refused(
    stored: Path, tmp_path: Path, read_only: Path
) -> None:
    """A directory, a directory that refuses files, a name that is too long."""
    assert "is a directory" in refused(stored, "--html", tmp_path)
    assert "cannot be written" in refused(stored, "--html", read_only / "a.html")
    assert "cannot be written" in refused(stored, "--html", tmp_path / ("a" * 300))


def test_a_place_is_tried_before_the_work(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions may allow what the system then refuses; nothing stays of the trial."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    check_writable(tmp_path / "a.html", b"", force=False)
    assert list(tmp_path.iterdir()) == [stored]
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(OutputError, match="cannot be written: Read-only file system"):
        check_writable(tmp_path / "a.html", b"", force=False)


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="the system has no /dev/stdout")
def test_an_output_may_be_a_pipe(stored: Path) -> None:
    command = [sys.executable, "-m", "autoremat", "show", stored, "--csv", "/dev/stdout"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\ngraph,name,action" in f"\n{ended.stdout}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_told_in_one_line(stored: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "autoremat", "show", stored, *options]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "autoremat: The result cannot be printed: No space left on device."
    ]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(stored: Path, options: list[str]) -> None:
    """As under `| head -1`: nothing on stderr."""
    command = [sys.executable, "-m", "autoremat", "show", stored, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_output_never_replaces_its_report(stored: Path, tmp_path: Path) -> None:
    """Not even with --force, nor through a link; two outputs in one file are refused as well."""
    link = tmp_path / "link.json"
    link.symlink_to(stored)
    for out in (stored, link):
        message = refused(stored, "--trace", out, "--force")
        assert "is also the report itself" in message
    message = refused(stored, "--csv", tmp_path / "a", "--html", tmp_path / "a")
    assert "--csv" in message
    assert "--html" in message
    assert Report.from_json(stored.read_text("utf-8")) == REPORT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (REPORT.to_json()[:500].encode(), "not JSON.*complete"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b'{"schema": "autoremat.problem/1"}', "found 'autoremat.problem/1'"),
        (b'{"schema": "autoremat.report/99"}', "newer autoremat"),
        (b'{"schema": "autoremat.report/1"}', "older autoremat"),
        (b"", "not JSON"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Truncated, foreign, newer, older: one line with the file's name and the reason."""
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(path))
    assert str(path) in refused(path)


def test_a_missing_report_is_refused(tmp_path: Path) -> None:
    """The system's reason is in the message."""
    assert "cannot be read: No such file" in refused(tmp_path / "none.json")


def test_help_has_examples_and_exit_codes() -> None:
    """And runs without torch, like all of the command."""
    result = run("--help")
    assert result.exit_code == 0
    assert "autoremat show report.json --html report.html" in " ".join(result.stdout.split())


def in_terminal(stored: Path, columns: int, **variables: str) -> str:
    """What the command prints on a terminal of that width."""
    program = (
        "import os, pty, sys\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'autoremat', 'show', sys.argv[1]])\n"
        "found = b''\n"
        "while True:\n"
        "    try:\n"
        "        part = os.read(terminal, 65536)\n"
        "    except OSError:\n"
        "        break\n"
        "    if not part:\n"
        "        break\n"
        "    found += part\n"
        "os.waitpid(pid, 0)\n"
        "sys.stdout.write(found.decode())\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "TERM": "xterm", "COLUMNS": str(columns)}
    done = subprocess.run(
        [sys.executable, "-c", program, stored],
        capture_output=True,
        text=True,
        check=True,
        env=environment | variables,
    )
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_narrow_terminal_gets_narrow_lines(stored: Path) -> None:
    """At 40 columns no line is longer, and nothing that matters is missing."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal(stored, 40))
    assert max(map(len, text.splitlines())) <= 40
    assert "Budget" in text
    assert "Largest saved values" in text


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_terminal_gets_colours_unless_it_asks_for_none(stored: Path) -> None:
    """The verdict is green, since the plan is within the budget; NO_COLOR leaves it bold."""
    assert "\x1b[1;32mPeak" in in_terminal(stored, 120)
    assert "\x1b[1mPeak" in in_terminal(stored, 120, NO_COLOR="1")


def test_show_needs_no_torch(stored: Path, tmp_path: Path) -> None:
    """A report is read and rendered where torch cannot be imported."""
    outputs = [f"--{name}={tmp_path / name}" for name in ("html", "csv", "snapshot", "trace")]
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from autoremat.__main__ import main\n"
        f"sys.argv = ['autoremat', 'show', {str(stored)!r}, *{outputs!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "Trace written" in done.stdout
