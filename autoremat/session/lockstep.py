"""Ranks that call one model in lockstep: they agree before they compile, and begin together.

Enters: at a model's first training call, what each rank was asked for and what it holds. Leaves:
options and bytes that are the same on all of these ranks; at the end of the first compile, the
refusal of one rank as that of all. Guarantees: only ranks that call the model whenever one of them
does are waited for, none longer than the process group's timeout.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.errors import FallbackError, InfeasibleBudget, RankError, SteeringError, on_ranks
from autoremat.memory.residents import Resident, with_others
from autoremat.ranks.meeting import meet
from autoremat.ranks.store import shared_store
from autoremat.session.session import Session

_OURS = (InfeasibleBudget, SteeringError, FallbackError)  # what says the same on every rank
_READY, _NO_GRAPH = "ready", "no graph"  # what a rank says that refuses nothing
_LONGEST = 600  # characters of what other errors say to other ranks


@dataclass
class Lockstep:
    """What the ranks have agreed on, and whether they have begun.

    Attributes:
        ranks: who calls the model in lockstep; empty if nobody is known to.
        options: what is planned for.
        more_nbytes: what is resident on the rank that holds most, beyond what is on this one.
        has_begun: whether all ranks could run their first graph.
        has_failed: whether one of them could not: the next call begins anew on all of them.
        calls_left: that may still find no graph on any rank, as the first call of a sharded model.
    """

    ranks: tuple[int, ...]
    options: Options
    more_nbytes: int = 0
    has_begun: bool = False
    has_failed: bool = False
    calls_left: int = 3
    _is_heard: bool = False  # in the present call
    _asked: WeakSet[nn.Module] = field(default_factory=WeakSet)  # who calls them

    @classmethod
    def of(
        cls, model: nn.Module, options: Options, find_resident: Callable[[torch.device], Resident]
    ) -> Lockstep:
        """At a training call of the model, before anything of it is compiled.

        Raises:
            SteeringError: if the ranks were asked for different plans: naming who and the option.
            RankError: naming who did not come.
        """
        ranks = _torch.lockstep_ranks(model)
        if len(ranks) < 2:
            return cls((), options)
        device = next(model.parameters()).device
        try:
            options = options.on(device)
            own = _Said.of(options, device, find_resident(device))
        except Exception as error:
            _heard(ranks, _encoded(error), error)
            raise
        heard = _heard(ranks, json.dumps(asdict(own)))
        if heard is None:
            return cls((), options)
        agreed = _Said(**json.loads(heard))
        more_nbytes = agreed.resident_nbytes - own.resident_nbytes
        if not options.budget.is_least:
            budget = replace(options.budget, size_nbytes=agreed.budget_nbytes, share=Fraction(0))
            options = replace(options, budget=budget)
        return cls(ranks, options, more_nbytes)

    def is_due(self, model: nn.Module) -> bool:
        """Whether the ranks have to meet anew: one has failed, or others call with this one now.

        A wrapper may have come since, or the model is another one of those that share a budget.
        """
        if self.ranks or self.has_failed:
            return self.has_failed
        is_asked = model in self._asked
        self._asked.add(model)
        ranks = _torch.wrapping_ranks(model) if is_asked else _torch.lockstep_ranks(model)
        return bool(ranks) and shared_store() is not None

    def resident(self, found: Resident) -> Resident:
        """What is resident, on the rank that holds most."""
        return replace(found, parts=with_others(found.parts, self.more_nbytes))

    @contextmanager
    def beginning(self, session: Session) -> Iterator[None]:
        """A training call that plans: its first graph runs on all ranks, or on none.

        Raises:
            InfeasibleBudget: or another error of ours, which a rank has met: on all of them.
            RankError: if a rank did not come, or failed otherwise.
        """
        if not self.ranks or self.has_begun:
            yield
            return
        self._is_heard = False
        session.before_run = self._before_run
        try:
            yield
            self._begin(_READY if session.steps.is_planned else _NO_GRAPH)
        except Exception as error:
            self._begin(_encoded(error), error)
            raise
        finally:
            session.before_run = None
        if self.has_begun:
            session.refuse_no_more()  # others would wait in a collective

    def _before_run(self, session: Session, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that runs, if any is planned by then, once no rank refuses."""

        def run(*args: Any) -> Any:
            if session.steps.is_planned and not _torch.is_compiling():
                self._begin(_READY)
            return compiled(*args)

        return run

    def _begin(self, said: str, error: Exception | None = None) -> None:
        """Hear, once in a call, whether all ranks can begin; they hear of an error of this one."""
        if self._is_heard:
            return
        self._is_heard = self.has_failed = True  # unless the meeting says otherwise
        heard = meet(self.ranks, said, _verdict)
        if heard is None and error is None:
            heard = _READY
        if heard in (_READY, _NO_GRAPH):
            self.calls_left -= 1
            self.has_begun = heard == _READY or not self.calls_left
            self.has_failed = False
        elif heard and (error is None or isinstance(error, _OURS)):
            raise _decoded(heard) from error


class GraphsInLockstep:
    """The same where nobody but graphs tells of a model, as to `torch.compile`'s backend.

    Its ranks meet as they compile their first graph, before any of its graphs has run. A rank that
    has compiled it before, by itself, meets the others as it runs it in a wrapper.
    """

    def __init__(self, session: Session) -> None:
        """For the graphs of a session."""
        self._lockstep: Lockstep | None = None
        session.agreeing = self.agreeing

    @property
    def has_failed(self) -> bool:
        """Whether no graph may run: those that were compiled are to be compiled anew."""
        return self._lockstep is not None and self._lockstep.has_failed

    @contextmanager
    def agreeing(self, session: Session) -> Iterator[None]:
        """A graph is compiled.

        Raises:
            InfeasibleBudget: or another error of ours, which a rank has met: on all of them.
            RankError: if a rank did not come, or failed otherwise.
        """
        model = _outermost(session)
        if model is None:
            yield
            return
        with self._now(session, model).beginning(session):
            yield

    def before_run(self, session: Session) -> None:
        """A graph runs: it may be that others call it with this rank now, and have not before."""
        replica = _torch.active_replica()
        known = self._lockstep
        if replica is None or known is None or known.ranks or _torch.is_compiling():
            return
        with self._now(session, replica).beginning(session):
            pass

    def _now(self, session: Session, model: nn.Module) -> Lockstep:
        """What the ranks that call a module have agreed on."""
        if self._lockstep is None or self._lockstep.is_due(model):
            steps = session.steps
            self._lockstep = lockstep = Lockstep.of(model, steps.options, session.given_to_graphs)
            steps.options, session.agreed = lockstep.options, lockstep.resident
            if not lockstep.ranks and steps.audit.arguments.is_shared:
                session.refuse_no_more()  # no rank hears of it; others would wait in a collective
        return self._lockstep


def _outermost(session: Session) -> nn.Module | None:
    """The module around a graph whose calls are those of other ranks, as far as is known."""
    roots = session.steps.audit.arguments.around.roots
    replica = _torch.active_replica()
    found = [*roots, replica] if replica is not None else roots
    return next((m for m in reversed(found) if next(m.parameters(), None) is not None), None)


@dataclass(frozen=True)
class _Said:
    """What a rank says of itself, and what counts for all.

    Attributes:
        asked: what decides the plan beside the budget, by argument.
        budget_nbytes: of the whole step.
        resident_nbytes: whatever the plan, without the batch: its size may differ between ranks as
            its shapes do.
    """

    asked: dict[str, str]
    budget_nbytes: int
    resident_nbytes: int

    @classmethod
    def of(cls, options: Options, device: torch.device, resident: Resident) -> _Said:
        resident_nbytes = resident.nbytes - resident.parts.batch_nbytes
        budget_nbytes = 0 if options.budget.is_least else options.budget_nbytes(device)
        return cls(options.asked(), budget_nbytes, resident_nbytes)


def _heard(ranks: Sequence[int], said: str, error: Exception | None = None) -> str | None:
    """What the ranks agree on; None if their store has failed.

    Raises:
        SteeringError: if they cannot, or what else one of them has met.
    """
    heard = meet(ranks, said, _agreement)
    if heard and _is_refusal(heard) and (error is None or isinstance(error, _OURS)):
        raise _decoded(heard) from error
    return heard


def _agreement(texts: Mapping[int, str]) -> str:
    if any(map(_is_refusal, texts.values())):
        return _verdict({r: text if _is_refusal(text) else _READY for r, text in texts.items()})
    said = {rank: _Said(**json.loads(text)) for rank, text in texts.items()}
    first = min(said)
    for rank, found in said.items():
        difference = _difference(rank, found.asked, first, said[first].asked)
        if difference:
            return _verdict({rank: _encoded(SteeringError(difference))}, named=False)
    agreed = _Said(
        asked={},
        budget_nbytes=min(found.budget_nbytes for found in said.values()),
        resident_nbytes=max(found.resident_nbytes for found in said.values()),
    )
    return json.dumps(asdict(agreed))


def _difference(rank: int, asked: Mapping[str, str], first: int, there: Mapping[str, str]) -> str:
    """The first argument that differs between two ranks, in words."""
    for name, value in asked.items():
        if value != there[name]:
            return (
                f"Rank {rank} was asked for {name}={value}, rank {first} for {name}={there[name]}: "
                "ranks that train one model together need one plan. Call optimize with the same "
                "arguments on all ranks; only the budget may differ, of which the smallest counts."
            )
    return ""


def _encoded(error: Exception) -> str:
    """An error for other ranks: how many bytes it asks for, and the error itself."""
    needed_nbytes = error.smallest_peak_nbytes if isinstance(error, InfeasibleBudget) else 0
    if not isinstance(error, _OURS):
        text = " ".join(str(error).split())
        reason = f"failed at its first training step: {type(error).__name__}: {text:.{_LONGEST}}"
        error = RankError((distributed.get_rank(),), reason)
    return json.dumps([needed_nbytes, base64.b64encode(pickle.dumps(error)).decode()])


def _is_refusal(text: str) -> bool:
    """Whether a rank has said an error, or all of them hear one."""
    return text.startswith("[")


def _verdict(said: Mapping[int, str], *, named: bool = True) -> str:
    """The refusal of the rank that needs most, with who refuses; else whether there is a graph.

    Args:
        said: by each rank.
        named: whether the error does not name the rank itself.
    """
    errors = {rank: json.loads(text) for rank, text in said.items() if _is_refusal(text)}
    if not errors:
        return _READY if _READY in said.values() else _NO_GRAPH
    most = max(errors, key=lambda rank: (errors[rank][0], -rank))
    return json.dumps([errors[most][1], sorted(errors) if named else []])


def _decoded(heard: str) -> Exception:
    encoded, ranks = json.loads(heard)
    error: Exception = pickle.loads(base64.b64decode(encoded))
    return on_ranks(error, tuple(ranks)) if ranks else error
