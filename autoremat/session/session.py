"""One budget over all graphs of one model's step.

Enters: the joint graphs that AOTAutograd hands over, one at a time, in the order in which the
step runs them. Leaves: forward and backward modules for each, and the `Report` of all. Each graph
gets what the earlier ones leave of the budget. A graph that cannot be planned runs under torch's
own partitioner, with a warning that says why (an exception if the session is strict).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.options import Offline, Options
from autoremat.ask.plan_file import StoredPlan
from autoremat.call_stack import with_stack_room
from autoremat.emit.op_by_op import compile_eager
from autoremat.emit.planned_graph import PlannedGraph, fingerprint
from autoremat.emit.split import PartitionError
from autoremat.emit.torch_split import Modules, split_as_torch
from autoremat.errors import (
    FallbackError,
    FallbackWarning,
    InfeasibleBudget,
    OverBudget,
    OverBudgetWarning,
    SteeringError,
)
from autoremat.explain.environment import environment_facts
from autoremat.explain.graph_report import explain, facts_of_refusal
from autoremat.fallbacks import Unplannable
from autoremat.graph.devices import device_of, devices_of
from autoremat.graph.inline_regions import write_out_regions
from autoremat.graph.joint_graph import JointGraph, copy_module
from autoremat.graph.random_draws import makes_seeds
from autoremat.inductor.hook import Partitioner, compile_with_partition
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.meter import storages_nbytes
from autoremat.memory.optimizers import state_of
from autoremat.memory.residents import GivenToGraphs, Resident, resident_of_step, with_others
from autoremat.planning.asked import store
from autoremat.planning.choice import Choice
from autoremat.planning.curve import Curve, curve_of
from autoremat.planning.nesting import Around, Beside
from autoremat.planning.part import Part
from autoremat.planning.pipeline import Graph, Setting, choose, graph_of, search, state
from autoremat.planning.sharing import ALONE, Split
from autoremat.planning.sizes import (
    GUARDED_COMPILES,
    MANY_COMPILES,
    Sizes,
    keep_to_sizes,
    room_to_grow,
)
from autoremat.planning.step import Step
from autoremat.problem.lower import shell_of
from autoremat.problem.subject import Subject
from autoremat.progress import Progress
from autoremat.reporting import LEFT_OUT, Fact, GraphReport, Report, one_line
from autoremat.session.compile_names import compile_name, compile_number, frame_name
from autoremat.session.surroundings import Surroundings
from autoremat.session.telling import Told
from autoremat.watch.audit import Look, Present, names_of, sizes_of_runs
from autoremat.watch.eager_code import held_nbytes
from autoremat.watch.ledger import Roots, Run, note_run, open_runs

REPLANS = 2  # of a step whose graphs do not fit together; the second if others were found then

_session_numbers = itertools.count()


class Session:
    """Plans the graphs of one model under one budget."""

    def __init__(
        self,
        options: Options,
        resident: Callable[[torch.device], Resident] | None = None,
        *,
        refuses: bool = True,
        offline: Offline | None = None,
        replans: int = 0,
        split: Split = ALONE,
        around: Around | None = None,
        present: Callable[[], Present | None] = lambda: None,
        is_told_of_steps: bool = False,
    ) -> None:
        """Plan under these options.

        Args:
            options: what the user asked for.
            resident: tells what the step holds whatever the plan.
            refuses: whether a budget that cannot be met is an error; otherwise a warning.
            offline: given if the graphs' inputs are fake and only the plans are wanted.
            replans: how often the step may be planned anew; `replanned` is then asked for before
                each step.
            split: how the graphs share the budget, where an earlier session has found out.
            around: what the step holds beside them, where an earlier session has found out.
            present: finds who tells what the model and its optimizers hold, while there is a model.
            is_told_of_steps: whether somebody calls `begin_step` before each call of the model.
        """
        self.options = options
        self.key = f"{os.getpid()}-{os.urandom(8).hex()}-{next(_session_numbers)}"
        self.told = Told(is_strict=options.strict)
        self.planned: defaultdict[str, list[PlannedGraph]] = defaultdict(list)
        self.measured_peak_nbytes: int | None = None
        self.progress = Progress(options.verbose)
        self.compiled_draws_differently = False  # than eager code would
        self._setting = Setting.of(options, None if offline is None else offline.spec)
        self._given = GivenToGraphs()
        self._find_resident = resident or self._given.resident
        self._refuses = refuses
        self._offline = offline
        self._replans = replans
        self._split = split
        self._is_told_of_steps = is_told_of_steps
        self._first_frame = ""
        self._compiled, self._part = "", 0
        self._inputs: Sequence[Any] = ()  # of the graph that is being compiled
        self._unplannable: set[str] = set()  # graphs that failed to compile as planned
        self._step = Step()
        self._surroundings = Surroundings(around, present)
        self.audit = self._surroundings.audit
        self._find_present = present
        self._whole: Session | None = None
        self._whole_is_for: Hashable = None  # the step that it, or None, is the answer for
        self._device = torch.device("cpu")
        self._resident = Resident()

    @with_stack_room
    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph: the body of a `torch.compile` backend.

        Raises:
            InfeasibleBudget: if no plan fits.
            FallbackError: if the session is strict and a graph cannot be planned.
        """
        self._first_frame = self._first_frame or frame_name()
        # Of one Dynamo graph, DistributedDataParallel makes several, one for each bucket.
        self._part = self._part + 1 if self._compiled == compile_name() else 0
        self._inputs = example_inputs
        self._notice_step()
        is_first = frame_name() == self._first_frame and not self._part
        self._given.note(module, example_inputs, is_first=is_first)
        op_by_op = self.options.compiler == "eager" or self._offline is not None
        executor = compile_eager if op_by_op else None
        try:
            with self.progress:
                try:
                    compiled = self.compile_through(module, example_inputs, self, executor)
                except _torch.InductorError as error:
                    self._leave_to_torch(error)
                    compiled = self.compile_through(module, example_inputs, self, executor)
            self._compiled = compile_name()
            return self._telling(self._graph_name(), compiled, example_inputs)
        except (
            InfeasibleBudget,
            SteeringError,
            FallbackError,
            FallbackWarning,
            OverBudgetWarning,
        ) as error:
            raise _torch.passing_through(error) from None
        finally:
            self._inputs = ()

    def compile_through(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        partitioner: Partitioner,
        executor: Callable[..., Any] | None,
    ) -> Callable[..., Any]:
        """A Dynamo graph, captured as this session does, and split by whoever is given.

        Args:
            module: the Dynamo graph.
            example_inputs: its inputs.
            partitioner: splits the joint graph.
            executor: compiles forward and backward; None for Inductor's kernels.
        """
        write_out_regions(module)
        if self.options.compiler == "eager":
            backend = _torch.aot_autograd(
                fw_compiler=executor,
                bw_compiler=executor,
                partition_fn=partitioner.partition,
                keep_inference_input_mutations=True,
            )
            compiled: Callable[..., Any] = backend(module, example_inputs)
            return compiled
        return compile_with_partition(
            module,
            example_inputs,
            partitioner=partitioner,
            config=self.options.inductor,
            executor=executor,
        )

    def _telling(
        self, name: str, compiled: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The compiled graph, which tells the step and the ledger that it runs."""
        part = self._step.parts.get(name)
        if part is None:
            return compiled
        sizes = Sizes.among(example_inputs, part.growth)

        def run(*args: Any) -> Any:
            # Between buckets of DistributedDataParallel, Dynamo runs it on fake tensors.
            if _torch.CompileContext.current_compile_id() is not None:
                return compiled(*args)
            given = sizes.given(args)
            find_part = functools.partial(_part_at, part, sizes, given)
            self._forward_begins(name, find_part, args, given, is_larger=sizes.are_beyond(given))
            outputs = compiled(*args)
            note_run(
                self,
                name,
                outputs=outputs,
                device=self._device,
                sizes=given,
                find_graph=find_part,
            )
            return outputs

        return run

    def _notice_step(self) -> None:
        """Where nobody tells of steps: another one begins once a backward has come."""
        if self._is_told_of_steps or self._offline:
            return
        if self._step.runs is None or Counter(self._step.runs) != Counter(self._waiting):
            self.begin_step()

    def begin_step(self) -> None:
        """A training call begins: one step with those before it whose backward is to come."""
        waiting = self._waiting
        self._step.begin(waiting)
        self._surroundings.begin_step(is_open=bool(waiting))

    @property
    def _waiting(self) -> list[str]:
        """Graphs that have run, in this order, and wait for their backward."""
        return [run.name for run in self._runs_here if run.owner is self and run.name]

    @property
    def is_open(self) -> bool:
        """Whether a backward through its graphs is still to come."""
        return bool(self._waiting)

    def _graph_name(self) -> str:
        """The graph that is being compiled."""
        name = compile_name()
        return f"{name} part {self._part + 1}" if self._part else name

    def _leave_to_torch(self, error: Exception) -> None:
        """Inductor could not compile what was planned: torch's own partition is next."""
        name = self._graph_name()
        self._step.drop(name)
        self.fall_back("AR107", cause=error, graph=name, error=error)
        self._unplannable.add(name)

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
        untouched = copy_module(module)
        try:
            if self._graph_name() in self._unplannable:
                return self.torch_partition(untouched, joint_inputs, num_fwd_outputs)
            if not joint_inputs:
                raise Unplannable("AR103")
            planned = self._plan(module, num_fwd_outputs, static_lifetime_input_indices)
        except (InfeasibleBudget, SteeringError):
            raise
        except Unplannable as reason:
            self.fall_back(reason.code, graph=self._graph_name(), **reason.facts)
        except PartitionError as error:
            self.fall_back("AR106", cause=error, graph=self._graph_name(), error=error)
        except Exception as error:  # nothing of the user's may be lost to a defect of ours
            why = f"{type(error).__name__}: {error}"
            self.fall_back("AR101", cause=error, graph=self._graph_name(), error=why)
        else:
            self.told.warn_if_due()
            self.planned[fingerprint(untouched)].append(planned.copied())
            return planned.forward, planned.backward
        return self.torch_partition(untouched, joint_inputs, num_fwd_outputs)

    def torch_partition(
        self, module: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int
    ) -> Modules:
        """Torch's own split, safe from reading overwritten inputs and from drawing again."""
        op_by_op = self.options.compiler == "eager"
        return split_as_torch(
            module,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            op_by_op=op_by_op,
            replays_seeds=not op_by_op
            and all(self._setting.replays(device).seeds for device in devices_of(module)),
            graph=self._graph_name(),
        )

    def report(self) -> Report:
        """What was planned so far."""
        parts, curve = self._step.current, self._step_curve()
        asked = (sentence for part in parts for sentence in part.subject.constraints.asked)
        graphs = tuple(
            self._step.reports(self._resident.parts.gradients_nbytes, self._surroundings.now)
        )
        return Report(
            budget_nbytes=self.options.budget_nbytes(self._device) if parts else 0,
            resident=resident_of_step([part.resident.parts for part in parts], graphs),
            graphs=graphs,
            measured_peak_nbytes=self.measured_peak_nbytes,
            compiler=self.options.compiler,
            device=self._setting.device_name(self._device),
            torch_version=torch.__version__,
            fallbacks=tuple(self.told.fallbacks),
            user_constraints=tuple(dict.fromkeys(asked)),
            curve=curve.points,
            facts=(
                *environment_facts(self._device),
                *(Fact(LEFT_OUT, sentence) for sentence in curve.left_out),
            ),
            optimizer=self._resident.optimizer,
            eager_peak_nbytes=self._eager_peak_nbytes(),
        )

    def _eager_peak_nbytes(self) -> int:
        """Of code outside of the graphs, where the step peaks there; else 0."""
        around = self._surroundings.now
        eager_nbytes = self._step.eager_peak_nbytes(around)
        existing_nbytes = self._resident.parts.gradients_nbytes
        highest_nbytes = self._step.graphs_peak_nbytes(existing_nbytes, around)
        return eager_nbytes if eager_nbytes > highest_nbytes else 0

    def stored_plan(self) -> StoredPlan:
        """What was planned so far, for a file."""
        graphs = tuple(part.stored for part in self._step.current)
        return StoredPlan(
            graphs,
            self.options.compiler,
            self._setting.device_name(self._device),
            torch.__version__,
        )

    @property
    def predicted_peak_nbytes(self) -> int:
        """The highest peak of the step that is known of, or 0."""
        return self._step.peak_nbytes(self._resident.parts.gradients_nbytes, self._surroundings.now)

    @property
    def most_nbytes(self) -> int:
        """The budget, or the predicted peak where that is above it already."""
        return max(self.options.budget_nbytes(self._device), self.predicted_peak_nbytes)

    def replanned(self) -> Session | None:
        """A session that plans the same step as a whole; None if its graphs fit, or none could.

        Asked for after the step's forward: then all of its graphs are known.
        """
        known = (tuple(self._step.runs or self._step.parts), self._surroundings.now)
        if self._whole_is_for != known:
            self._whole, self._whole_is_for = self._find_whole(), known
        return self._whole

    def _find_whole(self) -> Session | None:
        budget_nbytes = self.options.budget_nbytes(self._device)
        if not self._may_replan or self.predicted_peak_nbytes <= budget_nbytes:
            return None
        session = Session(
            self.options,
            self._find_resident,
            refuses=False,
            offline=self._offline,
            replans=self._replans - 1,
            split=self._step.split(budget_nbytes, self._surroundings.now),
            around=self._surroundings.found,
            present=self._find_present,
            is_told_of_steps=self._is_told_of_steps,
        )
        session.told.fallbacks = self.told.fallbacks
        return session

    @property
    def _may_replan(self) -> bool:
        is_as_planned = self._surroundings.are_as_planned and (
            len(self._step.order) < 2 if self._split is ALONE else self._step.follows(self._split)
        )
        return self._replans > 0 and not self.options.steering.choice and not is_as_planned

    @property
    def device(self) -> torch.device:
        """The device of the planned graphs."""
        return self._device

    @property
    def is_planned(self) -> bool:
        """Whether any graph was planned."""
        return bool(self._step.parts)

    def note_measured(self, peak_nbytes: int) -> None:
        """Keep the peak of a whole step, and warn if it exceeds the budget."""
        self.measured_peak_nbytes = peak_nbytes
        report = self.report()
        if report.graphs and peak_nbytes > report.budget_nbytes:
            warnings.warn(
                OverBudgetWarning(peak_nbytes, report.budget_nbytes, report.predicted_peak_nbytes),
                stacklevel=2,
            )

    def _plan(
        self, module: fx.GraphModule, num_fwd_outputs: int, static: Sequence[int] | None
    ) -> PlannedGraph:
        """The stages in their order: capture, cost, lower, solve, rewrite, report."""
        with self.progress as progress:
            progress.stage("capture")
            name = self._graph_name()
            graph = graph_of(
                module,
                device_of(module),
                num_fwd_outputs=num_fwd_outputs,
                static_indices=static,
            )
            joint, device = graph.joint, graph.device
            earlier = self._step.earlier(name)
            self._note_draws(joint)
            self._device = device
            self._resident = self._given.beside(self._find_resident(device), device)
            between_nbytes = self._between_nbytes(graph, earlier)
            shell = shell_of(
                joint,
                graph.storages,
                resident_nbytes=self._resident.nbytes + between_nbytes,
                optimizer_nbytes=self._resident.transient_nbytes,
            )
            progress.stage("cost")
            subject = state(graph, shell, self._setting, is_first=not earlier)
            progress.stage("solve")
            budget_nbytes = self.options.budget_nbytes(device)
            number = len(earlier)
            found = self._split.beside(subject, earlier, self._step.held_nbytes(name))
            around = self._surroundings.found
            found = around.beside(found.beyond(self._resident.parts.gradients_nbytes))
            placed = self._split.place(
                subject, number, found, budget_nbytes, eager_nbytes=around.eager_nbytes
            )
            is_first_of_all = number == 0 and self._split is ALONE
            refuses = self._refuses and is_first_of_all
            choice = choose(placed, budget_nbytes, self._setting, number=number, refuses=refuses)
            growth = self._keep_to_sizes(placed, choice, budget_nbytes)
            if not choice.fits and refuses:
                raise self._refusal(placed, choice, budget_nbytes)
            report = functools.partial(_explained, name)
            curve = self._curve(subject, choice)
            part = Part(
                subject,
                choice,
                between_nbytes,
                found,
                report,
                store(subject, choice),
                curve,
                self._resident,
                growth,
            )
            self._step.add(name, part)
            step_report = self.report()
            # Gradients that exist may be gone before the backward, which tells if they are not.
            # What others held in an earlier step may be less by now, which looks will tell.
            if around == Around() and (not is_first_of_all or self._refuses):
                self._tell_if_above(self.predicted_peak_nbytes)
            progress.stage("compile")
            progress.finish(one_line(step_report))
        return PlannedGraph(joint, choice.forward, choice.backward)

    def _note_draws(self, joint: JointGraph) -> None:
        """Compiled code may draw other random numbers than eager code would."""
        if self.options.compiler != "eager" and any(makes_seeds(node) for node in joint.nodes):
            self.compiled_draws_differently = True

    def _curve(self, subject: Subject, choice: Choice) -> Curve:
        """Peaks and times of other plans, where an offline report is to show them."""
        if self._offline is None or not self._offline.curve_points:
            return Curve()
        return curve_of(subject, choice, self._offline.curve_points, self._offline.curve_limit_s)

    def _between_nbytes(self, graph: Graph, earlier: Sequence[Part]) -> int:
        """What the code before a graph holds that no plan of an earlier graph counts."""
        joint, storages = graph.joint, graph.storages
        inputs = [node for node in joint.primals if node not in joint.static_inputs]
        known_nbytes = sum(part.outputs_nbytes for part in earlier)
        if frame_name() == self._first_frame:  # later ones get what the code in between made
            known_nbytes += self._resident.parts.batch_nbytes
        handed_in_nbytes = storages.total_nbytes(inputs, resident=True)
        known = self._resident.storages
        held = held_nbytes(self._inputs, known, self._device, self._surroundings.eager_results)
        self._surroundings.eager_results.note_inputs(self._inputs)
        return max(0, handed_in_nbytes - known_nbytes) + held

    def _keep_to_sizes(self, placed: Subject, choice: Choice, budget_nbytes: int) -> float:
        """By how much the graph's sizes may grow before another plan is made."""
        # What other runs of a step hold grows as well: by how much, no graph of it knows.
        is_alone = self._step.most_runs < 2 and not self._step.runs
        growth = room_to_grow(placed, choice, budget_nbytes) if choice.fits and is_alone else 1.0
        # Of what `optimize` has compiled, Dynamo may compile much more often.
        often = MANY_COMPILES if self._is_told_of_steps else GUARDED_COMPILES
        if compile_number() < often:
            keep_to_sizes(placed, growth)
        return growth

    def _refusal(self, subject: Subject, choice: Choice, budget_nbytes: int) -> InfeasibleBudget:
        """Of a first graph that does not fit; what comes later runs as lean as it can."""
        more_nbytes = subject.lowered.problem.resident_nbytes - self._resident.nbytes
        facts = facts_of_refusal(subject, choice, budget_nbytes)
        facts["resident"] = with_others(self._resident.parts, more_nbytes)
        asked = self.options.steering.choice
        if asked:
            optimal = search(subject, budget_nbytes, self._setting, refuses=True)
            return OverBudget(**facts, choice=asked, optimal_peak_nbytes=optimal.peak_nbytes)
        error = InfeasibleBudget(**facts)
        if subject.constraints.asked:
            error.add_note("This respects save= and recompute=: without them, less may be enough.")
        return error

    def _tell_if_above(
        self, predicted_nbytes: int, *, is_final: bool = True, is_told_only: bool = False
    ) -> None:
        """Warn of a step above the budget; again only of one that is higher still.

        Args:
            predicted_nbytes: its peak.
            is_final: whether all of its forward has run.
            is_told_only: as of `Look`.
        """
        budget_nbytes = self.options.budget_nbytes(self._device)
        is_planned_anew = (
            self._may_replan
            and not is_told_only
            and self.predicted_peak_nbytes > budget_nbytes  # else no plan would change it
        )
        if is_planned_anew and self._offline:
            return
        self.told.peak(
            predicted_nbytes,
            budget_nbytes,
            is_final=is_final,
            is_planned_anew=is_planned_anew and self._is_told_of_steps,
        )

    # --- what the ledger shows ------------------------------------------------------------------

    def _forward_begins(
        self,
        name: str,
        find_part: Callable[[], Part],
        args: Sequence[Any],
        sizes: tuple[int, ...],
        *,
        is_larger: bool,
    ) -> None:
        """One of its graphs is about to run: what is there already counts beside it."""
        self._notice_step()
        self._step.ran(name)
        with self._looking():
            if is_larger:
                peak_nbytes = find_part().peak_nbytes(self._account.get(name, Beside()))
                self._tell_if_above(peak_nbytes, is_told_only=True)
            runs, device = self._runs_here, self._device
            look = self.audit.at_forward(
                runs, name, find_part, args, lambda: self._account, device, sizes
            )
            self._learn(look, is_final=False)

    def note_end(self, outputs: Sequence[torch.Tensor]) -> None:
        """A call of the model has ended, and its backward is to come."""
        with self._looking():
            self.audit.at_end(self._runs_here, outputs, self._device)

    def backward_begins(self, roots: Roots, *, keeps_graph: bool) -> None:
        """A backward begins that may reach runs of its graphs; see `ledger.Owner`."""
        with self._looking():
            self._look_back(roots, keeps_graph=keeps_graph)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """What goes wrong while a step is looked into is told, and the step goes on."""
        try:
            yield
        except (OverBudgetWarning, FallbackError, FallbackWarning):
            raise  # warnings that the user has made errors
        except Exception as error:
            self.fall_back("AR115", cause=error, error=f"{type(error).__name__}: {error}")

    def _look_back(self, roots: Roots, *, keeps_graph: bool) -> None:
        runs = self._runs_here

        def account() -> dict[Run, tuple[Part, Beside]]:
            known = self._account
            own = (run for run in runs if run.owner is self and run.name in known)
            return {run: (cast("Part", run.graph), known[run.name]) for run in own}

        look = self.audit.at_backward(runs, roots, self._device, account, keeps_graph=keeps_graph)
        self._learn(look, is_final=True)

    def note_eager_call(self, outputs: Sequence[Any], device: torch.device) -> None:
        """A call of the model ran in eager mode: its backward is looked into as well."""
        if not self.is_planned:
            self._device = device
        note_run(self, "", outputs=outputs, device=device)

    @contextlib.contextmanager
    def during_inference(self) -> Iterator[None]:
        """A call without gradients: between forward and backward it adds to what waits there."""
        runs = self._runs_here if self.is_open else []
        if not runs or self.audit.is_known(("inference", *names_of(runs)), sizes_of_runs(runs)):
            yield
            return
        with LiveStorages(self._device, ignores_given=True) as made:
            yield
        self._tell_if_above(self.audit.live_nbytes(runs, self._device) + made.peak_nbytes)

    @property
    def _account(self) -> Mapping[str, Beside]:
        """What is beside each graph of the step by the plans of its graphs."""
        grown = Around(self._surroundings.grown_nbytes)
        return self._step.beside(self._resident.parts.gradients_nbytes, grown)

    @property
    def _runs_here(self) -> list[Run]:
        return open_runs(self._device)

    def _learn(self, look: Look | None, *, is_final: bool) -> None:
        """Take into account what a look has shown, and tell if the step is above the budget."""
        if look is None:
            return
        if look.is_told_only:
            self._tell_if_above(look.peak_nbytes, is_final=is_final, is_told_only=True)
            return
        self._surroundings.learn(look, is_final=is_final)
        self._tell_if_above(look.peak_nbytes, is_final=is_final)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Where nobody tells of the model's optimizers: one of its parameters has made a step."""
        optimizers = self.audit.arguments.optimizers
        if optimizers.has_new_state(optimizer):
            self.note_resident(storages_nbytes(state_of(optimizers.known), self._device))

    def note_resident(self, nbytes: int) -> None:
        """So much more is resident than when the graphs were planned: an optimizer's state."""
        self._surroundings.note_resident(nbytes)

    def fall_back(self, code: str, *, cause: Exception | None = None, **facts: object) -> None:
        """See `Told.fall_back`."""
        self.told.fall_back(code, cause=cause, **facts)

    def leave_layer_eager(self, layer: torch.nn.Module, results: Any) -> None:
        """Tell that layers of a kind run in eager mode between the planned graphs."""
        self._surroundings.eager_results.note(results)
        trainable = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        gradient_nbytes = storages_nbytes(trainable, trainable[0].device) if trainable else 0
        self._step.ran_eagerly(f"layer {id(layer)}", gradient_nbytes)
        self.fall_back("AR109", kind=type(layer).__name__)

    def _step_curve(self) -> Curve:
        """Of a step of one graph; the curves of several do not add up to one."""
        curves = [part.curve for part in self._step.current]
        if len(curves) < 2 or not any(curve.points for curve in curves):
            return curves[0] if curves else Curve()
        return Curve(left_out=(f"the curves of {len(curves)} graphs do not add up to one",))


def _part_at(part: Part, sizes: Sizes, given: tuple[int, ...]) -> Part:
    """The graph as a run of these sizes finds it."""
    return part.at(sizes.numbers(given))


def _explained(name: str, subject: Subject, choice: Choice) -> GraphReport:
    """A graph's report, what the user asked for among its constraints."""
    found = explain(name, subject, choice)
    return replace(found, constraints=(*subject.constraints.asked, *found.constraints))
