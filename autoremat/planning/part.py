"""One planned graph of a step, and its peak whatever is held beside it.

Enters: a graph's choice of a plan, as it was made beside what was known then. Leaves: what crosses
from its forward to its backward, and its peaks beside anything else or at other sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.ask.plan_file import StoredGraph
from autoremat.graph.joint_graph import JointGraph
from autoremat.inductor.laid_out import laid_out_nbytes
from autoremat.memory.residents import Resident
from autoremat.planning.choice import Baseline, Choice, as_chosen
from autoremat.planning.curve import Curve
from autoremat.planning.nesting import Beside, Kept, Region, placed
from autoremat.planning.sizes import Symbols, peak_at, sizes_of, subject_at
from autoremat.problem.lower import RNG_STATE, as_written, without_spare_states
from autoremat.problem.shell import LOSS_BOUNDARY, OPTIMIZER_STEP
from autoremat.problem.subject import Subject
from autoremat.reporting import GraphReport


class Gradient(NamedTuple):
    """Of a parameter.

    Attributes:
        nbytes: of it.
        is_view: whether it is one of another result.
    """

    nbytes: int
    is_view: bool


@dataclass(frozen=True)
class Part:
    """One planned graph of the step.

    Attributes:
        subject: the graph alone; code between the graphs counts as resident.
        choice: its plan.
        between_nbytes: of what is resident, what code before the graph holds.
        counted: what the choice's peak counts beside the graph.
        explain: its report, given a subject and a choice of it.
        stored: what a file keeps of the plan.
        curve: peaks and times of other plans.
        resident: what the step held whatever the plan, when the graph was planned.
        growth: by which factor its symbolic sizes may grow within the budget.
        is_resized: whether its symbolic sizes stand for others than it was planned for.
        is_run_again: whether a checkpoint runs its forward again as its backward begins.
        is_given_away: whether what it returns is gone by then.
        is_kept: whether its backward keeps what crosses to it, for another backward.
    """

    subject: Subject
    choice: Choice
    between_nbytes: int
    counted: Beside
    explain: Callable[[Subject, Choice], GraphReport]
    stored: StoredGraph
    curve: Curve
    resident: Resident
    growth: float = 1.0
    is_resized: bool = False
    is_run_again: bool = False
    is_given_away: bool = False
    is_kept: bool = False
    _reports: dict[Beside, GraphReport] = field(default_factory=dict)

    @property
    def resident_nbytes(self) -> int:
        """What is live all the time, with what code before the graph held when it was planned."""
        return self.subject.lowered.shell.resident_nbytes

    @property
    def step_resident_nbytes(self) -> int:
        """The same without what code before the graph held."""
        return self.resident_nbytes - self.between_nbytes

    @functools.cached_property
    def crossing_nbytes(self) -> int:
        """Bytes that live from the forward's end to the backward's start."""
        joint, storages = self.subject.joint, self.subject.lowered.storages
        names = {node.name for node in self.choice.backward.graph.find_nodes(op="placeholder")}
        saved = {node for node in joint.nodes if node.name in names} - set(joint.tangents)
        plan = self.choice.solution.plan
        held = without_spare_states(self.subject.lowered.problem, plan).values
        states_nbytes = sum(value.nbytes for value in held if value.name.endswith(RNG_STATE))
        handed_nbytes = storages.total_nbytes(saved | set(joint.fwd_outputs))
        return handed_nbytes + states_nbytes + laid_out_nbytes(held)

    @functools.cached_property
    def outputs_nbytes(self) -> int:
        """Of them, what the graph returned to the user's code."""
        return self.subject.lowered.storages.total_nbytes(self.subject.joint.fwd_outputs)

    @functools.cached_property
    def held_tangents_nbytes(self) -> int:
        """Of the gradients that its backward is given, those that whoever began it holds."""
        shell = self.subject.lowered.shell
        return sum(shell.tangents[name] for name in shell.held)

    @functools.cached_property
    def gradient_nbytes(self) -> int:
        """Gradients of parameters that its backward returns and that stay until the step's end."""
        joint = self.subject.joint
        returned = _gradients_by_input(joint)
        gradients = [returned[node] for node in joint.static_inputs if node in returned]
        returned_nbytes = self.subject.lowered.storages.total_nbytes(gradients)
        return int(self.resident.traffic.gradient_share * returned_nbytes)

    @functools.cached_property
    def gradients(self) -> dict[int, Gradient]:
        """What the backward returns for parameters, by the number of the argument."""
        joint, storages = self.subject.joint, self.subject.lowered.storages
        returned, share = _gradients_by_input(joint), self.resident.traffic.gradient_share
        static = set(joint.static_inputs)
        numbered = enumerate(joint.primals)
        found = {n: returned[node] for n, node in numbered if node in static and node in returned}
        return {
            number: Gradient(
                int(share * storages.total_nbytes([node])),
                any(storages.root.get(name) is not node for name in storages.of_node[node]),
            )
            for number, node in found.items()
        }

    @functools.cached_property
    def run_again(self) -> Part:
        """The same in a checkpoint."""
        return replace(self, is_run_again=True, _reports={})

    @functools.cached_property
    def kept(self) -> Part:
        """The same where its backward keeps its graph."""
        return replace(self, is_kept=True, _reports={})

    @functools.cached_property
    def given_away(self) -> Part:
        """The same where what it returns is gone as its backward begins."""
        return replace(self, is_given_away=True, _reports={})

    def kept_by(self, region: Region, crossing_nbytes: int) -> Kept:
        """What a run of it in a region keeps, where it hands so much to its backward."""
        gathered_nbytes = self.resident.traffic.run_nbytes
        return Kept.of(region, crossing_nbytes, self.outputs_nbytes, gathered_nbytes)

    def report(self, found: Beside, *, reads: bool = True) -> GraphReport:
        """The graph's report.

        Args:
            found: what is held beside it.
            reads: whether code may be read to tell what the step takes without a plan.
        """
        if found not in self._reports:
            is_told = reads or not self.choice.is_read
            before = (
                self._baseline(found) if is_told else Baseline(0, self.choice.baseline_time_us())
            )
            subject = replace(self.subject, lowered=placed(self.subject.lowered, found))
            choice = replace(
                self.choice, peak_nbytes=self.peak_nbytes(found), baseline=lambda: before
            )
            if not is_told:
                return self.explain(subject, choice)
            self._reports.clear()
            self._reports[found] = self.explain(subject, choice)
        return self._reports[found]

    def peak_nbytes(self, found: Beside) -> int:
        """The real peak, so much being held beside the graph."""
        forward_nbytes, backward_nbytes = self.own_peaks
        own = (forward_nbytes + self.resident.traffic.forward_nbytes, backward_nbytes)
        return self.resident_nbytes + _beside(own, found)

    def peak_in_backward(self, found: Beside) -> int:
        """The peak of the backward alone, so much being held beside the graph."""
        return self.resident_nbytes + self.own_peaks[1] + found.most_nbytes

    def with_optimizer(self, resident: Resident) -> Part:
        """The same graph and plan, beside the optimizer of a step that holds this."""
        optimizer_nbytes = resident.parts.optimizer_nbytes
        more_nbytes = optimizer_nbytes - self.resident.parts.optimizer_nbytes
        lowered = self.subject.lowered
        shell = replace(
            lowered.shell,
            resident_nbytes=lowered.shell.resident_nbytes + more_nbytes,
            optimizer_nbytes=resident.transient_nbytes,
        )
        return replace(
            self,
            subject=replace(self.subject, lowered=replace(lowered, shell=shell)),
            choice=replace(self.choice, peak_nbytes=self.choice.peak_nbytes + more_nbytes),
            resident=self.resident.with_optimizer(resident),
            _reports={},
        )

    def at(self, numbers: Symbols) -> Part:
        """The same graph and plan, its symbolic sizes standing for other numbers."""
        planned = sizes_of(self.subject)
        if all(planned.get(symbol) == number for symbol, number in numbers.items()):
            return self
        resized = subject_at(self.subject, numbers)
        if resized.lowered.problem == self.subject.lowered.problem:
            return self  # all that differs is how its inputs are laid out
        subject, plan = as_chosen(self.subject, self.choice), self.choice.solution.plan
        peak_nbytes = peak_at(subject, plan, self.peak_nbytes(Beside()), numbers)
        choice = replace(self.choice, peak_nbytes=peak_nbytes, torchs=None)
        return replace(
            self,
            subject=resized if subject is self.subject else subject_at(subject, numbers),
            choice=choice,
            counted=Beside(),
            is_resized=True,
            _reports={},
        )

    @functools.cached_property
    def own_peaks(self) -> tuple[int, int]:
        """Of forward and backward, above what is resident and what is held beside the graph."""
        problem = as_chosen(self.subject, self.choice).lowered.problem
        plan = self.choice.solution.plan
        forward, backward = shared_out(problem, plan, self.choice.peak_nbytes, self.counted)
        if self.is_given_away:
            backward -= self._given_away_nbytes
        if self.is_kept:
            backward += self._kept_nbytes
        if self.is_run_again:  # beside the gradients that it is given
            tangents_nbytes = sum(self.subject.lowered.shell.tangents.values())
            backward = max(forward + tangents_nbytes, backward)
        return forward, backward

    @functools.cached_property
    def end_nbytes(self) -> int:
        """Live as the backward ends, above what is resident and what is held beside the graph."""
        problem = as_chosen(self.subject, self.choice).lowered.problem
        plan = self.choice.solution.plan
        live_nbytes = simulate(without_spare_states(problem, plan), plan).live_nbytes
        last = -2 if OPTIMIZER_STEP in problem.op_by_name else -1
        return live_nbytes[last] - problem.resident_nbytes

    @property
    def _kept_nbytes(self) -> int:
        """By how much the backward is higher where what crosses to it stays."""
        problem = as_chosen(self.subject, self.choice).lowered.problem
        plan = self.choice.solution.plan
        boundary = plan.schedule.index(LOSS_BOUNDARY)
        spans = instance_spans(problem, plan)
        kept = {name for name, born, last in spans if born < boundary < last}
        return self._with_outputs(dict.fromkeys((*problem.outputs, *kept)))

    @property
    def _given_away_nbytes(self) -> int:
        """By how much the backward is lower where nobody holds what the forward has returned."""
        joint, of_node = self.subject.joint, self.subject.lowered.storages.of_node
        forward, backward = (
            {name for node in nodes for name in of_node[node]}
            for nodes in (joint.fwd_outputs, joint.bwd_outputs)
        )
        outputs = self.subject.lowered.problem.outputs
        return -self._with_outputs(n for n in outputs if n in backward or n not in forward)

    def _with_outputs(self, outputs: Iterable[str]) -> int:
        """By how much the backward is higher where these stay, and no other values."""
        problem = as_chosen(self.subject, self.choice).lowered.problem
        plan = self.choice.solution.plan
        boundary = plan.schedule.index(LOSS_BOUNDARY)
        other = replace(problem, outputs=tuple(outputs))
        before, after = (
            max(simulate(without_spare_states(p, plan), plan).live_nbytes[boundary:])
            for p in (problem, other)
        )
        return after - before

    def _baseline(self, found: Beside) -> Baseline:
        """The step without a plan, so much being held beside the graph."""
        counted, problem = self.choice.baseline(), self.subject.lowered.problem
        own = shared_out(problem, as_written(problem), counted.peak_nbytes, self.counted)
        return replace(counted, peak_nbytes=self.resident_nbytes + _beside(own, found))


def _beside(own_peaks: tuple[int, int], found: Beside) -> int:
    """The peak of both parts, above what is resident."""
    forward_nbytes, backward_nbytes = own_peaks
    return max(forward_nbytes + found.held_nbytes, backward_nbytes + found.most_nbytes)


def shared_out(problem: Problem, plan: Plan, peak_nbytes: int, counted: Beside) -> tuple[int, int]:
    """Peaks of forward and backward, above what is resident and what was counted beside them.

    A compiler's peak is known as a whole: it is shared out as the simulator's is.
    """
    resident_nbytes = problem.resident_nbytes
    live_nbytes = simulate(without_spare_states(problem, plan), plan).live_nbytes
    boundary = plan.schedule.index(LOSS_BOUNDARY)
    forward = max(live_nbytes[:boundary], default=0) - resident_nbytes
    backward = max(live_nbytes[boundary:]) - resident_nbytes
    more = peak_nbytes - resident_nbytes - _beside((forward, backward), counted)
    return forward + more, backward + more


def _gradients_by_input(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """What the backward returns for each input of the forward."""
    results: Sequence[object] = _torch.arg_tree_leaves(*joint.module.graph.output_node().args)
    gradients = results[joint.num_fwd_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)  # effect tokens follow
    return {node: gradient for node, gradient in pairs if isinstance(gradient, fx.Node)}


def may_repeat(joint: JointGraph) -> bool:
    """Whether a graph can be one of many alike: it hands a gradient back to code before it.

    And its result is no loss. Only a step that has run shows whether it is.
    """
    returned = _gradients_by_input(joint)
    hands_back = any(node not in joint.static_inputs for node in returned)
    sizes = (_torch.tensor_leaves(_torch.fake_value(node)) for node in joint.fwd_outputs)
    return hands_back and any(tensor.dim() for tensors in sizes for tensor in tensors)
