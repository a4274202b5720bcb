"""A step's first graph, compiled out of caches where another process has planned it.

Enters: a Dynamo graph, who splits its joint graph if it has to be planned, and what the step holds
whatever the plan. Leaves: what runs in its place; of a graph that was recalled, a `Part` of the
step that knows its figures. Guarantees: code that torch has stored runs only by the plan that was
kept for it, and a graph whose question cannot be put is planned as ever. Nothing is traced until
somebody asks for more than figures; the answer is then of the plan by which the step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.ask.options import Setting
from autoremat.call_stack import with_stack_room
from autoremat.emit.planned_graph import PlannedGraph
from autoremat.graph.devices import device_of, the_device
from autoremat.graph.joint_graph import JointGraph
from autoremat.graph.random_draws import makes_seeds
from autoremat.inductor.hook import Partitioner, configured
from autoremat.memory.residents import Resident
from autoremat.planning.part import Part, Planned, Recalled
from autoremat.planning.pipeline import graph_of
from autoremat.progress import Progress
from autoremat.session.capturing import Capturing
from autoremat.session.code import TracedOnly, written
from autoremat.session.first_plan import planned_alone
from autoremat.session.recalled import (
    Remembered,
    as_remembered,
    keeping,
    may_be_recalled,
    question_of,
    remembered,
)
from autoremat.session.stating import Before, stated
from autoremat.session.steps import Steps


@dataclass
class Remarks:
    """What is known of a session's graphs beside their plans.

    Attributes:
        line: the summary of the step, when its latest graph was planned.
        draws_differently: whether code of any draws other random numbers than eager code would.
    """

    line: str = ""
    draws_differently: bool = False

    def note_draws(self, joint: JointGraph, setting: Setting) -> None:
        """Compiled code may draw other random numbers than eager code would."""
        if setting.compiler != "eager" and any(makes_seeds(node) for node in joint.nodes):
            self.draws_differently = True


class Recalling:
    """Of one session."""

    def __init__(
        self,
        steps: Steps,
        dynamo: Mapping[str, _torch.DynamoGraph],
        capturing: Capturing,
        remarks: Remarks,
        progress: Progress,
        note: Callable[[str, str, PlannedGraph], None],
    ) -> None:
        """Nothing was recalled yet.

        Args:
            steps: the session's, of which nothing is planned yet.
            dynamo: its graphs, as Dynamo handed them over; a recalled one is there by the time
                that more is asked of it.
            capturing: compiles them.
            remarks: on these, kept with the plan; a recalled graph adds its own.
            progress: of the session.
            note: called with the name of a recalled graph that was traced after all, the
                fingerprint of its joint graph, and that graph with its modules by its plan.
        """
        self._steps, self._dynamo, self._capturing = steps, dynamo, capturing
        self._remarks, self._progress, self._note = remarks, progress, note
        self._options = steps.options  # as they were asked for, on whatever device

    def compile(
        self,
        name: str,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        partitioner: Partitioner,
        resident: Callable[[torch.device], Resident],
        *,
        refuses: bool,
    ) -> Callable[..., Any]:
        """A graph compiled; out of caches if all that its plan depends on is as it was.

        Args:
            name: of the graph, with which its module begins.
            module: the Dynamo graph.
            example_inputs: its inputs.
            partitioner: plans its joint graph, and splits it.
            resident: tells what a device holds whatever the plan.
            refuses: whether a budget that cannot be met is an error.
        """
        split = functools.partial(self._capturing.compile, module, example_inputs, partitioner)
        if not may_be_recalled(self._steps, module, example_inputs):
            return split()
        try:
            device = the_device(example_inputs)
            held = resident(device)
            question = question_of(self._steps, held, device, example_inputs, refuses=refuses)
        except Exception:  # planning meets it again, and tells
            return split()
        for _ in range(2):
            with _torch.asking_code_cache() as cache:
                compiled = split(question=question)
            if not cache.found:
                cache.close(self._keeping(name, device))
                return compiled
            known = remembered(cache.found)
            if known is not None and cache.asked == 1:
                if known.figures is not None:
                    self._recall(name, known, held, device, refuses)
                return compiled
            cache.forget()  # of whose plan nothing is kept
        return split()

    def _keeping(self, name: str, device: torch.device) -> Callable[[str], None] | None:
        """What keeps the graph that was compiled now beside its code; None if nothing may."""
        steps, remarks = self._steps, self._remarks
        if steps.told.fallbacks or name in steps.graphs.provisional:
            return None
        part = steps.graphs.parts.get(name)
        if part is not None and steps.device != device:
            return None
        return keeping(part, remarks.line, draws_differently=remarks.draws_differently)

    def _recall(
        self, name: str, known: Remembered, resident: Resident, device: torch.device, refuses: bool
    ) -> None:
        """The graph that is compiled now is one that was planned by another process."""
        steps = self._steps
        steps.device, steps.options, steps.resident = device, steps.options.on(device), resident
        self._remarks.draws_differently |= known.draws_differently
        make = functools.partial(
            self._made_again, name, known, resident, steps.budget_nbytes, refuses
        )
        planned = Recalled(known.kept_figures, make)
        steps.graphs.add(name, Part(planned, known.between_nbytes, resident))
        self._progress.finish(known.line)

    @with_stack_room
    def _made_again(
        self, name: str, known: Remembered, resident: Resident, budget_nbytes: int, refuses: bool
    ) -> Planned:
        """A graph that was recalled, traced and planned as it was: somebody asks for more of it."""
        options, dynamo = self._options, self._dynamo[name]

        def plan(
            module: fx.GraphModule, num_fwd_outputs: int, static: Sequence[int] | None
        ) -> Planned:
            graph = graph_of(
                module,
                device_of(module),
                num_fwd_outputs=num_fwd_outputs,
                static_indices=list(static or ()),
            )
            there = Before(between_nbytes=known.between_nbytes)
            subject = stated(graph, options.setting, resident, there, is_first=True)
            return planned_alone(name, subject, budget_nbytes, options, dynamo, refuses)

        planning = TracedOnly(plan)
        with self._progress as progress, dynamo.resumed(), configured(options.inductor):
            progress.stage("trace")
            found = planning.run(
                functools.partial(self._capturing.compile, dynamo.copy(), dynamo.inputs, planning)
            )
            planned = as_remembered(found, known, budget_nbytes)
        self._note(name, planning.fingerprint, written(planned))
        return planned
