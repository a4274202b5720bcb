"""`torch.compile(model, backend="autoremat", options={"budget": "40GB"})`.

Enters: a Dynamo graph and the user's options; those that are not ours go on to Inductor.
Leaves: a compiled callable. Registered by entry point, so no import of autoremat is needed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx, nn

from autoremat import _torch
from autoremat.ask.budget import budget_argument
from autoremat.ask.options import BUDGET_VARIABLE, Options
from autoremat.memory.optimizers import watch_optimizers
from autoremat.session.lockstep import GraphsInLockstep
from autoremat.session.session import Session
from autoremat.session.steps import Steps

# One session per mapping of options: `torch.compile` hands over the one it was given for each of
# its graphs. Two models must not share a mapping, or they share a budget; one that was changed in
# between is another. Equal mappings are one where their graphs are of one step: as one may Dynamo
# take them, and run a graph that it compiled for one block in place of another's. A session lives
# as long as a graph that it has compiled, and its mappings with it: their identities stay theirs.
_sessions: WeakValueDictionary[int, Session] = WeakValueDictionary()
_Mappings = dict[int, tuple[object, dict[str, Any]]]  # by identity, with what was in them
_mappings: WeakKeyDictionary[Session, _Mappings] = WeakKeyDictionary()
_locksteps: WeakKeyDictionary[Session, GraphsInLockstep] = WeakKeyDictionary()

_call_numbers = itertools.count()


def autoremat(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend.

    Raises:
        ValueError: without a budget or with a malformed one, or with a `mode`.
        OSError: if a stored plan cannot be read.
        InfeasibleBudget: if no plan fits; where ranks train a model together, on one of them.
        RankError: if one of them did not come to its first graph, or failed there.
    """
    try:
        if mode not in (None, "default"):
            raise ValueError(_instead_of(mode))
        session = _session_of(options)
    except (ValueError, OSError) as error:
        raise _torch.passing_through(error) from None
    lockstep = _locksteps[session]
    try:
        compiled = session.compile(module, example_inputs)
    except Exception:
        if lockstep.has_failed:  # on all ranks: they begin anew
            _forget(session)
        raise

    def run(*args: Any) -> Any:
        lockstep.before_run(session)
        return compiled(*args)

    run.session = session  # type: ignore[attr-defined]
    return run


def session_behind(tensors: Iterable[torch.Tensor]) -> Session | None:
    """The session of graphs that were called with these parameters; the one of most of them."""
    wanted = set(map(id, tensors))

    def known(session: Session) -> int:
        return sum(id(leaf) in wanted for leaf in session.steps.audit.arguments.leaves())

    best = max(_mappings, key=lambda s: (s.steps.is_planned and known(s), known(s)), default=None)
    return best if best is not None and known(best) else None


def session_of_alike(module: nn.Module) -> Session | None:
    """The session of a block that has not run itself, but others of its model that are like it."""
    return next((session for session in _mappings if session.steps.blocks.has_alike(module)), None)


def _session_of(options: Mapping[str, Any] | None) -> Session:
    given = dict(options or {})
    if BUDGET_VARIABLE in os.environ:
        given.setdefault("budget", budget_argument(os.environ[BUDGET_VARIABLE]))
    session = _sessions.get(id(options))
    if session is not None and _mappings[session][id(options)] != (options, given):
        session = None
    if session is None or not session.steps.is_planned:
        session = _in_this_step(given) or session or _new_session(given)
        _sessions[id(options)] = session
        _mappings.setdefault(session, {})[id(options)] = (options, given)
    return session


def _in_this_step(given: dict[str, Any]) -> Session | None:
    """Whose graphs wait for their backward, with equal options: one step has one budget."""
    for session, mappings in _mappings.items():
        if session.steps.is_open and any(given == other for _, other in mappings.values()):
            return session
    return None


def _new_session(given: dict[str, Any]) -> Session:
    session = Session(Steps(Options.from_mapping(given)))
    watch_optimizers(session.steps)
    _locksteps[session] = GraphsInLockstep(session)
    return session


def _forget(session: Session) -> None:
    """Its graphs do not run: who asks with the same options gets another session."""
    for key, _ in _mappings.pop(session, {}).items():
        _sessions.pop(key, None)


def _instead_of(mode: str) -> str:
    """What to write in place of a mode, which torch.compile takes or options, never both."""
    fact = f'backend="autoremat" takes options, not mode={mode!r}.'
    known = _torch.options_of_mode(mode)
    if known is None:
        return fact
    options = ", ".join(f'"{name}": {value!r}' for name, value in known.items())
    return f'{fact} The same is options={{"budget": "40GB", {options}}}.'


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call in a frame whose code object is its own.

    Dynamo skips frames of torch's own modules, and counts recompiles per code object: models
    must not use up each other's. By file, line and name it remembers which sizes have varied: a
    name of its own keeps one model's batch from making another's symbolic.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return _with_new_name(run)


def module_call() -> FunctionType:
    """Calls the module that it is given first, in a frame as `with_own_code` makes them."""

    def run(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _torch.own_call(self)(*args, **kwargs)

    return _with_new_name(run)


def _with_new_name(run: Callable[..., Any]) -> FunctionType:
    assert isinstance(run, FunctionType)
    run.__code__ = run.__code__.replace(co_name=f"run_{next(_call_numbers)}")
    return run
