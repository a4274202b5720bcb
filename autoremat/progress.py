"""Where planning is, on a terminal and in a log file.

Enters: names of stages, counts of finished operations, one closing line. Leaves: lines on
standard error. On a terminal a single line is redrawn in place; anywhere else (file, CI, notebook)
plain lines are written, about one per stage, without escape codes. Guarantees: whatever ends the
`with` block, also Ctrl-C, the terminal is as before; a stream that cannot be written is given up,
planning goes on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PREFIX = "autoremat: "


class _Display(Protocol):
    """One way to show progress."""

    def stage(self, name: str, previous: str) -> None: ...

    def advance(self, name: str, done: int, total: int, unit: str) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """Context manager that shows the stages of planning.

    A `Progress` inside another one that is visible shows no stages of its own, only its closing
    line: a terminal has one owner.
    """

    def __init__(
        self,
        verbose: bool = True,
        *,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Writes nothing yet.

        Args:
            verbose: False prints nothing at all.
            stream: where to write; standard error by default.
            interval_s: seconds between two lines of one stage's counts in a log file.
            clock: seconds, monotonic.
        """
        self._verbose = verbose
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._display: _Display | None = None
        self._outer: Progress | None = None
        self._stage = ""
        self._stage_start_s = 0.0

    def __enter__(self) -> Progress:
        """Takes the stream, unless another visible `Progress` has it."""
        global _owner
        # Looked up now, not at import: tests and notebooks replace sys.stderr.
        stream = self._stream or sys.stderr
        if not self._verbose or stream is None:
            return self
        if _owner is not None:
            self._outer = _owner
            return self
        _owner = self
        if _is_terminal(stream):
            self._display = _TerminalLine(stream)
        else:
            self._display = _LogLines(stream, self._interval_s, self._clock)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restores the terminal; says in which stage an exception ended the run."""
        global _owner
        display, self._display, self._outer = self._display, None, None
        if _owner is self:
            _owner = None
        if display is None:
            return
        display.close()
        if kind is not None and self._stage:
            seconds = self._clock() - self._stage_start_s
            display.line(f"stopped in {self._stage} after {seconds:.1f} s ({kind.__name__})")

    def stage(self, name: str) -> None:
        """Begins a stage; the one before has ended.

        Args:
            name: such as "capture", "cost", "solve" or "compile".
        """
        now_s = self._clock()
        previous = f"{self._stage} took {now_s - self._stage_start_s:.1f} s" if self._stage else ""
        self._stage, self._stage_start_s = name, now_s
        if self._display is not None:
            self._display.stage(name, previous)

    def advance(self, done: int, total: int, unit: str = "ops") -> None:
        """Says that `done` of `total` parts of the current stage are finished."""
        if self._display is not None:
            self._display.advance(self._stage, done, total, unit)

    def finish(self, line: str) -> None:
        """Ends the last stage and prints one closing line, the summary."""
        self._stage = ""
        line = line.removeprefix(_PREFIX)
        if self._outer is not None and self._outer._display is not None:
            self._outer._display.line(line)
        elif self._display is not None:
            self._display.close()
            self._display.line(line)


# The visible Progress that is open now. A terminal has one cursor, hence the one global.
_owner: Progress | None = None


class _LogLines:
    """Plain lines, each complete when it is written."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._last_line_s = 0.0

    def stage(self, name: str, previous: str) -> None:
        self.line(f"{name} ({previous})" if previous else name)

    def advance(self, name: str, done: int, total: int, unit: str) -> None:
        if self._clock() - self._last_line_s >= self._interval_s:
            self.line(f"{name} {done}/{total} {unit}")

    def line(self, text: str) -> None:
        self._last_line_s = self._clock()
        _write_line(self._stream, text)

    def close(self) -> None:
        pass


class _TerminalLine:
    """One line at the bottom of a terminal, redrawn in place and gone at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: RichProgress | None = None
        self._task: TaskID | None = None

    def stage(self, name: str, previous: str) -> None:
        # Started with the first stage, inside the `with` block: an interrupt while rich hides
        # the cursor then reaches `close`, too.
        if self._live is None:
            self._live = _rich_line(self._stream)
            with _giving_up():
                self._live.start()
        if self._task is not None:
            self._live.remove_task(self._task)
        self._task = self._live.add_task(name, total=None, counts="")

    def advance(self, name: str, done: int, total: int, unit: str) -> None:
        if self._live is not None and self._task is not None:
            counts = f"{done}/{total} {unit}"
            self._live.update(self._task, completed=done, total=total, counts=counts)

    def line(self, text: str) -> None:
        if self._live is None:
            _write_line(self._stream, text)
        else:
            # Through rich, which moves its own line out of the way.
            with _giving_up():
                self._live.console.print(
                    f"{_PREFIX}{text}", markup=False, highlight=False, soft_wrap=True
                )

    def close(self) -> None:
        live, self._live, self._task = self._live, None, None
        if live is not None:
            with _giving_up():
                live.stop()


def _rich_line(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # rich itself heeds NO_COLOR. Its default spinner is not ASCII, which some terminals lack.
    return Progress(
        SpinnerColumn("line"),
        TextColumn("autoremat: {task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
        # rich would send what others print to standard output to this stream instead.
        redirect_stdout=False,
        redirect_stderr=stream is sys.stderr,
    )


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # no file at all, or a closed one
        return False


def _write_line(stream: TextIO, text: str) -> None:
    with _giving_up():
        stream.write(f"{_PREFIX}{text}\n")
        stream.flush()


def _giving_up() -> suppress:
    # A full disk, a closed pipe or an encoding without some letter must not end the training.
    return suppress(OSError, ValueError)
