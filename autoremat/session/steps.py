"""One model's steps as they run: what they hold, and what the user is told of it.

Enters: the graphs as they are planned, then forwards and backwards as they begin. Leaves: a warning
as soon as a step's peak is known to be above the budget, and `Steps` of a session that plans anew
for what was found. Guarantees: what goes wrong while a step is looked into never ends the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.errors import Alone, FallbackError, FallbackWarning, OverBudgetWarning
from autoremat.memory.meter import state_of
from autoremat.memory.residents import Resident
from autoremat.memory.storage_sizes import storages_nbytes
from autoremat.memory.unseen import unseen_nbytes
from autoremat.planning.nesting import Around, Beside, placed
from autoremat.planning.part import Part, PlannedAs
from autoremat.planning.ran import Ran, as_run
from autoremat.planning.sizes import Sizes
from autoremat.planning.step import Step
from autoremat.problem.subject import Subject
from autoremat.session.blocks import Blocks
from autoremat.session.code import Code
from autoremat.session.meanwhile import Meanwhile
from autoremat.session.measured import Measured
from autoremat.session.replans import Replans
from autoremat.session.step_sizes import StepSizes
from autoremat.session.surroundings import Surroundings
from autoremat.session.telling import Told
from autoremat.watch import between
from autoremat.watch.eager_code import names_from
from autoremat.watch.ledger import (
    has_reruns,
    latest_backward,
    note_rerun,
    note_run,
    open_runs,
    owners_since,
)
from autoremat.watch.look import Look
from autoremat.watch.open_run import LetGo, Roots, Run
from autoremat.watch.present import Present

T = TypeVar("T")


@dataclass(eq=False)
class Steps:
    """Of one session: it owns the runs of its graphs in the ledger.

    Attributes:
        options: what the user asked for.
        present: finds who tells what the model and its optimizers hold, while there is a model.
        is_told: whether somebody calls `begin` before each call of the model, and lets the session
            settle before.
        offline: given if the graphs' inputs are fake: no step is going to run.
        graphs: those that were planned, and the order of their runs.
        device: of the graph that was planned last.
        resident: what that one found to be held whatever the plan.
        told: what the user was told.
        settle: plans the step anew if that is due.
        replans: how often it was planned anew, and whether that is due.
        number: of the latest step, from 1 on.
        backward: of the latest that went through a run of its graphs, or in which one began.
        tuned: what came of trying several plans, in words; "" until then.
        compiled_in: number of the step, for each time that a graph was compiled.
        step_sizes: whether all graphs of a step run at the same sizes.
        is_nested: whether each backward so far came before those of earlier runs.
        reruns_layers: whether recurrent layers in eager mode run again in the backward.
        surroundings: what is held beside the graphs.
        audit: looks into steps.
        blocks: what its graphs are of.
        measured: their peaks as CUDA's allocator counts them.
        meanwhile: what runs while graphs wait for their backward.
    """

    options: Options
    present: Callable[[], Present | None] = lambda: None
    is_told: bool = False
    offline: Offline | None = None
    graphs: Step = field(default_factory=Step, init=False)
    device: torch.device = field(default=torch.device("cpu"), init=False)
    resident: Resident = field(default=Resident(), init=False)
    settle: Callable[[], object] = field(default=lambda: None, init=False)
    is_nested: bool = field(default=True, init=False)
    reruns_layers: bool = field(default=False, init=False)
    number: int = field(default=0, init=False)
    backward: int = field(default=-1, init=False)
    tuned: str = field(default="", init=False)
    compiled_in: list[int] = field(default_factory=list, init=False)
    step_sizes: StepSizes = field(default_factory=StepSizes, init=False)
    _by_smaller: dict[str, Part] = field(default_factory=dict, init=False)  # as graphs ran last
    # By identity of a plan, the plan itself, and what is known of its runs.
    _let_go: dict[int, tuple[PlannedAs, LetGo]] = field(default_factory=dict, init=False)
    _has_noted_call: bool = field(default=False, init=False)  # since the latest backward

    def __post_init__(self) -> None:
        """Nothing is known of them yet."""
        self.told = Told(is_strict=self.options.setting.strict)
        self.replans = Replans(self)
        self.surroundings = Surroundings(self.present)
        self.audit = self.surroundings.audit
        self.measured = Measured(self)
        self.meanwhile = Meanwhile(self)
        self.blocks = Blocks(lambda: self.audit.present.modules, self.graphs.repeats.kinds)
        self.graphs.repeats.count = self.blocks.count

    @property
    def budget_nbytes(self) -> int:
        """The budget on the device of the graphs; if as little as can be, what they take."""
        if self.options.budget.is_least:
            return self.peak_nbytes
        return self.options.budget_nbytes(self.device)

    @property
    def accumulates(self) -> bool:
        """Whether gradients that exist as a step begins are needed there."""
        if self.offline is not None:
            return self.offline.has_gradients
        return self.audit.present.accumulates

    @property
    def peak_nbytes(self) -> int:
        """The highest predicted peak of the step that is known of, or 0."""
        return self.graphs.peak_nbytes(self.surroundings.now)

    @property
    def peak_to_come_nbytes(self) -> int:
        """The same, or that of a step with as many runs as are planned for, if it is higher."""
        return max(self.peak_nbytes, self.graphs.peak_to_come(self.surroundings.now))

    @property
    def is_planned(self) -> bool:
        """Whether any graph was planned."""
        return bool(self.graphs.parts)

    @property
    def is_open(self) -> bool:
        """Whether a backward through its graphs is still to come."""
        return bool(self._waiting)

    @property
    def goes_on(self) -> bool:
        """Whether a forward that begins now is of the step that is there.

        A backward of that is to come; or it is the one that runs, in which reentrant checkpoints
        take forwards again.
        """
        return bool(self._waiting) or self._is_in_backward

    @property
    def _is_in_backward(self) -> bool:
        """Whether a backward runs that went through the latest step, or in which it began."""
        return _torch.is_in_backward() and self.backward == latest_backward()

    def begin(self) -> None:
        """A training call begins: one step with those before it whose backward is to come."""
        between.close()
        waiting = self._waiting
        goes_on = bool(waiting) or self._is_in_backward
        self.number += not goes_on
        self.blocks.call_begins(goes_on=goes_on)
        self.graphs.begin(waiting, goes_on=goes_on)
        if _torch.is_in_backward():
            self.backward = latest_backward()
        else:
            self.surroundings.begin_step(is_open=goes_on)
        if not goes_on:
            self.step_sizes.begin()
            self.audit.take_turns(owner.audit for owner in owners_since(self))
            self.audit.between.taken()
            self.measured.begin()

    def notice(self) -> None:
        """Where nobody tells of steps: another one begins once a backward has come."""
        between.close()
        if self.is_told or self.offline:
            return
        waiting, runs = self._waiting, self.graphs.runs
        names = [ran.name for ran in waiting]  # mostly in the order of the runs
        is_same = runs == names or (
            runs is not None and len(runs) == len(names) and Counter(runs) == Counter(names)
        )
        # CUDA's backward has a thread of its own.
        is_elsewhere = not self.graphs.is_here and _torch.is_in_backward()
        if is_elsewhere or not is_same:
            if not (waiting or self._is_in_backward or _torch.is_compiling()):
                self.settle()
            self.begin()

    @property
    def _waiting(self) -> list[Ran]:
        """Runs of graphs, in this order, that wait for their backward."""
        return [run.ran for run in self.open_runs if run.owner is self and run.ran is not None]

    @property
    def open_runs(self) -> list[Run]:
        """Runs that wait for their backward on its device, also of others' graphs."""
        return open_runs(self.device)

    def placed(self, subject: Subject, name: str) -> tuple[Subject, Beside]:
        """A graph that is being planned, with what the step is known to hold beside it."""
        around = self.surroundings.found
        found = around.beside(Beside(self.graphs.held_nbytes(name)))
        lowered = placed(subject.lowered, found, around.room_nbytes)
        host, is_given = subject.host, bool(self.options.setting.steering.plan)
        if host is not None and not is_given:  # plans that are given are taken as they are
            host = host.less(self.graphs.waiting_nbytes(name))
        return replace(subject, lowered=lowered, host=host), found

    # --- a peak above the budget ----------------------------------------------------------------

    def settled(self) -> None:
        """It was planned anew, for what is known of it."""
        self.replans.made()
        self.graphs.provisional.clear()
        self._by_smaller.clear()
        self._let_go.clear()
        self.surroundings.settled()
        self.told.planned_anew()

    def tell_if_above(
        self,
        predicted_nbytes: int,
        *,
        is_final: bool = True,
        is_told_only: bool = False,
        alone: Alone = "",
    ) -> None:
        """Warn of a step above the budget; again only of one that is higher still.

        Args:
            predicted_nbytes: its peak.
            is_final: whether all of its forward has run.
            is_told_only: as of `Look`.
            alone: as of `OverBudgetWarning`.
        """
        if self.options.budget.is_least or predicted_nbytes <= self.budget_nbytes:
            return
        is_planned_anew = not is_told_only and alone != "inference" and self.replans.is_coming
        if is_planned_anew and self.offline:
            return
        self.told.peak(
            predicted_nbytes,
            self.budget_nbytes,
            is_final=is_final,
            is_planned_anew=is_planned_anew,
            is_leanest=(
                self.replans.none_would_fit if is_told_only else self.replans.are_exhausted
            ),
            is_planned=self.is_planned,
            alone=alone,
            accumulates=self.accumulates,
        )

    # --- what the ledger shows ------------------------------------------------------------------

    def telling(self, name: str, code: Code, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A compiled graph, which tells the step and the ledger that it runs."""
        first = self.graphs.parts[name]
        planned = first.subject.sizes if first.covered else {}
        sizes = Sizes.among(example_inputs, first.growth, planned)
        self.compiled_in.append(self.number)

        def run(*args: Any) -> Any:
            # Between buckets of DistributedDataParallel, Dynamo runs it on fake tensors.
            if _torch.is_compiling():
                return code.first(*args)
            region = _torch.checkpoint_region()
            if region and _torch.is_in_backward():  # a rerun: what it saves counts there
                again = functools.partial(self._code_of(code, name)[0], *args)
                return self.audit.reruns.run_graph(args, again)
            given = sizes.given(args)
            if _torch.is_in_backward():
                note_rerun(self)
            self.notice()
            # A rerun has to save what its run has saved: all in checkpoints run by one plan.
            plan = name if region else self.graphs.next_plan(name)
            numbers = sizes.numbers(given)
            if self.step_sizes.note(first, numbers):
                self.audit.forget()  # what the runs before this have kept by plans for smaller ones
            is_apart = bool(region) or self.step_sizes.are_several
            compiled, part = self._code_of(code, plan, {} if is_apart else numbers)
            ran = self.graphs.ran(plan, args, region)
            with self.looking():
                self.graphs.note_traffic(ran, part, self.audit.present.traffic_of_run)
                self.blocks.note_run(name, args)

            def find_part() -> Part:
                return as_run(part.at(numbers), [ran])

            is_proven = part.covered is None or part.covered.is_proven
            is_larger = not is_proven or sizes.are_beyond(given)
            self._forward_begins(ran, find_part, args, given, is_larger=is_larger)
            outputs = compiled(*args)
            note_run(
                self,
                ran,
                outputs=outputs,
                device=self.device,
                sizes=given,
                find_graph=find_part,
                behind=names_from(a.grad_fn for a in args if isinstance(a, torch.Tensor)),
                let_go=self._let_go.setdefault(id(part.planned), (part.planned, {}))[1],
            )
            self.meanwhile.eager_code_goes_on()
            return outputs

        return run

    def _code_of(
        self, code: Code, plan: str, numbers: Mapping[Any, int] = MappingProxyType({})
    ) -> tuple[Callable[..., Any], Part]:
        """What runs under a plan at sizes, and the plan that this is: another if it cannot be."""
        compiles, whole = code.compiles, self.graphs.parts[plan]
        part = whole.for_call(numbers)
        compiled, found = code.of(part)
        if part is not whole and found is not part:  # it cannot be compiled: nor is it tried again
            part = whole = replace(whole, smaller=())
            compiled, found = code.of(whole)
        if part is whole:
            self.graphs.parts[plan] = found
            self._by_smaller.pop(plan, None)
        else:
            self._by_smaller[plan] = found
        if code.compiles > compiles:
            self.compiled_in.append(self.number)
        return compiled, found

    def _forward_begins(
        self,
        ran: Ran,
        find_part: Callable[[], Part],
        args: Sequence[Any],
        sizes: tuple[int, ...],
        *,
        is_larger: bool,
    ) -> None:
        """One of its graphs is about to run: what is there already counts beside it."""
        with self.looking():
            if is_larger:
                peak_nbytes = find_part().peak_nbytes(self._account.get(ran.name, Beside()))
                self.tell_if_above(peak_nbytes, is_told_only=True)
            runs, device, before = self.open_runs, self.device, self.graphs.before(ran)
            look = self.audit.at_forward(
                runs, ran.name, find_part, args, lambda: self._account, device, sizes, before
            )
            self._learn(look, is_final=False)

    def note_end(self, outputs: Sequence[torch.Tensor]) -> None:
        """A call of the model has ended, and its backward is to come."""
        with self.looking():
            self.audit.at_end(self.open_runs, outputs, self.device)

    def backward_begins(self, roots: Roots, *, keeps_graph: bool) -> None:
        """A backward begins that may reach runs of its graphs; see `open_run.Owner`."""
        runs = self.open_runs
        if not (runs or self.is_planned):  # nobody knows yet where graphs will run
            return

        def account() -> dict[Run, tuple[Part, Beside]]:
            known = self._account
            own = (run for run in runs if run.owner is self and run.name in known)
            return {run: (run.graph, known[run.name]) for run in own if run.graph}

        with self.looking():
            device = self.device
            look = self.audit.at_backward(runs, roots, device, account, keeps_graph=keeps_graph)
            self._learn(look, is_final=True)
            if not _torch.is_in_backward():  # what the backward takes is told first if it is more
                self.meanwhile.note(self.audit.between.taken(), runs)

    def backward_ended(self) -> None:
        """A backward is over that began while its graphs waited; see `open_run.Owner`."""
        if not self._waiting:
            self.measured.end()

    def holds_more(self) -> None:
        """What a graph has returned stays in its backward; see `open_run.Owner`."""
        with self.looking():
            self.tell_if_above(self.peak_nbytes)

    def reruns_begin(self, roots: Roots) -> None:
        """A backward begins in which its graphs may run; see `open_run.Owner`."""
        self._has_noted_call = False
        with self.looking():
            if not self._waiting:
                self.surroundings.begin_step(is_open=False)
            self.audit.at_reruns(roots, self.device)

    def run_plain(self, name: str, run: Callable[[], T], given: Sequence[Any]) -> T:
        """A graph runs that keeps nothing: a reentrant checkpoint may be around it."""
        if not self._has_noted_call and has_reruns(self) and not _torch.is_in_backward():
            self._has_noted_call = True
            self.audit.arguments.around.note()
        return self.meanwhile.run_plain(name, run, given)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """What goes wrong while a step is looked into is told, and the step goes on."""
        try:
            yield
        except (OverBudgetWarning, FallbackError, FallbackWarning):
            raise  # warnings that the user has made errors
        except Exception as error:
            self.told.fall_back("AR115", cause=error, error=f"{type(error).__name__}: {error}")

    def note_eager_call(self, outputs: Sequence[Any], device: torch.device) -> None:
        """A call of the model ran in eager mode: its backward is looked into as well."""
        if not self.is_planned:
            self.device = device
        note_run(self, None, outputs=outputs, device=device)

    @property
    def _account(self) -> Mapping[str, Beside]:
        """What is beside each graph of the step by the plans of its graphs."""
        return self.graphs.beside(Around(self.surroundings.grown_nbytes), self._by_smaller)

    def _learn(self, look: Look | None, *, is_final: bool) -> None:
        """Take into account what a look has shown, and tell if the step is above the budget."""
        if look is None:
            return
        if not look.is_told_only:
            self.surroundings.learn(look, is_final=is_final)
        elif is_final and not look.is_larger:  # the account is of larger sizes than these
            self.surroundings.learn_beyond(look, look.peak_nbytes - self.peak_nbytes)
        if is_final and look.peak_nbytes > self.budget_nbytes and not self.replans.is_coming:
            self._ask_others(look.peak_nbytes)  # if they will take less, that is what is told
        self.tell_if_above(
            look.peak_nbytes,
            is_final=is_final,
            is_told_only=look.is_told_only,
            alone="eager" if look.is_apart else "",
        )

    def _ask_others(self, peak_nbytes: int) -> None:
        """No plan of its graphs takes less; those of other models that wait beside them may."""
        runs = self.open_runs
        for owner in {run.owner: None for run in runs if run.owner is not self}:
            owner.waits_beside(peak_nbytes, runs)

    def waits_beside(self, peak_nbytes: int, runs: Sequence[Run]) -> None:
        """Other models take so much in all while its graphs wait; see `open_run.Owner`."""
        with self.looking():
            self.meanwhile.note(peak_nbytes, runs)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Where nobody tells of the model's optimizers: one of its parameters has made a step."""
        optimizers = self.audit.arguments.optimizers
        if optimizers.has_new_state(optimizer):
            self.note_state(storages_nbytes(state_of(optimizers.known), self.device))

    def unseen_on(self, device: torch.device, held_nbytes: int) -> int:
        """What the allocator gives away beyond tensors, of which a step holds so much there.

        As the step was planned first: what its own plans leave behind changes no other.
        """
        known = self.audit.unseen
        if self.offline is None and device not in known:
            is_alone = _torch.job_store() is None
            known[device] = unseen_nbytes(device, held_nbytes, is_alone=is_alone)
        return known.get(device, 0)

    def note_state(self, nbytes: int) -> None:
        """The state of the model's optimizers is so large now: it may not have been planned for."""
        self.surroundings.note_resident(max(0, nbytes - self.resident.parts.optimizer_nbytes))

    def leave_layer_eager(self, layer: torch.nn.Module, results: Any) -> None:
        """Tell that layers of a kind run in eager mode between the planned graphs."""
        region = _torch.checkpoint_region()
        if region and _torch.is_in_backward():  # a rerun: the run before it is known
            return
        self.surroundings.eager_results.note(results)
        trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        gradient_nbytes = storages_nbytes(trainable, trainable[0].device) if trainable else 0
        self.graphs.ran_eagerly(f"layer {id(layer)}", gradient_nbytes, region)
        self.told.fall_back("AR109", kind=type(layer).__name__)
