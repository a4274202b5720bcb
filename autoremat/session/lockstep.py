"""Ranks that call one model in lockstep: they agree before they compile, and begin together.

Enters: at a model's first training call, what each rank was asked for and what it holds. Leaves:
options and bytes that are the same on all of these ranks; at the end of the first compile, the
refusal of one rank as that of all. Guarantees: only ranks that call the model whenever one of them
does are waited for, and never inside a compile; none longer than the process group's timeout.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

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
        own = _held_nbytes(find_resident(device))
        budget_nbytes = options.budget_nbytes(device)
        said = {"asked": options.asked(), "budget": budget_nbytes, "resident": own}
        heard = meet(ranks, json.dumps(said), _agreement)
        if heard is None:
            return cls((), options)
        agreement = json.loads(heard)
        if "difference" in agreement:
            raise SteeringError(agreement["difference"])
        budget = replace(options.budget, size_nbytes=agreement["budget"], share=Fraction(0))
        return cls(ranks, replace(options, budget=budget), agreement["resident"] - own)

    def is_due(self, model: nn.Module) -> bool:
        """Whether the ranks have to meet anew: one has failed, or a wrapper has come since."""
        came_later = not self.ranks and bool(_torch.wrapping_ranks(model))
        return self.has_failed or (came_later and shared_store() is not None)

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

    def _before_run(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph that runs once no rank refuses."""

        def run(*args: Any) -> Any:
            if not _torch.is_compiling():
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


def _held_nbytes(resident: Resident) -> int:
    """Without the batch, whose size may differ between ranks as its shapes do."""
    return resident.nbytes - resident.parts.batch_nbytes


def _agreement(said: Mapping[int, str]) -> str:
    heard = {rank: json.loads(text) for rank, text in said.items()}
    (first, reference), *others = heard.items()
    for rank, found in others:
        for name, asked in found["asked"].items():
            there = reference["asked"].get(name)
            if asked != there:
                difference = (
                    f"Rank {rank} was asked for {name}={asked}, rank {first} for {name}={there}: "
                    "ranks that train one model together need one plan. Call optimize with the "
                    "same arguments on all ranks; only the budget may differ, of which the "
                    "smallest counts."
                )
                return json.dumps({"difference": difference})
    return json.dumps(
        {
            "budget": min(found["budget"] for found in heard.values()),
            "resident": max(found["resident"] for found in heard.values()),
        }
    )


def _encoded(error: Exception) -> str:
    """An error for other ranks: how many bytes it asks for, and the error itself."""
    needed_nbytes = error.smallest_peak_nbytes if isinstance(error, InfeasibleBudget) else 0
    if not isinstance(error, _OURS):
        text = " ".join(str(error).split())
        reason = f"failed at its first training step: {type(error).__name__}: {text:.{_LONGEST}}"
        error = RankError((distributed.get_rank(),), reason)
    return json.dumps([needed_nbytes, base64.b64encode(pickle.dumps(error)).decode()])


def _verdict(said: Mapping[int, str]) -> str:
    """The refusal of the rank that needs most, with who refuses; else whether there is a graph."""
    errors = {rank: json.loads(t) for rank, t in said.items() if t not in (_READY, _NO_GRAPH)}
    if not errors:
        return _READY if _READY in said.values() else _NO_GRAPH
    most = max(errors, key=lambda rank: (errors[rank][0], -rank))
    return json.dumps([errors[most][1], sorted(errors)])


def _decoded(heard: str) -> Exception:
    error, ranks = json.loads(heard)
    return on_ranks(pickle.loads(base64.b64decode(error)), tuple(ranks))
