"""The report: what was planned for one training step, graph by graph, and what that costs.

Enters: names, bytes and microseconds from the planner. Leaves: frozen dataclasses whose fields are
what their types say, or a `ReportError`. What follows from others is a property, never a field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from autoremat_solver.plan import Status

from autoremat.reporting.curve import CurvePoint
from autoremat.reporting.fields import check_fields
from autoremat.reporting.formula import PeakFormula
from autoremat.reporting.remedies import Remedy
from autoremat.reporting.reserved import ReservedMemory
from autoremat.reporting.resident import ResidentParts
from autoremat.reporting.throughput import Throughput
from autoremat.reporting.timeline import MemoryTimeline
from autoremat.reporting.waiting import Waiting

SCHEMA = "autoremat.report/5"
LEFT_OUT, ASSUMED, WOULD_WAIT = "Not on the curve", "Assumed", "Would wait"  # names of facts
SIZES, OTHERWISE, NO_THROUGHPUT, CHECKPOINTS = "Sizes", "Otherwise", "Throughput", "Checkpoints"
COMMUNICATED = "Communication"


class ValueAction(StrEnum):
    """What the plan does with a value of the forward."""

    SAVE = "save"
    """The backward reads the instance that the forward made; it may make others later."""
    RECOMPUTE = "recompute"
    """Freed in the forward, made again in the backward."""
    AWAY = "away"
    """Waits elsewhere between forward and backward, which may make other instances later."""
    FREE = "free"
    """Not kept for the backward, which does not read it, or makes it by itself."""


@dataclass(frozen=True, slots=True)
class ValueReport:
    """One value of the forward.

    Attributes:
        name: of the graph's node.
        nbytes: size of its storage, rounded as the device's allocator rounds.
        shape: sizes; a symbolic dimension is a string.
        dtype: such as "float32".
        action: what happens to it.
        recomputes: how many times the backward makes it again.
        source: the user's line, "model.py:88", or "".
        module: path of the module that made it, "layers.3.mlp", or "".
        op: operator that made it, such as "mm".
        reason: why this action, one sentence with units.
        time_us: duration of making it once.
        avoided_runs: for a saved value, how many operations would run again if it were not:
            its own and those that make inputs of it which are freed by then.
        avoided_us: their duration together.
    """

    name: str
    nbytes: int
    shape: tuple[int | str, ...]
    dtype: str
    action: ValueAction
    recomputes: int = 0
    source: str = ""
    module: str = ""
    op: str = ""
    reason: str = ""
    time_us: float = 0.0
    avoided_runs: int = 0
    avoided_us: float = 0.0

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def recompute_us(self) -> float:
        """Time that all its recomputes take together."""
        return self.recomputes * self.time_us


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One compiled graph of the step.

    Attributes:
        name: such as "graph 0".
        predicted_peak_nbytes: highest live bytes while this graph runs: resident bytes and what
            other graphs of the step keep alive meanwhile are included.
        baseline_peak_nbytes: the same without a plan, by the same meter. Op by op that is the step
            without recompute but for the model's own checkpoints; under Inductor, whose generated
            code is read, torch's own partition (where that is not safe, no recompute).
        predicted_time_us: duration of forward and backward under the plan, operation by operation.
        baseline_time_us: the same without a plan.
        bound_us: proven: no plan of the model within the budget is faster; 0 if nothing is proven.
        status: how far the solver got.
        method: which strategy found the plan.
        solve_seconds: wall-clock time of the solve.
        values: values of the forward, in the order in which they are made.
        timeline: what is live at each step, as simulated. Code that a compiler rearranges has
            another peak; `predicted_peak_nbytes` states that one.
        peak_step: name of the node at which the plan peaks.
        peak_source: the user's line of that node, or "".
        estimated_ops: operations whose time is priced by bytes and FLOPs, not measured, or was
            measured without two rounds that agree.
        constraints: what the plan had to respect, one sentence each.
        left_out: stages of the search that did not run, as the time limit was over.
        code_time_us: duration of the kernels that Inductor generates for the plan: calls of
            libraries as they were measured, loops by what they move and compute. None where no code
            was read, or something in it has no known time.
        baseline_code_time_us: the same without a plan.
        advice: what would lower the peak whatever the plan, what saves most first.
        peak_formula: the simulated peak over the sizes that vary; None where there is none.
        smaller_formulas: the same of the plans for parts of the ranges of sizes, up to the highest
            of each symbol; a call runs by the first whose sizes are not smaller than its own.
        waiting: which values leave the device and come back; None where none may.
    """

    name: str
    predicted_peak_nbytes: int
    baseline_peak_nbytes: int
    predicted_time_us: float
    baseline_time_us: float
    bound_us: float
    status: Status
    method: str
    solve_seconds: float
    values: tuple[ValueReport, ...] = ()
    timeline: MemoryTimeline | None = None
    peak_step: str = ""
    peak_source: str = ""
    estimated_ops: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    code_time_us: float | None = None
    baseline_code_time_us: float | None = None
    advice: tuple[Remedy, ...] = ()
    peak_formula: PeakFormula | None = None
    smaller_formulas: tuple[PeakFormula, ...] = ()
    waiting: Waiting | None = None

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is at most, as a fraction of the bound."""
        return _gap(self.predicted_time_us, self.bound_us)

    @property
    def modelled_peak_nbytes(self) -> int:
        """Peak of the simulated timeline; the predicted one where there is no timeline."""
        return self.timeline.peak_nbytes if self.timeline else self.predicted_peak_nbytes


@dataclass(frozen=True, slots=True)
class Fallback:
    """A part of the step that runs without a plan: under torch's own partitioner or in eager mode.

    Attributes:
        code: stable, such as "AR101".
        sentence: which part and why.
        remedy: what the user can do about it, or "".
    """

    code: str
    sentence: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    def __str__(self) -> str:
        """Code and sentence, as in the warning."""
        return f"{self.code}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the machine or the software, such as "Python", "3.12.3"."""

    name: str
    text: str

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Report:
    """One training step: one graph in the simple case, several after graph breaks.

    Attributes:
        budget_nbytes: allowed peak.
        resident: live all the time, by what it is; what others hold, while its highest graph runs.
        graphs: the compiled graphs that were planned, in the order in which they were captured.
        measured_peak_nbytes: what the device reported for a whole step; None before one ran.
        compiler: what compiles the graphs, such as "inductor".
        device: its name.
        torch_version: of the torch that captured the graphs.
        fallbacks: one for each reason to leave a graph to torch's own partitioner.
        user_constraints: what the user asked for beside the budget, one sentence each.
        curve: peak and time of other plans and strategies, in no particular order.
        facts: versions and hardware, and what the curve lacks.
        optimizer: class of the optimizer whose state is counted; "" if none was given.
        eager_peak_nbytes: highest live bytes while code in eager mode goes backward outside of the
            graphs, if that is the highest of the step; else 0. Estimated.
        baseline_eager_peak_nbytes: the same of the step without a plan.
        reserved: what CUDA's allocator takes for the step; None where no GPU is planned for, where
            the step runs (then the device tells), and where a part of it has no plan.
        throughput: what the step does per second, at this budget and beside it; None where nobody
            asked, or where it is not known ("Throughput" among the facts says why).
    """

    budget_nbytes: int
    resident: ResidentParts
    graphs: tuple[GraphReport, ...]
    measured_peak_nbytes: int | None = None
    compiler: str = ""
    device: str = ""
    torch_version: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    user_constraints: tuple[str, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    facts: tuple[Fact, ...] = ()
    optimizer: str = ""
    eager_peak_nbytes: int = 0
    baseline_eager_peak_nbytes: int = 0
    reserved: ReservedMemory | None = None
    throughput: Throughput | None = None

    def __post_init__(self) -> None:
        """Refuses fields of the wrong type."""
        check_fields(self)

    @property
    def resident_nbytes(self) -> int:
        """Live all the time."""
        return self.resident.nbytes

    @property
    def predicted_peak_nbytes(self) -> int:
        """Highest live bytes of the step; with no planned graph, what is known: the resident."""
        peaks = [g.predicted_peak_nbytes for g in self.graphs] or [self.resident_nbytes]
        return max(*peaks, self.eager_peak_nbytes)

    @property
    def baseline_peak_nbytes(self) -> int:
        """Highest live bytes of the step without a plan, by the meter of the predicted peak.

        What code around several graphs holds of their results is taken to be as under the plan.
        """
        peaks = [g.baseline_peak_nbytes for g in self.graphs] or [self.resident_nbytes]
        # Code in eager mode takes more without a plan, not less.
        return max(*peaks, self.eager_peak_nbytes, self.baseline_eager_peak_nbytes)

    @property
    def predicted_time_us(self) -> float:
        """Duration of the step under the plan."""
        return math.fsum(graph.predicted_time_us for graph in self.graphs)

    @property
    def knows_baseline_peak(self) -> bool:
        """Whether the peak without a plan is known of every graph."""
        return all(graph.baseline_peak_nbytes for graph in self.graphs)

    @property
    def baseline_time_us(self) -> float:
        """Duration of the step without a plan."""
        return math.fsum(graph.baseline_time_us for graph in self.graphs)

    @property
    def code_times_us(self) -> tuple[float, float] | None:
        """Duration of the generated kernels without the plan and with it; None if not all known."""
        before = [graph.baseline_code_time_us for graph in self.graphs]
        after = [graph.code_time_us for graph in self.graphs]
        known = [time_us for time_us in (*before, *after) if time_us is not None]
        if not known or len(known) < len(before) + len(after):
            return None
        return math.fsum(known[: len(before)]), math.fsum(known[len(before) :])

    @property
    def advice(self) -> tuple[Remedy, ...]:
        """What would lower the peak of the graph that takes most: at most three, best first.

        None where the step peaks outside of it: that peak would stay.
        """
        graph = self.peak_graph
        if graph is None or self.predicted_peak_nbytes > graph.predicted_peak_nbytes:
            return ()
        return graph.advice

    @property
    def peak_formula(self) -> PeakFormula | None:
        """The simulated peak of the graph that takes most, over its sizes that vary.

        Where smaller sizes have plans of their own, it is that of the plan for the largest: theirs,
        which peak higher there, within the budget, are `smaller_formulas`.
        """
        graph = self.peak_graph
        return graph.peak_formula if graph is not None else None

    @property
    def smaller_formulas(self) -> tuple[PeakFormula, ...]:
        """The same of the plans for smaller sizes: a call runs by the first that is for its own."""
        graph = self.peak_graph
        return graph.smaller_formulas if graph is not None else ()

    @property
    def curve_left_out(self) -> tuple[str, ...]:
        """What was asked for and is not on the curve, and why."""
        return tuple(fact.text for fact in self.facts if fact.name == LEFT_OUT)

    @property
    def assumed(self) -> tuple[str, ...]:
        """Of a step that was not run, what was taken for granted of the run that it is part of."""
        return tuple(fact.text for fact in self.facts if fact.name == ASSUMED)

    @property
    def sizes(self) -> tuple[str, ...]:
        """For which ranges of sizes plans were made, and how far that is proven."""
        return tuple(fact.text for fact in self.facts if fact.name == SIZES)

    @property
    def otherwise(self) -> tuple[str, ...]:
        """Of other plans, by which steps that find other gradients run."""
        return tuple(fact.text for fact in self.facts if fact.name == OTHERWISE)

    @property
    def no_throughput(self) -> str:
        """Why it is not known what the step does per second; "" where it is, or nobody asked."""
        return " ".join(fact.text for fact in self.facts if fact.name == NO_THROUGHPUT)

    @property
    def communication(self) -> tuple[str, ...]:
        """What is kept since collectives run once."""
        return tuple(fact.text for fact in self.facts if fact.name == COMMUNICATED)

    @property
    def own_checkpoints(self) -> tuple[str, ...]:
        """That the user's own checkpoints cost more than they have to, where they do."""
        return tuple(fact.text for fact in self.facts if fact.name == CHECKPOINTS)

    @property
    def bound_us(self) -> float:
        """Proven: no plan of the model within the budget is faster."""
        return math.fsum(graph.bound_us for graph in self.graphs)

    @property
    def gap(self) -> float:
        """How much slower than the bound the step is at most, as a fraction of the bound."""
        return _gap(self.predicted_time_us, self.bound_us)

    @property
    def status(self) -> Status | None:
        """The least certain status among the graphs; None if no graph was planned."""
        certainty = tuple(Status)
        return max((graph.status for graph in self.graphs), key=certainty.index, default=None)

    @property
    def method(self) -> str:
        """The strategies that found the plans, each named once."""
        return ", ".join(dict.fromkeys(graph.method for graph in self.graphs))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Stages of the search that the time limit left out, for any graph."""
        return tuple(dict.fromkeys(name for graph in self.graphs for name in graph.left_out))

    @property
    def solve_seconds(self) -> float:
        """Wall-clock time of all solves."""
        return math.fsum(graph.solve_seconds for graph in self.graphs)

    @property
    def values(self) -> tuple[ValueReport, ...]:
        """Values of the forward, graph after graph."""
        return tuple(chain.from_iterable(graph.values for graph in self.graphs))

    @property
    def peak_graph(self) -> GraphReport | None:
        """The first graph that reaches the predicted peak."""
        return max(self.graphs, key=lambda graph: graph.predicted_peak_nbytes, default=None)

    @property
    def peak_step(self) -> str:
        """Name of the node at which the step peaks."""
        return self.peak_graph.peak_step if self.peak_graph else ""

    @property
    def estimated_ops(self) -> tuple[str, ...]:
        """Operations priced, not measured, or measured with times that contradict each other."""
        return tuple(chain.from_iterable(graph.estimated_ops for graph in self.graphs))

    @property
    def constraints(self) -> tuple[str, ...]:
        """What the plans had to respect."""
        return tuple(dict.fromkeys(chain.from_iterable(g.constraints for g in self.graphs)))

    @property
    def highest_peak_nbytes(self) -> int:
        """The predicted peak or the measured one, whichever is higher."""
        return max(self.predicted_peak_nbytes, self.measured_peak_nbytes or 0)

    @property
    def is_within_budget(self) -> bool:
        """Whether something is planned and no peak known of it is above the budget."""
        is_within = self.reserved is None or self.reserved.is_within_budget
        return is_within and bool(self.graphs) and self.highest_peak_nbytes <= self.budget_nbytes

    def with_measured(self, peak_nbytes: int) -> Report:
        """This report with the peak that the device reported."""
        return replace(self, measured_peak_nbytes=peak_nbytes)

    def to_json(self) -> str:
        """This report as strict JSON text, totals included; `from_json` gives an equal one."""
        from autoremat.reporting.document import write

        return write(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote.

        Raises:
            ReportError: if the text is no JSON, incomplete, of another schema, or contradictory.
        """
        from autoremat.reporting.document import read

        return read(text)

    def summary(self, width: int | None = None) -> str:
        """The report as plain text, the verdict first: 10 to 26 lines, more in a narrow `width`."""
        from autoremat.reporting.text import summary

        return summary(self, width)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from autoremat.reporting.page import html

        return html(self)

    def _repr_html_(self) -> str:
        """What a notebook shows of it: the verdict, and the summary to unfold."""
        from autoremat.reporting.page import summary_html

        return summary_html(self)


def _gap(time_us: float, bound_us: float) -> float:
    if bound_us <= 0:
        return 0.0 if time_us <= 0 else math.inf
    return max(0.0, time_us / bound_us - 1.0)
