"""Where planning is, on a terminal and in a log file.

Enters: names of stages, counts of finished operations, one closing line. Leaves: lines on
standard error. On a terminal a single line is redrawn in place; anywhere else (file, CI, notebook)
plain lines are written, without escape codes: one when a stage begins, and one about every 10 s
of what it is doing. Guarantees: whatever ends the `with` block, also Ctrl-C, the terminal is as
before; a stream that cannot be written is given up, planning goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PREFIX = "autoremat: "


class Progress:
    """Context manager that shows the stages of planning.

    A `Progress` inside another one that is visible shows no stages of its own, only its closing
    line: a terminal has one owner. One that is entered again goes on where it is.
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
            interval_s: seconds between two lines of one stage in a log file, at least; at most an
                eighth more, where the interpreter is free to write.
            clock: seconds, monotonic.
        """
        self._verbose = verbose
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._display: _LogLines | _TerminalLine | None = None
        self._outer: Progress | None = None
        self._stage = ""
        self._stage_start_s = 0.0
        self._closing = ""
        self._before: list[Progress | None] = []  # what was current, each time this was entered

    def __enter__(self) -> Progress:
        """Takes the stream, unless another visible `Progress` has it."""
        global _owner
        self._before.append(_current.get())
        _current.set(self)
        if len(self._before) > 1:
            return self
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
        """Prints the closing line, or in which stage an exception ended the run."""
        global _owner
        _current.set(self._before.pop())
        if self._before:
            self._close_with(kind)
            return
        display = self._display
        if display is not None:
            display.close()
        self._close_with(kind)
        if display is not None and kind is not None and self._stage:
            seconds = self._clock() - self._stage_start_s
            display.line(f"stopped in {self._stage} after {seconds:.1f} s ({kind.__name__})")
        self._display, self._outer, self._stage = None, None, ""
        if _owner is self:
            _owner = None

    def _close_with(self, kind: type[BaseException] | None) -> None:
        line, self._closing = self._closing, ""
        shown_by = self._display or (self._outer._display if self._outer is not None else None)
        if line and kind is None and shown_by is not None:
            shown_by.line(line)

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
        """One closing line, the summary: printed when the block ends, unless by an exception."""
        self._closing = line.removeprefix(_PREFIX)


# The visible Progress that is open now. A terminal has one cursor, hence the one global.
_owner: Progress | None = None

_current: ContextVar[Progress | None] = ContextVar("autoremat_progress", default=None)


@contextmanager
def during(name: str) -> Iterator[Progress]:
    """A stage of the current `Progress` inside the one that it is in, which goes on afterwards."""
    progress = current()
    around = progress._stage
    progress.stage(name)
    yield progress
    if around:
        progress.stage(around)


def current() -> Progress:
    """The `Progress` that is open around the caller; a silent one if none is."""
    return _current.get() or Progress(verbose=False)


class _LogLines:
    """Plain lines, each complete when it is written; `beat` also while nobody calls."""

    def __init__(self, stream: TextIO, interval_s: float, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._last_line_s = self._stage_start_s = 0.0
        self._doing, self._has_counts = "", False
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None

    def stage(self, name: str, previous: str) -> None:
        self._stage_start_s = self._clock()
        self._doing, self._has_counts = name, False
        self.line(f"{name} ({previous})" if previous else name)
        if self._watch is None:
            self._watch = threading.Thread(
                target=self._beat_until_the_end, name="autoremat beat", daemon=True
            )
            with suppress(RuntimeError):  # no more threads: then only what calls is told of
                self._watch.start()

    def advance(self, name: str, done: int, total: int, unit: str) -> None:
        self._doing = f"{name} {done}/{total} {unit}"
        if total and not self._has_counts:
            self._has_counts = True
            self.line(self._doing)
        self.beat()

    def beat(self) -> None:
        """Says what goes on, where nothing was said for a while."""
        now_s = self._clock()
        if now_s - self._last_line_s >= self._interval_s:
            self.line(f"{self._doing}, {now_s - self._stage_start_s:.0f} s so far")

    def line(self, text: str) -> None:
        with self._writing:
            self._last_line_s = self._clock()
            _write_line(self._stream, text)

    def close(self) -> None:
        self._ended.set()
        if self._watch is not None and self._watch.is_alive():
            self._watch.join(timeout=1.0)  # it may wait for a reader of the stream

    def _beat_until_the_end(self) -> None:
        while not self._ended.wait(self._interval_s / 8):
            self.beat()


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
