"""The graphs of one step, side by side: what each leaves the others of one budget.

Enters: each graph as it was planned, and in which order the step runs them. Leaves: what is held
while one of them runs and, where they do not fit together, the `Split` under which the step is
planned anew. Guarantees: a graph that runs several times counts as often; of graphs that are not
those that a split was made for, nothing is taken as known.

A later run happens between the forward and the backward of an earlier one:

    forward 0, forward 1, forward 2, backward 2, backward 1, backward 0

While it lasts, the earlier ones hold what crosses from their forward to their backward; and while
the backward of an earlier one lasts, the gradients are there that the later ones have returned.
When the first graph is planned, Dynamo has not traced the others yet. It takes the whole budget,
and the others may find too little. Only after a whole forward is it known how to share.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from autoremat_solver import Plan, Problem, simulate
from autoremat_solver.plan_document import without_recompute
from autoremat_solver.policies import recompute_all
from autoremat_solver.simulate import instance_spans
from torch import fx

from autoremat import _torch
from autoremat.ask.plan_file import StoredGraph
from autoremat.graph.joint_graph import JointGraph
from autoremat.memory.residents import Resident
from autoremat.planning.choose import Baseline, Choice, Subject, as_chosen
from autoremat.planning.curve import Curve
from autoremat.planning.sizes import Symbols, peak_at, sizes_of, subject_at
from autoremat.problem.lower import RNG_STATE, Lowered, as_written, without_spare_states
from autoremat.problem.shell import LOSS_BOUNDARY
from autoremat.reporting import GraphReport


@dataclass(frozen=True)
class Beside:
    """What a step holds beside one of its graphs.

    Attributes:
        held_nbytes: while it runs: what crosses the forwards and backwards of earlier runs.
        gradients_nbytes: in its backward, more: gradients that later runs have returned.
    """

    held_nbytes: int = 0
    gradients_nbytes: int = 0

    @property
    def most_nbytes(self) -> int:
        """In its backward, all of it."""
        return self.held_nbytes + self.gradients_nbytes

    def beyond(self, existing_nbytes: int) -> Beside:
        """The same where gradients exist already, to which those of later runs are added."""
        return Beside(self.held_nbytes, max(0, self.gradients_nbytes - existing_nbytes))


def beside(
    order: Sequence[int],
    number: int,
    crossing_nbytes: Sequence[int],
    gradient_nbytes: Sequence[int],
) -> Beside:
    """What is held beside a graph in that of its runs which finds the most.

    Args:
        order: the number of the graph of each run.
        number: the graph.
        crossing_nbytes: by number, what crosses from a graph's forward to its backward.
        gradient_nbytes: by number, gradients of parameters that a graph's backward returns.
    """
    held = list(accumulate((crossing_nbytes[n] for n in order), initial=0))
    returned = list(accumulate((gradient_nbytes[n] for n in order), initial=0))
    found = [
        (held[run], returned[-1] - returned[run + 1])
        for run, graph in enumerate(order)
        if graph == number
    ]
    most_nbytes, held_nbytes = max(map(sum, found)), max(held for held, _ in found)
    return Beside(held_nbytes, most_nbytes - held_nbytes)


@dataclass(frozen=True)
class Split:
    """How the graphs of a step share its budget. Without any graph, nothing is known of it.

    Attributes:
        share: of what a graph could keep for its backward beyond the least that it must keep, how
            much it may keep. One number for all graphs, whatever the sizes of the batch.
        graphs: signature of each graph.
        order: the number of each run: of its graph, or beyond those of a layer in eager mode.
        crossing_nbytes: by number, what the share gave a graph when the split was made.
        gradient_nbytes: by number, gradients of parameters that a graph's backward returns.
    """

    share: float = 1.0
    graphs: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    crossing_nbytes: tuple[int, ...] = ()
    gradient_nbytes: tuple[int, ...] = ()

    def knows(self, joint: JointGraph, number: int) -> bool:
        """Whether the graph is the one that had this number.

        Code that does something at its first call only has other graphs at the second.
        """
        return self.graphs[number : number + 1] == (_signature(joint),)

    def beside(self, subject: Subject, step: Step, name: str) -> Beside:
        """What is held beside a graph that is being planned.

        Args:
            subject: the graph alone.
            step: what was planned before.
            name: of the graph.
        """
        earlier = step.earlier(name)
        number = len(earlier)
        if not self.knows(subject.joint, number):
            return Beside(step.held_nbytes(name))
        planned = [part.crossing_nbytes for part in earlier]
        own = self._crossing_nbytes(subject)
        crossing = [*planned, own, *self.crossing_nbytes[number + 1 :]]
        return beside(self.order, number, crossing, self.gradient_nbytes)

    def place(
        self,
        subject: Subject,
        number: int,
        found: Beside,
        budget_nbytes: int,
        *,
        eager_nbytes: int = 0,
    ) -> Subject:
        """A graph with what the others take from the budget, as far as that is known.

        Args:
            subject: the graph alone.
            number: how many graphs of the step come before it.
            found: what is held beside it.
            budget_nbytes: of the whole step.
            eager_nbytes: what code in eager mode takes between its forward and backward.
        """
        room_nbytes = eager_nbytes
        is_last = self.order[-1:] == (number,) and self.order.count(number) == 1
        if self.knows(subject.joint, number) and not is_last:
            taken = subject.lowered.shell.resident_nbytes + found.held_nbytes
            own_nbytes = self._crossing_nbytes(subject)
            room_nbytes = max(room_nbytes, budget_nbytes - taken - own_nbytes)
        return replace(subject, lowered=_placed(subject.lowered, found, room_nbytes))

    def _crossing_nbytes(self, subject: Subject) -> int:
        least_nbytes, most_nbytes = _crossings(subject.lowered.problem)
        return least_nbytes + int(self.share * (most_nbytes - least_nbytes))


ALONE = Split()


@dataclass(frozen=True)
class Around:
    """What a step holds beside what is known of its planned graphs, as steps so far have shown.

    Attributes:
        held_nbytes: while the graphs run: other models, and what code in eager mode has saved.
        returned_nbytes: more, in their backward: gradients that the plans do not count.
        eager_nbytes: while code in eager mode goes backward, beside what is resident and what the
            graphs have left alive.
    """

    held_nbytes: int = 0
    returned_nbytes: int = 0
    eager_nbytes: int = 0

    def beside(self, found: Beside) -> Beside:
        """What is held beside one graph, this included."""
        return Beside(
            found.held_nbytes + self.held_nbytes, found.gradients_nbytes + self.returned_nbytes
        )


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
        return storages.total_nbytes(saved | set(joint.fwd_outputs)) + states_nbytes

    @property
    def outputs_nbytes(self) -> int:
        """Of them, what the graph returned to the user's code."""
        return self.subject.lowered.storages.total_nbytes(self.subject.joint.fwd_outputs)

    @functools.cached_property
    def gradient_nbytes(self) -> int:
        """Gradients of parameters that its backward returns: they stay until the step's end."""
        joint = self.subject.joint
        returned = _gradients_by_input(joint)
        gradients = [returned[node] for node in joint.static_inputs if node in returned]
        return self.subject.lowered.storages.total_nbytes(gradients)

    def report(self, found: Beside) -> GraphReport:
        """The graph's report, so much being held beside it."""
        if found not in self._reports:
            subject = replace(self.subject, lowered=_placed(self.subject.lowered, found))
            before = self._baseline(found)
            choice = replace(
                self.choice, peak_nbytes=self.peak_nbytes(found), baseline=lambda: before
            )
            self._reports.clear()
            self._reports[found] = self.explain(subject, choice)
        return self._reports[found]

    def peak_nbytes(self, found: Beside) -> int:
        """The real peak, so much being held beside the graph."""
        return self.resident_nbytes + _beside(self.own_peaks, found)

    def at(self, numbers: Symbols) -> Part:
        """The same graph and plan, its symbolic sizes standing for other numbers."""
        planned = sizes_of(self.subject)
        if all(planned.get(symbol) == number for symbol, number in numbers.items()):
            return self
        subject, plan = as_chosen(self.subject, self.choice), self.choice.solution.plan
        peak_nbytes = peak_at(subject, plan, self.peak_nbytes(Beside()), numbers)
        choice = replace(self.choice, peak_nbytes=peak_nbytes, torchs=None)
        return replace(
            self,
            subject=subject_at(subject, numbers),
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
        return _shared_out(problem, plan, self.choice.peak_nbytes, self.counted)

    @functools.cached_property
    def keeping_peak_nbytes(self) -> int:
        """Of a backward that keeps its graph: what crosses to it stays. As of `own_peaks`."""
        problem, plan = (
            as_chosen(self.subject, self.choice).lowered.problem,
            self.choice.solution.plan,
        )
        boundary = plan.schedule.index(LOSS_BOUNDARY)
        spans = instance_spans(problem, plan)
        kept = {name for name, born, last in spans if born < boundary < last}
        keeping = replace(problem, outputs=tuple(dict.fromkeys((*problem.outputs, *kept))))
        before, after = (
            max(simulate(without_spare_states(p, plan), plan).live_nbytes[boundary:])
            for p in (problem, keeping)
        )
        return self.own_peaks[1] + after - before

    def _baseline(self, found: Beside) -> Baseline:
        """The step without a plan, so much being held beside the graph."""
        counted, problem = self.choice.baseline(), self.subject.lowered.problem
        own = _shared_out(problem, as_written(problem), counted.peak_nbytes, self.counted)
        return counted._replace(peak_nbytes=self.resident_nbytes + _beside(own, found))


def _beside(own_peaks: tuple[int, int], found: Beside) -> int:
    """The peak of both parts, above what is resident."""
    forward_nbytes, backward_nbytes = own_peaks
    return max(forward_nbytes + found.held_nbytes, backward_nbytes + found.most_nbytes)


def _shared_out(problem: Problem, plan: Plan, peak_nbytes: int, counted: Beside) -> tuple[int, int]:
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


@dataclass
class Step:
    """The graphs that were planned so far.

    Steps that several threads take at once are not told apart: the latest to begin is the step.

    Attributes:
        parts: planned graphs, by name.
        runs: names of what ran in the latest step, in its order; None if nobody tells.
        most_runs: of graphs in one step, as far as steps before the latest have shown.
        eager_gradient_nbytes: of layers among the runs that are in eager mode, by their names.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    runs: list[str] | None = None
    most_runs: int = 0
    eager_gradient_nbytes: dict[str, int] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)  # planned, and did not run yet
    _thread: int = 0

    def begin(self, open_runs: Sequence[str] = ()) -> None:
        """A forward begins, of which each run of a graph will be told.

        Args:
            open_runs: graphs of forwards before it, whose backward is still to come.
        """
        self.most_runs = max(self.most_runs, len(self.runs or ()))
        self.runs, self._waiting, self._thread = [*open_runs], [], threading.get_ident()

    def add(self, name: str, part: Part) -> None:
        """Keep a graph that was planned."""
        self.parts[name] = part
        if self._is_here:
            self._waiting.append(name)

    def drop(self, name: str) -> None:
        """Forget a graph that could not be compiled as planned."""
        self.parts.pop(name, None)
        self._waiting = [other for other in self._waiting if other != name]

    def ran(self, name: str) -> None:
        """A graph runs its forward."""
        if self.runs is not None and self._is_here and name in self.parts:
            self.runs.append(name)
            self._waiting = [other for other in self._waiting if other != name]

    def ran_eagerly(self, layer: str, gradient_nbytes: int) -> None:
        """A layer ran in eager mode; its gradients come from the backward of its last run on."""
        if self.runs is not None and self._is_here:
            self.runs = [*(name for name in self.runs if name != layer), layer]
            self.eager_gradient_nbytes[layer] = gradient_nbytes

    def earlier(self, name: str) -> list[Part]:
        """The graphs that ran before one that is being planned, each once."""
        return [self.parts[other] for other in dict.fromkeys(self._before(name))]

    def held_nbytes(self, name: str) -> int:
        """What crosses the forwards and backwards of the runs before that of a graph."""
        return sum(self.parts[other].crossing_nbytes for other in self._before(name))

    def _before(self, name: str) -> list[str]:
        """Of the runs before a graph's first one; a recompile takes the old place."""
        order = [other for other in self._order if other in self.parts]
        return order[: order.index(name)] if name in order else order

    @property
    def _is_here(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def _order(self) -> list[str]:
        """The graph of each run."""
        if self.runs is None:
            return list(self.parts)
        return [*self.runs, *self._waiting]

    def reports(self, existing_gradient_nbytes: int, around: Around) -> Iterator[GraphReport]:
        """Of every graph of the step, in the order in which they run first.

        Args:
            existing_gradient_nbytes: gradients that exist already and are resident.
            around: what is held beside all of them.
        """
        found = self.beside(existing_gradient_nbytes, around)
        yield from (self.parts[name].report(held) for name, held in found.items())

    def beside(self, existing_gradient_nbytes: int, around: Around) -> dict[str, Beside]:
        """What is held beside each graph of the step, by name; arguments as of `reports`."""
        parts, order, eager = self._numbered()
        crossing = [*(part.crossing_nbytes for part in parts), *(0 for _ in eager)]
        gradients = [*(part.gradient_nbytes for part in parts), *eager]
        names = {id(part): name for name, part in self.parts.items()}
        # A backend learns of parameters with the graphs that read them.
        most_nbytes = max((part.step_resident_nbytes for part in parts), default=0)
        result = {}
        for number, part in enumerate(parts):
            found = beside(order, number, crossing, gradients).beyond(existing_gradient_nbytes)
            later = Around(held_nbytes=most_nbytes - part.step_resident_nbytes)
            result[names[id(part)]] = around.beside(later.beside(found))
        return result

    def split(self, budget_nbytes: int, around: Around) -> Split:
        """How the graphs can share the budget, each as well as the others.

        A graph's needs lie between those of the leanest plan known and those of running without
        recompute, and so does what crosses: all go the same share of the way, the largest at which
        each run fits beside what the earlier ones keep.
        """
        parts, order, eager = self._numbered()
        gradients = (*(part.gradient_nbytes for part in parts), *eager)
        crossings = [_crossings(part.subject.lowered.problem) for part in parts]
        crossings += [(0, 0) for _ in eager]
        least, most = zip(*crossings, strict=True)
        needs = []  # peaks of the leanest plan known and of running without recompute
        for number, part in enumerate(parts):
            lean_nbytes, free_nbytes = (
                own + beside(order, number, crossing, gradients).most_nbytes
                for own, crossing in zip(_own_peaks(part), (least, most), strict=True)
            )
            needs.append((part, lean_nbytes, free_nbytes))
            held = (sum(crossing[n] for n in order) for crossing in (least, most))
            needs.append((part, *(around.eager_nbytes + nbytes for nbytes in held)))
        share = 1.0
        for part, lean_nbytes, free_nbytes in needs:
            left_nbytes = budget_nbytes - around.held_nbytes
            left_nbytes -= part.subject.lowered.shell.resident_nbytes
            if free_nbytes > max(left_nbytes, lean_nbytes):
                most_share = (left_nbytes - lean_nbytes) / (free_nbytes - lean_nbytes)
                share = min(share, max(0.0, most_share))
        crossing_nbytes = tuple(low + int(share * (high - low)) for low, high in crossings)
        signatures = tuple(_signature(part.subject.joint) for part in parts)
        return Split(share, signatures, tuple(order), crossing_nbytes, gradients)

    def follows(self, split: Split) -> bool:
        """Whether the runs are those that the split was made for."""
        numbered = enumerate(self._numbered()[0])
        are_known = all(split.knows(part.subject.joint, number) for number, part in numbered)
        return are_known and self.order == split.order

    def peak_nbytes(self, existing_gradient_nbytes: int, around: Around) -> int:
        """The highest of its graphs and of the code between them; arguments as of `reports`."""
        return max(
            self.graphs_peak_nbytes(existing_gradient_nbytes, around),
            self.eager_peak_nbytes(around),
        )

    def graphs_peak_nbytes(self, existing_gradient_nbytes: int, around: Around) -> int:
        """The highest of its graphs, 0 without any; arguments as of `reports`."""
        found = self.beside(existing_gradient_nbytes, around)
        return max((self.parts[name].peak_nbytes(held) for name, held in found.items()), default=0)

    def eager_peak_nbytes(self, around: Around) -> int:
        """The highest while code in eager mode goes backward, as far as a step has shown it."""
        parts, order, _ = self._numbered()
        if not parts or not around.eager_nbytes:
            return 0
        crossing_nbytes = sum(parts[n].crossing_nbytes for n in order if n < len(parts))
        resident_nbytes = max(part.resident_nbytes for part in parts)
        return resident_nbytes + crossing_nbytes + around.eager_nbytes

    @property
    def order(self) -> tuple[int, ...]:
        """The number of each run, as a split counts them."""
        return tuple(self._numbered()[1])

    @property
    def current(self) -> list[Part]:
        """The graphs of the step, each once."""
        return self._numbered()[0]

    def _numbered(self) -> tuple[list[Part], list[int], list[int]]:
        """The graphs in the order in which they run first, the number of each run, and gradients.

        The numbers behind those of the graphs are layers in eager mode, which have gradients only.
        """
        order = self._order
        graphs = list(dict.fromkeys(name for name in order if name in self.parts))
        layers = [name for name in order if name not in self.parts]
        names = [*graphs, *layers]
        gradients = [self.eager_gradient_nbytes[name] for name in layers]
        return [self.parts[name] for name in graphs], [names.index(n) for n in order], gradients


def _placed(lowered: Lowered, found: Beside, room_nbytes: int = 0) -> Lowered:
    """The graph's problem, so much being held beside it."""
    shell = replace(
        lowered.shell,
        resident_nbytes=lowered.shell.resident_nbytes + found.held_nbytes,
        later_gradients_nbytes=found.gradients_nbytes,
        room_nbytes=room_nbytes,
    )
    return replace(lowered, shell=shell)


def _signature(joint: JointGraph) -> int:
    """Equal for graphs of the same operations, whatever the sizes of their tensors."""
    targets = (node.target for node in joint.nodes)
    return hash(tuple(str(t) for t in targets if isinstance(t, _torch.OpOverload)))


def _crossings(problem: Problem) -> tuple[int, int]:
    """What crosses to the backward at least, and where nothing is recomputed."""
    least_nbytes, most_nbytes = (
        _crossing_nbytes(problem, plan) for plan in (recompute_all(problem), as_written(problem))
    )
    return min(least_nbytes, most_nbytes), most_nbytes


def _crossing_nbytes(problem: Problem, plan: Plan) -> int:
    """Bytes that live between the forward and the backward of a plan."""
    boundary = problem.op_by_name[LOSS_BOUNDARY]
    own = boundary.workspace_nbytes + sum(problem.value_by_name[n].nbytes for n in boundary.outputs)
    live_nbytes = simulate(problem, plan).live_nbytes[plan.schedule.index(LOSS_BOUNDARY)]
    return live_nbytes - own - problem.resident_nbytes


def _own_peaks(part: Part) -> tuple[int, int]:
    """Peak above what it found live: under its present plan, and without recompute."""
    problem = part.subject.lowered.problem
    lean_nbytes = max(part.own_peaks)
    free_nbytes = without_recompute(problem).peak_nbytes - problem.resident_nbytes
    return lean_nbytes, max(lean_nbytes, free_nbytes)


def _gradients_by_input(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """What the backward returns for each input of the forward."""
    results: Sequence[object] = _torch.arg_tree_leaves(*joint.module.graph.output_node().args)
    gradients = results[joint.num_fwd_outputs :]
    pairs = zip(joint.primals, gradients, strict=False)  # effect tokens follow
    return {node: gradient for node, gradient in pairs if isinstance(gradient, fx.Node)}
