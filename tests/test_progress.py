"""What planning prints on a terminal, in a log file, and not at all."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import count, pairwise

import pytest

from autoremat.progress import Progress, during

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal that can redraw, in an environment that does not forbid it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def log_of_a_run(ops: int = 0, **options: object) -> str:
    """What a log file holds after a whole run in which each look at the clock takes a second."""
    log, seconds = io.StringIO(), count()
    with Progress(stream=log, clock=lambda: float(next(seconds)), **options) as progress:
        progress.stage("capture")
        progress.stage("cost")
        for done in range(1, ops + 1):
            progress.advance(done, ops)
        progress.stage("solve")
        progress.finish("autoremat: peak 9.8 GB -> 5.0 GB")
    return log.getvalue()


def stop_while_solving(stream: io.StringIO, error: type[BaseException]) -> None:
    """A run that ends with an exception in the stage "solve"."""
    with Progress(stream=stream, clock=lambda: 0.0) as progress:
        progress.stage("solve")
        raise error


def test_a_log_file_gets_one_plain_line_per_stage() -> None:
    """Each line is complete, without carriage returns or escape codes."""
    assert log_of_a_run() == (
        "autoremat: capture\n"
        "autoremat: cost (capture took 3.0 s)\n"
        "autoremat: solve (cost took 3.0 s)\n"
        "autoremat: peak 9.8 GB -> 5.0 GB\n"
    )


def test_a_log_file_gets_counts_at_once_and_then_about_every_ten_seconds() -> None:
    """A thousand priced operations are a few lines, with the seconds that they took so far."""
    first, *others = re.findall(r"^autoremat: cost .*/100 ops.*$", log_of_a_run(100), re.MULTILINE)
    assert first == "autoremat: cost 1/100 ops"
    assert 8 <= len(others) <= 15
    told = [re.fullmatch(r"\S+ cost (\d+)/100 ops, (\d+) s so far", line) for line in others]
    seconds = [int(found[2]) for found in told if found]
    assert len(seconds) == len(others)
    assert all(10 <= later - before <= 12 for before, later in pairwise(seconds))


def test_nothing_to_count_is_not_counted() -> None:
    """Where all operations were measured before."""
    assert "0/0" not in log_of_a_run(0)


class Waited(io.StringIO):
    """A log that can be waited for."""

    def __init__(self, wanted: str) -> None:
        """Wait for this piece of text."""
        super().__init__()
        self.wanted, self.arrived = wanted, threading.Event()

    def write(self, text: str) -> int:
        """Keep the text; note what is waited for."""
        written = super().write(text)
        if self.wanted in text:
            self.arrived.set()
        return written


def test_a_long_stage_is_told_of_though_nobody_calls() -> None:
    """A solver that says nothing for minutes; the watch ends with the block."""
    log, seconds = Waited("solve, 40 s so far"), count(step=20)
    with Progress(stream=log, interval_s=0.01, clock=lambda: float(next(seconds))) as progress:
        progress.stage("solve")
        assert log.arrived.wait(60)
    ended = log.getvalue()
    assert not [thread for thread in threading.enumerate() if "beat" in thread.name]
    assert log.getvalue() == ended


def test_a_stage_inside_another_goes_back_to_it() -> None:
    """What is called from a stage can name what it does, without a `Progress` at hand."""
    log = io.StringIO()
    with during("alone"), Progress(stream=log, clock=lambda: 0.0) as progress:
        progress.stage("solve")
        with during("read"):
            pass
    assert log.getvalue() == (
        "autoremat: solve\nautoremat: read (solve took 0.0 s)\nautoremat: solve (read took 0.0 s)\n"
    )


def test_entered_again_it_goes_on_and_closes_in_between() -> None:
    """The trace around a plan and the plan are one run."""
    log = io.StringIO()
    with Progress(stream=log, clock=lambda: 0.0) as progress:
        progress.stage("trace")
        with progress:
            progress.stage("solve")
            progress.finish("planned")
        progress.stage("compile")
    assert [line.split()[1] for line in log.getvalue().splitlines()] == [
        "trace",
        "solve",
        "planned",
        "compile",
    ]


def test_quiet_prints_nothing() -> None:
    """`verbose=False` is silent to the end, the closing line included."""
    assert log_of_a_run(100, verbose=False) == ""


def test_a_terminal_is_redrawn_and_left_clean(terminal: Terminal) -> None:
    """The cursor comes back and the closing line stands alone."""
    with Progress(stream=terminal) as progress:
        progress.stage("cost")
        progress.advance(3, 9)
        progress.finish("peak [9.8 GB] -> 5.0 GB")
    written = terminal.getvalue()
    assert HIDE_CURSOR in written
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert written.endswith("autoremat: peak [9.8 GB] -> 5.0 GB\n")


def test_no_color_is_heeded(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR a terminal gets no colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    with Progress(stream=terminal) as progress:
        progress.stage("cost")
        progress.advance(3, 9)
    codes = re.findall(r"\x1b\[([0-9;]*)m", terminal.getvalue())
    assert not [code for code in codes if re.search(r"\b[349][0-9]\b", code)]


def test_a_dumb_terminal_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TERM=dumb cannot redraw."""
    monkeypatch.setenv("TERM", "dumb")
    with Progress(stream=terminal) as progress:
        progress.stage("capture")
    assert terminal.getvalue() == "autoremat: capture\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_passes_and_says_where(error: type[BaseException]) -> None:
    """A log tells in which stage the run ended."""
    log = io.StringIO()
    with pytest.raises(error):
        stop_while_solving(log, error)
    assert log.getvalue().endswith(f"autoremat: stopped in solve after 0.0 s ({error.__name__})\n")


def test_an_exception_leaves_the_terminal_clean(terminal: Terminal) -> None:
    """The cursor comes back, and a later run can use the terminal."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            stop_while_solving(terminal, ZeroDivisionError)
    written = terminal.getvalue()
    assert written.count(SHOW_CURSOR) == written.count(HIDE_CURSOR) == 2
    assert written.endswith("(ZeroDivisionError)\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_nested_run_shows_only_its_closing_line(terminal: Terminal, is_terminal: bool) -> None:
    """A terminal has one owner; the outer stages go on afterwards."""
    stream = terminal if is_terminal else io.StringIO()
    with Progress(stream=stream) as outer:
        outer.stage("compile")
        with Progress(stream=stream) as inner:
            inner.stage("inner capture")
            inner.advance(1, 2)
            inner.finish("inner plan")
        outer.finish("outer plan")
    written = stream.getvalue()
    assert written.count("inner plan") == 1
    assert "inner capture" not in written
    assert written.endswith("autoremat: outer plan\n")


def test_a_quiet_outer_run_does_not_silence_an_inner_one() -> None:
    """Only a visible run owns the terminal."""
    log = io.StringIO()
    with Progress(False, stream=log), Progress(stream=log) as inner:
        inner.finish("inner plan")
    assert log.getvalue() == "autoremat: inner plan\n"


def test_a_stream_that_fails_does_not_end_the_run() -> None:
    """A closed log costs lines, not the training."""
    log = io.StringIO()
    with Progress(stream=log) as progress:
        log.close()
        progress.stage("capture")
        progress.finish("done")


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output stays free for the user's own data."""
    with Progress() as progress:
        progress.finish("done")
    assert capsys.readouterr() == ("", "autoremat: done\n")


def test_no_standard_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some embedded interpreters have none."""
    monkeypatch.setattr(sys, "stderr", None)
    with Progress() as progress:
        progress.stage("capture")


def test_ctrl_c_restores_a_real_terminal() -> None:
    """A process that gets SIGINT while it draws gives the cursor back."""
    program = (
        "import signal, time\n"
        # Where these tests run in a shell's background, it is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from autoremat.progress import Progress\n"
        "with Progress() as progress:\n"
        "    progress.stage('solve')\n"
        "    time.sleep(100)\n"
    )
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=environment) as run:
        os.close(theirs)
        written = _read_until(ours, b"solve")
        run.send_signal(signal.SIGINT)
        written += _read_until(ours, b"KeyboardInterrupt)")
        assert run.wait(60) != 0
    os.close(ours)
    assert SHOW_CURSOR.encode() in written
    assert b"stopped in solve" in written


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    written, deadline_s = b"", time.monotonic() + 60  # a busy machine takes that to import torch
    while wanted not in written and time.monotonic() < deadline_s:
        written += os.read(descriptor, 4096)
    return written
