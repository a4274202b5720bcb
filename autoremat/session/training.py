"""The plans of the modules that one budget covers.

Enters: modules and their optimizers, and each of their training calls as it begins. Leaves: the
session that the call runs under. Guarantees: between two steps, and nowhere else, another plan may
take over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.budget import LEAST, Budget
from autoremat.ask.options import Options
from autoremat.memory.residents import Resident
from autoremat.reporting import OTHERWISE, Fact, Report
from autoremat.session.lockstep import Lockstep
from autoremat.session.members import Members, kind_of
from autoremat.session.session import Session
from autoremat.session.steps import Steps
from autoremat.units import format_nbytes


@dataclass
class _Variant:
    """One plan: for steps that find gradients of these parameters, of so many bytes.

    Attributes:
        session: made it.
        gradients: by identity of their parameters, bytes.
        is_in_use: whether it has run since the newest plan was made.
    """

    session: Session
    gradients: dict[int, int]
    is_in_use: bool = False

    def __str__(self) -> str:
        peak, gradients_nbytes = self.session.steps.peak_nbytes, sum(self.gradients.values())
        beside = f"beside {format_nbytes(gradients_nbytes)} of" if gradients_nbytes else "without"
        return f"a step {beside} gradients, with a plan of its own, takes {format_nbytes(peak)}"


class Shared(NamedTuple):
    """The compiled call of modules that are alike: what one has compiled runs for all of them.

    Attributes:
        kind: what they have in common.
        compiled: called with one of them before its arguments.
    """

    kind: Hashable
    compiled: Callable[..., Any]


class Training:
    """The modules that one budget covers, and the plans of their steps.

    There are up to two plans of a step: one that adds to gradients which exist already (gradient
    accumulation) holds them twice while its backward runs. It gets a plan of its own if the
    first one leaves no room for that. So does a step beside gradients that another one has left.
    """

    def __init__(self, asked: Options) -> None:
        """No module yet; the options are not compared with any."""
        self.asked = self._options = asked
        self._lockstep: Lockstep | None = None  # from the first training call on
        self._before_leanest: Options | None = None
        self.members = Members()
        self.planning = threading.RLock()
        self.is_within_another = False  # whose plan has that of a module among its parts
        self.compiled_without: set[str] = set()  # kinds of global hooks that were absent
        self._shared: dict[tuple[Session, Hashable], Shared] = {}
        self.start_anew()

    @property
    def session(self) -> Session:
        """The session of the latest training call."""
        return self._current.session

    @property
    def highest(self) -> Session:
        """The session of the plan that takes the most, of those that steps run by."""
        return self._in_use()[0].session

    def report(self) -> Report:
        """Of the plan that takes the most, of those that steps run by; others are named."""
        first, *others = self._in_use()
        found = first.session.report()
        return replace(found, facts=(*found.facts, *(Fact(OTHERWISE, str(o)) for o in others)))

    def _in_use(self) -> list[_Variant]:
        """The plans that steps run by, the highest first; before there are any, the latest."""
        planned = [v for v in self._variants if v.is_in_use and v.session.steps.is_planned]
        return sorted(planned, key=lambda v: -v.session.steps.peak_nbytes) or [self._current]

    def add(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Any], options: Options
    ) -> None:
        """Cover these as well, under these options: what was planned is planned anew."""
        self.members.add(modules, optimizers)
        self._options = options
        self._lockstep = None  # its ranks meet anew
        self.start_anew()

    def copies(self) -> WeakSet[nn.Module]:
        """Where a copy of one of the modules is noted that is made now: steps will hold it."""
        for variant in self._variants:
            variant.session.steps.audit.forget()
        return self.members.copies

    def start_anew(self) -> None:
        """Plan at the next call, as if there had been none."""
        self._variants: list[_Variant] = []
        self._current = self._new_variant()
        self._variants.append(self._current)

    def meet_ranks(self, model: nn.Module) -> Lockstep:
        """What ranks that call a module in lockstep have agreed on, at its first training call."""
        lockstep = self._lockstep
        if lockstep is None or lockstep.is_due(model):
            if lockstep is not None and lockstep.has_failed:
                self._options = self._before_leanest or self._options
            lockstep = Lockstep.of(model, self._options, self.members.resident)
            self._lockstep, self._options = lockstep, lockstep.options
            if lockstep.ranks:
                self.start_anew()
        return lockstep

    @property
    def has_ranks(self) -> bool:
        """Whether other ranks call a module of these whenever this one does."""
        return self._lockstep is not None and bool(self._lockstep.ranks)

    def begin(self, inputs: object, caller: Hashable) -> Session:
        """A call of one of the modules begins: the session that it runs under."""
        if not self.session.steps.goes_on:
            if self.session.uncompiled.is_heeded and self.session.uncompiled.why:
                self._plan_op_by_op()
            self.members.begin_step()
            self._current = self._variant_now()
            self._current.is_in_use = True
        self.members.note_given(inputs, caller)
        self.session.steps.begin()
        return self.session

    def begin_leanest(self) -> Session:
        """The call that has begun begins again: from now on all plans are as lean as can be."""
        self._before_leanest = self._options  # which count again if the ranks have to begin anew
        self._options = replace(self._options, budget=Budget.parse(LEAST))
        self.start_anew()
        self.session.steps.begin()
        return self.session

    def _plan_op_by_op(self) -> None:
        """From now on nothing is compiled by Inductor."""
        failed = self.session
        self._options = failed.steps.options.op_by_op()
        self.start_anew()
        self.session.refuse_no_more()
        self.session.told.fall_back("AR120", error=failed.uncompiled.why)

    def shared(
        self, session: Session, module: nn.Module, make_call: Callable[[], FunctionType]
    ) -> Shared:
        """The compiled call of modules like this one under a session's plans.

        Args:
            session: plans their graphs.
            module: one of them.
            make_call: what to compile: it calls the module that it is given first.
        """
        kind = kind_of(module)
        if (session, kind) not in self._shared:
            self._shared = {key: one for key, one in self._shared.items() if self.runs(key[0])}
            call = make_call()
            backend = session.backend_of(kind, call.__code__)
            # What waits in a file has to be of a known size.
            is_static = session.steps.options.setting.offload is not None
            dynamic = False if is_static else None
            compiled = _torch.compile_apart(call, backend, dynamic=dynamic)
            self._shared[session, kind] = Shared(kind, compiled)
        return self._shared[session, kind]

    def runs(self, session: Session) -> bool:
        """Whether a session is one of those whose plans may run again."""
        return any(variant.session is session for variant in self._variants)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step: its state may be there for the first time."""
        modules = self.members.modules
        if not modules or not self.members.optimizers.has_new_state(optimizer):
            return
        session = self.session
        is_left_out = not session.steps.is_planned and not self.is_within_another
        if is_left_out and not session.told.fallbacks and modules[0].training:
            session.told.fall_back("AR114", kind=type(modules[0]).__name__)
        nbytes = self.members.state_nbytes(session.steps.device)
        for variant in self._variants:  # each of which was planned at a time of its own
            steps = variant.session.steps
            if steps is session.steps or steps.is_planned:  # else a plan will find it resident
                steps.note_state(nbytes)

    def _new_variant(self) -> _Variant:
        # Code that Dynamo has compiled holds the session. It may not hold the models in turn: no
        # garbage collector looks into code.
        itself, lockstep = weakref.ref(self.members), self._lockstep

        def resident(device: torch.device) -> Resident:
            members = itself()
            assert members is not None, "only its calls compile"
            found = members.resident(device)
            return found if lockstep is None else lockstep.resident(found)

        # Once training runs, a step that cannot be kept within the budget is warned of, not ended.
        steps = Steps(
            self._options,
            present=lambda: members if (members := itself()) and members.are_there else None,
            is_told=True,
        )
        for variant in self._variants[-1:]:  # the same allocator, and the same code around it
            steps.audit.unseen |= variant.session.steps.audit.unseen
            steps.audit.reach = variant.session.steps.audit.reach
            steps.step_sizes = variant.session.steps.step_sizes
        has_begun = lockstep is not None and lockstep.has_begun
        session = Session(steps, resident, refuses=not self._variants and not has_begun)
        session.uncompiled.is_heeded = not self.has_ranks and self._options.can_be_op_by_op
        return _Variant(session, self.members.gradient_nbytes())

    def _variant_now(self) -> _Variant:
        """The first plan that leaves room for the gradients that exist now.

        In a step with as many runs as it is made for: the latest one may have had fewer.
        """
        gradients = self.members.gradient_nbytes()
        for variant in self._variants:  # whose graphs, planned one by one, may not fit together
            variant.session.settle()
        for variant in self._variants:
            steps = variant.session.steps
            if not steps.is_planned:
                variant.gradients = gradients
                return variant
            planned = variant.gradients
            more = (max(0, nbytes - planned.get(key, 0)) for key, nbytes in gradients.items())
            is_least = steps.options.budget.is_least
            left_nbytes = steps.budget_nbytes - steps.peak_to_come_nbytes
            if is_least or sum(more) <= max(0, left_nbytes):
                return variant
        self._options = self._variants[0].session.steps.options  # "auto" is a number by now
        for variant in self._variants:
            variant.is_in_use = False
        self._variants.append(self._new_variant())
        return self._variants[-1]
