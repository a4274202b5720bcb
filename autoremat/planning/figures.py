"""What a step asks of a planned graph while it runs: plain numbers.

Enters: a graph, its plan, and what was counted beside it. Leaves: bytes of what crosses from its
forward to its backward, of what it returns, and its peaks. Guarantees: they can be kept: a process
that finds them needs neither graph nor plan to run steps.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import NamedTuple

from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.emit.rewrite import value_name
from autoremat.graph.joint_graph import JointGraph
from autoremat.inductor.laid_out import laid_out_nbytes
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.nesting import Beside, Crossing
from autoremat.problem.lower import RNG_STATE, without_spare_states
from autoremat.problem.shell import LOSS_BOUNDARY, OPTIMIZER_STEP
from autoremat.problem.subject import Subject


class Gradient(NamedTuple):
    """Of a parameter.

    Attributes:
        number: of the argument.
        nbytes: of it.
        is_view: whether it is one of another result.
    """

    number: int
    nbytes: int
    is_view: bool


@dataclass(frozen=True)
class KeptFigures:
    """Of a graph and a plan that need not be there; peaks are above what is resident.

    Attributes:
        device_type: where it runs.
        arguments: how many its forward takes.
        fits: whether its plan is within the budget that it was made for.
        resident_nbytes: live all the time, with what code before the graph held when it was
            planned.
        forward_nbytes: peak of its forward, above what was counted beside the graph as well; and
            so are the next two.
        backward_nbytes: peak of its backward.
        end_nbytes: live as its backward ends.
        kept_nbytes: by how much its backward is higher where what crosses to it stays.
        given_away_nbytes: by how much it is lower where nobody holds what the forward returned.
        crossing_nbytes: live from the forward's end to the backward's start.
        passed_nbytes: of that, what the graph returned and its backward does not need.
        outputs_nbytes: of that, what the graph returned to the user's code.
        tangents_nbytes: gradients that its backward is given.
        held_tangents_nbytes: of them, those that whoever began it holds.
        gradients_nbytes: gradients of parameters that its backward returns.
        gradients: the same, each.
        host_nbytes: the most that waits elsewhere.
    """

    device_type: str
    arguments: int
    fits: bool
    resident_nbytes: int
    forward_nbytes: int
    backward_nbytes: int
    end_nbytes: int
    kept_nbytes: int
    given_away_nbytes: int
    crossing_nbytes: int
    passed_nbytes: int
    outputs_nbytes: int
    tangents_nbytes: int
    held_tangents_nbytes: int
    gradients_nbytes: int
    gradients: Sequence[Sequence[int]]
    host_nbytes: int

    @property
    def crossing(self) -> Crossing:
        """What crosses, as others count it."""
        return Crossing(self.crossing_nbytes, self.passed_nbytes)


class Figures:
    """The same of a graph that is there; each is found when it is first asked for."""

    def __init__(self, subject: Subject, choice: Choice, counted: Beside) -> None:
        """Of a plan.

        Args:
            subject: the graph.
            choice: the plan.
            counted: what its peak counts beside the graph.
        """
        self._subject = subject
        self._choice = choice
        self._counted = counted
        self.device_type = subject.device.type
        self.fits = choice.fits

    def to_keep(self) -> KeptFigures:
        """All of them."""
        names = (field.name for field in fields(KeptFigures))
        return KeptFigures(**{name: getattr(self, name) for name in names})

    @functools.cached_property
    def arguments(self) -> int:
        """See `KeptFigures`."""
        return len(self._subject.joint.primals)

    @property
    def resident_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._subject.lowered.shell.resident_nbytes

    @property
    def forward_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._peaks[0]

    @property
    def backward_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._peaks[1]

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        return shared_out(self._problem, self._plan, self._choice.peak_nbytes, self._counted)

    @functools.cached_property
    def end_nbytes(self) -> int:
        """See `KeptFigures`."""
        problem, plan = self._problem, self._plan
        live_nbytes = simulate(without_spare_states(problem, plan), plan).live_nbytes
        last = -2 if OPTIMIZER_STEP in problem.op_by_name else -1
        return live_nbytes[last] - problem.resident_nbytes

    @functools.cached_property
    def kept_nbytes(self) -> int:
        """See `KeptFigures`."""
        plan, problem = self._plan, without_spare_states(self._problem, self._plan)
        boundary = plan.place_of(LOSS_BOUNDARY)
        live_nbytes = simulate(problem, plan).live_nbytes
        stays_nbytes = Counter[int]()  # from each step on
        for name, born, last in instance_spans(problem, plan):
            if born < boundary < last:  # this one stays: the backward may make another
                stays_nbytes[last + 1] += problem.value_by_name[name].nbytes
        kept_nbytes = accumulate(stays_nbytes[place] for place in range(len(live_nbytes)))
        highest_nbytes = max(list(map(operator.add, live_nbytes, kept_nbytes))[boundary:])
        return highest_nbytes - max(live_nbytes[boundary:])

    @functools.cached_property
    def given_away_nbytes(self) -> int:
        """See `KeptFigures`."""
        return given_away_nbytes(self._subject, self._problem, self._plan)

    @functools.cached_property
    def crossing_nbytes(self) -> int:
        """See `KeptFigures`."""
        plan = self._choice.solution.plan
        held = without_spare_states(self._subject.lowered.problem, plan).values
        states_nbytes = sum(value.nbytes for value in held if value.name.endswith(RNG_STATE))
        return self._handed_nbytes + states_nbytes + laid_out_nbytes(held)

    @functools.cached_property
    def _handed_nbytes(self) -> int:
        """What the forward saves or returns."""
        joint = self._subject.joint
        return self._subject.lowered.storages.total_nbytes(self._saved | set(joint.fwd_outputs))

    @functools.cached_property
    def passed_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._handed_nbytes - self._subject.lowered.storages.total_nbytes(self._saved)

    @property
    def _saved(self) -> set[fx.Node]:
        joint = self._subject.joint
        given = self._choice.backward.graph.find_nodes(op="placeholder")
        names = {value_name(node.name) for node in given}
        return {node for node in joint.nodes if node.name in names} - set(joint.tangents)

    @property
    def crossing(self) -> Crossing:
        """See `KeptFigures`."""
        return Crossing(self.crossing_nbytes, self.passed_nbytes)

    @functools.cached_property
    def outputs_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._subject.lowered.storages.total_nbytes(self._subject.joint.fwd_outputs)

    @property
    def tangents_nbytes(self) -> int:
        """See `KeptFigures`."""
        return sum(self._subject.lowered.shell.tangents.values())

    @property
    def held_tangents_nbytes(self) -> int:
        """See `KeptFigures`."""
        shell = self._subject.lowered.shell
        return sum(shell.tangents[name] for name in shell.held)

    @functools.cached_property
    def gradients_nbytes(self) -> int:
        """See `KeptFigures`."""
        return trained_nbytes(self._subject)

    @functools.cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """See `KeptFigures`."""
        joint, storages = self._subject.joint, self._subject.lowered.storages
        returned, static = gradients_by_input(joint), set(joint.static_inputs)
        found = ((n, returned.get(node)) for n, node in enumerate(joint.primals) if node in static)
        return tuple(
            Gradient(
                number,
                storages.total_nbytes([node]),
                any(storages.root.get(name) is not node for name in storages.of_node[node]),
            )
            for number, node in found
            if node is not None
        )

    @property
    def host_nbytes(self) -> int:
        """See `KeptFigures`."""
        return self._choice.solution.timeline.host_peak_nbytes

    @functools.cached_property
    def _problem(self) -> Problem:
        return as_chosen(self._subject, self._choice).lowered.problem

    @property
    def _plan(self) -> Plan:
        return self._choice.solution.plan


def highest_of(own_peaks: tuple[int, int], found: Beside) -> int:
    """The peak of both parts, above what is resident."""
    forward_nbytes, backward_nbytes = own_peaks
    return max(forward_nbytes + found.first_nbytes, backward_nbytes + found.most_nbytes)


def shared_out(problem: Problem, plan: Plan, peak_nbytes: int, counted: Beside) -> tuple[int, int]:
    """Peaks of forward and backward, above what is resident and what was counted beside them.

    A compiler's peak is known as a whole: it is shared out as the simulator's is.
    """
    resident_nbytes = problem.resident_nbytes
    live_nbytes = simulate(without_spare_states(problem, plan), plan).live_nbytes
    boundary = plan.place_of(LOSS_BOUNDARY)
    forward = max(live_nbytes[:boundary], default=0) - resident_nbytes
    backward = max(live_nbytes[boundary:]) - resident_nbytes
    more = peak_nbytes - resident_nbytes - highest_of((forward, backward), counted)
    return forward + more, backward + more


def given_away_of(subject: Subject, problem: Problem) -> Problem:
    """A graph's problem where nobody holds what its forward has returned."""
    returned = _returned_by_forward(subject)
    held = (name for name in problem.outputs if name not in returned)
    return replace(problem, outputs=tuple(held))


def letting_go(subject: Subject, held_nbytes: int) -> Subject:
    """A graph that holds no result of its forward which is larger than all that is held of them."""
    graph = subject.lowered.graph
    returned, values = _returned_by_forward(subject), graph.values
    held = (n for n in graph.outputs if n not in returned or values[n].nbytes <= held_nbytes)
    lowered = replace(subject.lowered, graph=replace(graph, outputs=tuple(held)))
    return replace(subject, lowered=lowered)


def _returned_by_forward(subject: Subject) -> set[str]:
    """Storages that a graph's forward returns, and its backward does not."""
    joint, of_node = subject.joint, subject.lowered.storages.of_node
    forward, backward = (
        {name for node in nodes for name in of_node[node]}
        for nodes in (joint.fwd_outputs, joint.bwd_outputs)
    )
    return forward - backward


def given_away_nbytes(subject: Subject, problem: Problem, plan: Plan) -> int:
    """By how much a backward is lower where nobody holds what the forward returned."""
    boundary = plan.place_of(LOSS_BOUNDARY)
    held, gone = (
        max(simulate(without_spare_states(p, plan), plan).live_nbytes[boundary:])
        for p in (problem, given_away_of(subject, problem))
    )
    return held - gone


def gradients_by_input(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """What the backward returns for each input of the forward."""
    results: Sequence[object] = _torch.arg_tree_leaves(*joint.module.graph.output_node().args)
    gradients = results[joint.num_fwd_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)  # effect tokens follow
    return {node: gradient for node, gradient in pairs if isinstance(gradient, fx.Node)}


def trained_nbytes(subject: Subject) -> int:
    """Bytes of gradients of parameters that a graph's backward returns."""
    returned = gradients_by_input(subject.joint)
    gradients = [returned[n] for n in subject.joint.static_inputs if n in returned]
    return subject.lowered.storages.total_nbytes(gradients)


def may_repeat(joint: JointGraph) -> bool:
    """Whether a graph can be one of many alike: it hands a gradient back to code before it.

    And its result is no loss. Only a step that has run shows whether it is.
    """
    returned = gradients_by_input(joint)
    hands_back = any(node not in joint.static_inputs for node in returned)
    sizes = (_torch.tensor_leaves(_torch.fake_value(node)) for node in joint.fwd_outputs)
    return hands_back and any(tensor.dim() for tensors in sizes for tensor in tensors)
