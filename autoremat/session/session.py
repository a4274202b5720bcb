"""One budget over all graphs of one model's step.

Enters: the joint graphs that AOTAutograd hands over, one at a time, in the order in which the
step runs them. Leaves: forward and backward modules for each, and the `Report` of all. Each graph
gets what the earlier ones leave of the budget. A graph that cannot be planned runs under torch's
own partitioner, with a warning that says why (an exception if the session is strict).
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.options import THROUGHPUT
from autoremat.ask.plan_file import StoredPlan
from autoremat.call_stack import batch_finder, users_level, with_stack_room
from autoremat.elsewhere.apart import ApartError
from autoremat.elsewhere.moved import moved_to
from autoremat.elsewhere.present import DEVICE
from autoremat.emit.planned_graph import PlannedGraph, fingerprint
from autoremat.emit.split import PartitionError
from autoremat.emit.torch_split import Modules
from autoremat.errors import (
    FallbackError,
    FallbackWarning,
    InfeasibleBudget,
    OffloadError,
    OverBudgetWarning,
    RankError,
    SteeringError,
)
from autoremat.fallbacks import Unplannable
from autoremat.graph.devices import device_of
from autoremat.graph.gathering import mark_gathered
from autoremat.graph.joint_graph import copy_module
from autoremat.inductor.hook import configured
from autoremat.memory.meter import compile_begins
from autoremat.memory.residents import GivenToGraphs, Resident
from autoremat.planning.nesting import Around
from autoremat.planning.part import Part
from autoremat.planning.pipeline import graph_of, over_sizes
from autoremat.planning.ranges import Narrowed, corner_of, lows_of, names_of
from autoremat.progress import Progress
from autoremat.reporting import Report
from autoremat.session.at_hand import AtHand
from autoremat.session.call_sizes import ranges_now
from autoremat.session.capturing import Capturing
from autoremat.session.code import Code, Written, written
from autoremat.session.first_plan import first_part
from autoremat.session.op_by_op import NotCompiled, Uncompiled, needs_its_plan
from autoremat.session.recalling import Recalling, Remarks
from autoremat.session.reports import line_of, report_of, stored_plan_of
from autoremat.session.settling import count_optimizer, count_unseen, note_allocated, plan_anew
from autoremat.session.stating import found_before, stated
from autoremat.session.steps import Steps
from autoremat.session.subranges import Subranges
from autoremat.session.telling import log_if_smaller_batch_follows
from autoremat.session.throughput import Rates
from autoremat.session.tuning import Tuning
from autoremat.watch.ledger import noting_returned

# What ends a compile; warnings are among it, which the user has made errors.
_OF_PLANNING = (
    *(InfeasibleBudget, SteeringError, FallbackError, FallbackWarning, ApartError, OffloadError),
    torch.OutOfMemoryError,
)


class Session:
    """Plans the graphs of one model under one budget."""

    def __init__(
        self,
        steps: Steps,
        resident: Callable[[torch.device], Resident] | None = None,
        *,
        refuses: bool = True,
    ) -> None:
        """Plan under the options of the steps.

        Args:
            steps: the model's, of which nothing is planned yet.
            resident: tells what the step holds whatever the plan.
            refuses: whether a budget that cannot be met is an error; otherwise a warning.
        """
        self.steps = steps
        self.told = steps.told
        self.options = options = steps.options
        self.measured_peak_nbytes: int | None = None
        self.progress = Progress(options.verbose)
        self.agreeing: Callable[[Session], AbstractContextManager[object]] = nullcontext
        self.agreed: Callable[[Resident], Resident] = lambda found: found
        self.before_run: Callable[[Session, Callable[..., Any]], Callable[..., Any]] | None = None
        self._planned: defaultdict[str, list[PlannedGraph]] = defaultdict(list)
        self._remarks = Remarks()
        self._setting = options.setting
        self.capturing = Capturing(options, runs=steps.offline is None)
        self._given = GivenToGraphs()
        self._find_resident = resident or self._resident_given
        self._refuses = refuses
        self._at_hand = AtHand()
        self._narrowed: set[tuple[str, str]] = set()  # ranges of which was told, and where
        self._unplannable: set[str] = set()  # graphs that failed to compile as planned
        self.uncompiled = Uncompiled()
        self.codes: dict[str, Code] = {}  # by graph
        self._graphs: dict[str, _torch.DynamoGraph] = {}
        self._fingerprints: dict[str, str] = {}  # of joint graphs
        self._settling = threading.RLock()
        self._tuning = Tuning(steps, self._graphs, self._take, self.progress)
        self._subranges = Subranges(steps, self._graphs)
        self._rates = Rates(steps, self._graphs)
        self._recalling = Recalling(
            steps, self._graphs, self.capturing, self._remarks, self.progress, self._note
        )
        settle = weakref.WeakMethod(self.settle)
        steps.settle = lambda: (found := settle()) is not None and found()

    @property
    def planned(self) -> Mapping[str, Sequence[PlannedGraph]]:
        """By fingerprint of the joint graph, its modules by each of its plans, untouched."""
        for part in self.steps.graphs.parts.values():
            _ = part.planned.whole  # of a graph that was recalled, it is made now
        return self._planned

    @property
    def compiled_draws_differently(self) -> bool:
        """Whether compiled code draws other random numbers than eager code would."""
        return self._remarks.draws_differently

    def refuse_no_more(self) -> None:
        """From now on, a budget that cannot be met is a warning."""
        self._refuses = False

    def backend_of(self, caller: Hashable, code: CodeType) -> Callable[..., Callable[..., Any]]:
        """What compiles the graphs of one of several modules: `compile`, told whose they are."""

        def compile_graph(
            module: fx.GraphModule, example_inputs: Sequence[Any]
        ) -> Callable[..., Any]:
            return self.compile(module, example_inputs, caller=caller, code=code)

        return compile_graph

    def has_compiled(self, caller: Hashable) -> bool:
        """Whether any graph of a module has been handed over."""
        return self._at_hand.has_seen(caller)

    @with_stack_room
    def compile(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        caller: Hashable = None,
        code: CodeType | None = None,
    ) -> Callable[..., Any]:
        """Compile one Dynamo graph: the body of a `torch.compile` backend.

        Args:
            module: the Dynamo graph.
            example_inputs: its inputs.
            caller: tells modules apart whose graphs the session compiles.
            code: of the call that is compiled, if somebody makes it.

        Raises:
            InfeasibleBudget: if no plan fits.
            NotCompiled: if the call is to begin again.
            FallbackError: if the session is strict and a graph cannot be planned.
        """
        compile_begins()
        self.steps.notice()
        graph = _torch.DynamoGraph(module, example_inputs, runs=self.steps.offline is None)
        self._at_hand.begin(example_inputs, graph, caller=caller, code=code)
        is_first = self._at_hand.is_first
        arguments = self.steps.audit.arguments
        arguments.note([*module.parameters(), *example_inputs])
        self._given.note(module, example_inputs, arguments.around, is_first=is_first)
        try:
            with self.progress, self.agreeing(self):
                try:
                    compiled = self._planned_or_recalled(module, example_inputs)
                except _torch.InductorError as error:
                    if isinstance(error.inner_exception, torch.OutOfMemoryError):
                        raise error.inner_exception from None
                    compiled = self._compiled_as_torch(module, example_inputs, error)
            self._at_hand.done()
            ready = self._running(self._at_hand.name, graph, compiled, example_inputs)
            return ready if self.before_run is None else self.before_run(self, ready)
        except (*_OF_PLANNING, OverBudgetWarning, RankError, NotCompiled) as error:
            log_if_smaller_batch_follows(error)
            raise _torch.passing_through(error) from None
        finally:
            self._at_hand.end()

    def _planned_or_recalled(
        self, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """A graph compiled; what another process has planned may be a first one only."""
        if not self._at_hand.is_first:
            return self.capturing.compile(module, example_inputs, self)
        return self._recalling.compile(
            *(self._at_hand.name, module, example_inputs, self, self._resident_on),
            refuses=self._refuses,
        )

    def _resident_on(self, device: torch.device) -> Resident:
        """What a device holds whatever the plan, graphs' inputs included."""
        found = self._given.beside(self._find_resident(device), device)
        return found.with_unseen(self.steps.unseen_on(device, found.nbytes))

    def _resident_given(self, device: torch.device) -> Resident:
        """Where nobody tells of the model: what its graphs are given, and what ranks agree on."""
        return self.agreed(self.given_to_graphs(device))

    def given_to_graphs(self, device: torch.device) -> Resident:
        """What the graphs so far, and the calls around them, have been given."""
        arguments = self.steps.audit.arguments
        return self._given.resident(device, arguments.units, arguments.spread_on(device))

    def _running(
        self,
        name: str,
        graph: _torch.DynamoGraph,
        compiled: Callable[..., Any],
        example_inputs: Sequence[Any],
    ) -> Callable[..., Any]:
        """A compiled graph as it is called: under the plan of each of its runs."""
        part = self.steps.graphs.parts.get(name)
        if part is None:  # without gradients: a reentrant checkpoint keeps what it returns
            return noting_returned(compiled, functools.partial(self.steps.run_plain, name))
        self._graphs[name] = graph
        self.codes[name] = Code(part, compiled, functools.partial(self._again, name))
        return self.steps.telling(name, self.codes[name], example_inputs)

    @with_stack_room
    def _again(self, name: str, part: Part) -> Callable[..., Any] | None:
        """A graph compiled by another plan, without Dynamo; None if that fails."""
        modules, graph = written(part.planned.whole), self._graphs[name]
        partitioner = Written(modules, self._fingerprints[name])
        try:
            with self.progress as progress, graph.resumed():
                progress.stage("compile")
                return self.capturing.compile(graph.copy(), graph.inputs, partitioner)
        except Exception as error:  # the step can go on as it did
            why = f"{type(error).__name__}: {error}"
            self.told.fall_back("AR116", cause=error, graph=name, error=why)
            return None

    def _compiled_as_torch(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], error: _torch.InductorError
    ) -> Callable[..., Any]:
        """Inductor could not compile what was planned: torch's own partition is next."""
        name, steps = self._at_hand.name, self.steps
        has_run = steps.goes_on or not self._at_hand.begins_call
        if not self.options.setting.strict and needs_its_plan(steps.graphs.parts.get(name), steps):
            self.uncompiled.note(error, has_run=has_run)
        steps.graphs.drop(name)
        self.told.fall_back("AR107", cause=error, graph=name, error=error)
        self._unplannable.add(name)
        try:
            return self.capturing.compile(module, example_inputs, self)
        except _torch.InductorError as again:
            self.uncompiled.note(again, has_run=has_run)
            raise

    def partition(
        self,
        module: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_later_arguments: Any,
    ) -> Modules:
        """Split one joint graph: by a plan, or as torch would."""
        untouched, name = copy_module(module), self._at_hand.name
        # Before any guard of the plan: one that leaves a single size makes its symbol a number.
        known = fingerprint(untouched)
        mark_gathered(module)
        as_torch = functools.partial(
            self.capturing.split_as_torch, untouched, joint_inputs, num_fwd_outputs, graph=name
        )
        try:
            if name in self._unplannable:
                return as_torch()
            if not joint_inputs:
                raise Unplannable("AR103")
            seen = moved_to(module, DEVICE) if self._setting.stands_in else module
            planned = self._plan(seen, num_fwd_outputs, static_lifetime_input_indices)
        except (*_OF_PLANNING, _torch.InductorError):  # that of code that is read, as of a compile
            raise
        except Unplannable as reason:
            self.told.fall_back(reason.code, graph=name, **reason.facts)
        except PartitionError as error:
            self.told.fall_back("AR106", cause=error, graph=name, error=error)
        except Exception as error:  # nothing of the user's may be lost to a defect of ours
            why = f"{type(error).__name__}: {error}"
            self.told.fall_back("AR101", cause=error, graph=name, error=why)
        else:
            self.told.warn_if_due()
            self._note(name, known, planned)
            if not self._setting.stands_in:
                return planned.forward, planned.backward
            # What was planned is on a device that is not here; on fakes any split does.
            return _torch.default_partition(
                untouched, joint_inputs, num_fwd_outputs=num_fwd_outputs
            )
        return as_torch()

    def _note(self, name: str, known: str, planned: PlannedGraph) -> None:
        """Keep a graph with its plan, untouched, by the fingerprint of its joint graph."""
        self._fingerprints[name] = known
        self._planned[known].append(planned.copied())

    def report(self) -> Report:
        """What was planned so far; what it takes itself, in the midst of a step, is none of it."""
        with _torch.real_execution():
            found = report_of(self.steps, self.measured_peak_nbytes)
            if self.options.goal != THROUGHPUT:
                return found
            with self.progress as progress:
                progress.stage("other budgets")
                return self._rates.added_to(found)

    def stored_plan(self) -> StoredPlan:
        """What was planned so far, for a file: no plan that is only tried."""
        return stored_plan_of(self.steps, instead=self._tuning.first)

    def settle(self) -> bool:
        """Plan the step anew, if the steps so far have shown more than the first plan knew.

        Asked for between two steps: then all of its graphs are known, and how often each runs.
        """
        with self._settling:
            if (peak_nbytes := self.steps.measured.taken_nbytes()) is not None:
                self.measured_peak_nbytes = peak_nbytes
                note_allocated(self.steps, peak_nbytes)
            if not self.steps.replans.is_due:
                self._tuning.before_step()
                self._divide_ranges()
                return False
            try:
                with self.progress, configured(self.options.inductor):
                    self._plan_anew()
            except (SteeringError, ApartError):  # other ranks would wait; it is planned coarser
                raise
            except Exception as error:  # the step can go on as it did
                why = f"{type(error).__name__}: {error}"
                self.told.fall_back("AR116", cause=error, graph="The step", error=why)
            self.steps.settled()
            return True

    def _divide_ranges(self) -> None:
        """Further plans for the smaller sizes of a range, where these are worth it."""
        names: Sequence[str] = ()
        try:
            if not (names := self._subranges.due()):
                return
            with self.progress, configured(self.options.inductor):
                found = self._subranges.plan(names)
                if count := sum(map(len, found.values())):
                    self.progress.finish(f"autoremat: {count} more plans for smaller sizes")
        except Exception as error:  # the step can go on as it did
            why = f"{type(error).__name__}: {error}"
            self.told.fall_back(
                "AR116", cause=error, graph=" and ".join(names) or "The step", error=why
            )
            return
        for name, parts in found.items():
            known = self._planned[self._fingerprints[name]]
            known += [written(part.planned.whole).copied() for part in parts]

    def _plan_anew(self) -> None:
        """Plans for all graphs at once; each is compiled when it runs."""
        count_optimizer(self.steps, self._find_resident(self.steps.device))
        count_unseen(self.steps)
        self.steps.replans.begin()
        self._take(plan_anew(self.steps, self._graphs))
        self.progress.finish(line_of(self.steps, self.measured_peak_nbytes))

    def _take(self, plans: Mapping[str, Sequence[Part]]) -> None:
        """From now on graphs run by these."""
        for name, parts in plans.items():
            self.codes[name].keep(parts)
            self._planned[self._fingerprints[name]] = [
                written(part.planned.whole).copied() for part in parts
            ]

    def note_measured(self, peak_nbytes: int) -> None:
        """Keep the peak of a whole step, and warn if it exceeds the budget."""
        self.measured_peak_nbytes = peak_nbytes
        steps, is_least = self.steps, self.options.budget.is_least
        if steps.is_planned and peak_nbytes > steps.budget_nbytes and not is_least:
            warning = OverBudgetWarning(peak_nbytes, steps.budget_nbytes, steps.peak_nbytes)
            warning.accumulates = steps.accumulates
            warnings.warn(warning, stacklevel=users_level())

    def _plan(
        self, module: fx.GraphModule, num_fwd_outputs: int, static: Sequence[int] | None
    ) -> PlannedGraph:
        """A graph with its plan, made for the largest sizes that were said."""
        corner, narrowed = corner_of(self._at_hand.ranges)
        for one in narrowed:
            self._tell_narrowed(one)
        if corner and ranges_now().may_be_exact:  # nobody said that it has to be so large
            try:
                found = self._planned_at(
                    copy_module(module), num_fwd_outputs, static, corner, is_tried=True
                )
                if found.figures.fits:
                    return written(found.planned.whole)
            except InfeasibleBudget:
                pass
            corner = {}
        return written(self._planned_at(module, num_fwd_outputs, static, corner).planned.whole)

    def _tell_narrowed(self, one: Narrowed) -> None:
        if (one.extent.name, one.line) not in self._narrowed:  # of each size anew: once is enough
            self._narrowed.add((one.extent.name, one.line))
            self.told.fall_back("AR119", **one.facts)

    def _planned_at(
        self,
        module: fx.GraphModule,
        num_fwd_outputs: int,
        static: Sequence[int] | None,
        corner: Mapping[Any, int],
        *,
        is_tried: bool = False,
    ) -> Part:
        """The stages in their order: capture, cost, lower, solve, rewrite, report.

        Args:
            module: the joint graph.
            num_fwd_outputs: as of `partition`.
            static: positions of inputs that stay.
            corner: by symbol, the number that it stands for; empty for those at hand.
            is_tried: whether another plan is made if this one does not fit.
        """
        name, steps = self._at_hand.name, self.steps
        with self.progress as progress, _torch.sizes_as(corner):
            progress.stage("capture")
            inputs = self._at_hand.inputs
            graph = graph_of(
                module,
                device_of(module),
                num_fwd_outputs=num_fwd_outputs,
                static_indices=[*(static or ()), *_torch.gathered_inputs(module, inputs)],
            )
            self._remarks.note_draws(graph.joint, self._setting)
            earlier = steps.graphs.earlier(name)
            resident = self._resident_on(graph.device)
            steps.device, steps.options = graph.device, steps.options.on(graph.device)
            results = steps.surroundings.eager_results
            there = found_before(graph, self._at_hand, corner, resident, results, earlier)
            steps.resident = resident.with_batch(there.grown_nbytes)
            progress.stage("cost")
            is_first = not steps.graphs.parts
            subject = stated(graph, self._setting, steps.resident, there, is_first=is_first)
            lows = lows_of(self._at_hand.ranges)
            subject = over_sizes(replace(subject, sizes=corner), lows, self._setting)
            progress.stage("solve")
            part = first_part(
                *(name, subject, there.between_nbytes, steps, self._graphs, self._at_hand.graph),
                may_refuse=self._may_refuse(),
                names=names_of(self._at_hand.ranges),
            )
            steps.graphs.add(name, part)
            self._subranges.lows[name] = lows
            self._remarks.line = line_of(steps, self.measured_peak_nbytes)
            # Gradients that exist may be gone before the backward, which tells if they are not.
            # What others held in an earlier step may be less by now, which looks will tell.
            is_first_known = steps.surroundings.found == Around() and (
                earlier or steps.replans.count or self._refuses
            )
            if is_first_known and (part.figures.fits or not is_tried):
                steps.tell_if_above(steps.peak_nbytes)
            progress.stage("compile")
            progress.finish(self._remarks.line)
        return part

    def _may_refuse(self) -> bool:
        """Whether a budget that cannot be met is an error: as training begins, or a batch is found.

        A rank that raised later than that would leave the others waiting.
        """
        begins = self._refuses and not self.steps.replans.count
        return begins or (bool(batch_finder()) and _torch.job_store() is None)
