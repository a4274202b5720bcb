"""Python's stack: the user's line in it, what their code there names, and room for deep calls.

Enters: a warning to be given, or a function that calls deep. Leaves: the `stacklevel` at which the
warning names the user's line; what variables stand for; who looks for a batch that fits; the same
function, called with room below it. Guarantees: no variable lives longer because it was read.

CPython keeps the frames of Python functions in chunks of 16 KiB. A function that is called again
and again where a chunk ends maps and unmaps a chunk each time: planning a Llama of 7 billion
parameters did so 1.9 million times, half of its processor time. A frame that is larger than a chunk
gets a larger one, and what that leaves over holds the frames inside.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, GeneratorType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Of 8 bytes each: just over half a chunk of 1 MiB, whose other half serves about a thousand calls.
_SLOTS = (1 << 16) + 1024

# Whose frames are not the user's: ours, and those through which we are called.
_BETWEEN = frozenset({"autoremat", "contextlib", "torch"})


# Modules whose functions call training again with a smaller batch where memory has run out.
_BATCH_FINDERS = {
    "accelerate.utils.memory": "accelerate",
    "lightning.pytorch.tuner.batch_size_scaling": "Lightning",
    "pytorch_lightning.tuner.batch_size_scaling": "Lightning",
}


def batch_finder() -> str:
    """The library that looks for a batch which fits, and calls all of this; "" if none does."""
    names = (str(frame.f_globals.get("__name__", "")) for frame in _frames())
    return next((found for name in names if (found := _BATCH_FINDERS.get(name))), "")


def _frames() -> Iterator[FrameType]:
    """Of the functions that run, the latest first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_level() -> int:
    """The `stacklevel` by which a warning that the caller gives names the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1
    return level


def named_by_users() -> Iterator[tuple[object, list[Any]]]:
    """What the user's functions that run now have in variables or name in their module.

    For each of them, the innermost first: what it is a method of, or None; and what it names. Steps
    of torch's optimizers are among them: one that calls a closure holds what is not in its state.
    """
    for frame in _frames():
        is_step = _is_of_optimizer(frame)
        if is_step or not _is_between(frame):
            names, found = frame.f_code.co_varnames[:1], _variables_of(frame)
            owner = found[0] if found and names == ("self",) else None
            named = [] if is_step else globals_of(frame.f_code, frame.f_globals)
            yield owner, [*found, *named]


def waiting_generators() -> list[weakref.ref[GeneratorType[Any, Any, Any]]]:
    """Generators of the user's that wait for a `with` block to end.

    Not those of loops: what a loader has fetched ahead is data. No frame shows which block it is
    in: this goes over all of Python's objects, if any of the user's functions that run may be in
    one.
    """
    codes = (frame.f_code for frame in _frames() if not _is_between(frame))
    if not any(map(_has_with, codes)):
        return []
    found = [thing.gen for thing in gc.get_objects() if type(thing) is _OF_WITH]
    return [weakref.ref(one) for one in found if _waiting_frame(one) is not None]


def variables_of_waiting(
    generators: Iterable[weakref.ref[GeneratorType[Any, Any, Any]]],
) -> Iterator[list[Any]]:
    """What those of these generators have in variables that wait still."""
    for reference in generators:
        one = reference()
        frame = None if one is None else _waiting_frame(one)
        if frame is not None:
            yield _variables_of(frame)


def _waiting_frame(generator: GeneratorType[Any, Any, Any]) -> FrameType | None:
    frame = None if generator.gi_running else generator.gi_frame
    return None if frame is None or _is_between(frame) else frame


def _has_with(code: CodeType) -> bool:
    """Whether there is a `with` in it; each instruction is two bytes, of which the first names it.

    No answer is kept by its code: what Dynamo has compiled lives as long as that does.
    """
    return not _ENTER_WITH.isdisjoint(code.co_code[::2])


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


_OF_WITH: type[Any] = type(_nothing())  # what holds a generator while its block runs
# LOAD_SPECIAL is Python 3.14's.
_ENTER_WITH = {dis.opmap[n] for n in ("BEFORE_WITH", "LOAD_SPECIAL") if n in dis.opmap}


def globals_of(code: CodeType, known: Mapping[str, Any]) -> list[Any]:
    """What of a module's variables some code in it names."""
    return [known[name] for name in code.co_names if name in known]


def _is_between(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in _BETWEEN


def _is_of_optimizer(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("torch.optim.")


def _variables_of(frame: FrameType) -> list[Any]:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return []  # of a module or a class: what is named there is found by its names
    if sys.version_info >= (3, 13):
        return list(frame.f_locals.values())
    # Here it is one copy, which a debugger, or code that asked for `locals()`, may have as well.
    if sys.gettrace() is not None or _may_have_copy(code):
        return []
    known = frame.f_locals
    found = list(known.values())
    # The frame keeps the copy, and with it whatever a variable stood for.
    if sys.getrefcount(known) <= _REFERENCES_TO_A_COPY:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            known.pop(name, None)
    return found


def _may_have_copy(code: CodeType) -> bool:
    """Whether a function may have asked for its variables, as `locals()` gives them.

    Nor is this answer kept.
    """
    if _GIVE_LOCALS.isdisjoint(code.co_names):
        return False  # at once: nearly all
    named = (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    return not _GIVE_LOCALS.isdisjoint(named)


_GIVE_LOCALS = frozenset({"locals", "vars", "dir", "eval", "exec"})
_REFERENCES_TO_A_COPY = 3  # the frame's, that of a variable, and that of the call which counts


def with_stack_room(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; what it calls does not cross the ends of small chunks."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        return _roomy(function, *args, **keywords)

    return call


def _roomy(function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Any:
    return function(*args, **keywords)


_roomy.__code__ = _roomy.__code__.replace(co_stacksize=_SLOTS)
