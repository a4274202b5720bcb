"""Work in a process of its own: what it changes stays there, and what it returns comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from autoremat.elsewhere.apart import ApartError, can_fork, done_apart

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs forks")

state = ["as it was"]


def test_what_is_returned_comes_back():
    """However large it is: the pipe is read while it is written."""
    assert done_apart(lambda: ("x" * 3_000_000, os.getpid())) != ("x" * 3_000_000, os.getpid())
    assert len(done_apart(lambda: "x" * 3_000_000)) == 3_000_000


def test_what_is_changed_stays_there():
    """Globals, modules, the environment."""

    def change() -> str:
        state[0] = os.environ["HOME"] = "changed"
        return state[0]

    assert done_apart(change) == "changed"
    assert state == ["as it was"]
    assert os.environ.get("HOME") != "changed"


def raising() -> None:
    raise ValueError("no such thing")


def unpicklable() -> Any:
    return lambda: 0


def ending() -> None:
    os._exit(3)


def aborting() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_is_too_slow_is_ended():
    """Nobody waits for ever for a lock that was held when the process was forked."""
    with pytest.raises(ApartError, match="no result after 0 s"):
        done_apart(lambda: time.sleep(60), limit_s=0.1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "ValueError: no such thing"),
        (unpicklable, "Can't pickle|pickle local object"),
        (ending, "ended with status 3"),
        (aborting, "ended by SIGKILL"),
    ],
)
def test_what_fails_there_is_an_error_here(function: Callable[[], Any], message: str):
    """With its reason, and this process goes on."""
    with pytest.raises(ApartError, match=message):
        done_apart(function)
