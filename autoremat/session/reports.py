"""What a session reports: the `Report` of a step, and the plan that a file keeps of it.

Enters: `Steps`. Leaves: plain data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from autoremat.ask.hosts import host_of
from autoremat.ask.options import Setting
from autoremat.ask.plan_file import StoredPlan
from autoremat.elsewhere.present import how_planned
from autoremat.explain.advice import Narrowed
from autoremat.explain.communicated import kept_of_communication
from autoremat.explain.environment import environment_facts
from autoremat.explain.graph_report import explain
from autoremat.explain.reserved import reserved_memory
from autoremat.explain.waiting import what_waiting_saves
from autoremat.graph.devices import device_nbytes as device_nbytes_of
from autoremat.host.memory import HostMemory
from autoremat.memory.residents import Resident, resident_of_step
from autoremat.planning.choice import Choice, recomputed_share
from autoremat.planning.curve import Curve
from autoremat.planning.part import Part, Planned
from autoremat.problem.subject import Subject
from autoremat.reporting import (
    CHECKPOINTS,
    COMMUNICATED,
    LEFT_OUT,
    SIZES,
    WOULD_WAIT,
    Fact,
    GraphReport,
    PeakFormula,
    Report,
    one_line,
)
from autoremat.reporting.reserved import ReservedMemory
from autoremat.reporting.waiting import TOGETHER
from autoremat.session.own_checkpoints import cost_of_checkpoints
from autoremat.session.steps import Steps
from autoremat.units import format_nbytes

# Names of facts.
COMPILES, TUNED, PLANNED_FOR = "Compiles", "Tuned", "Planned for"

_MUCH_NBYTES = 1 << 50  # of a host that nobody knows


def report_of(steps: Steps, measured_peak_nbytes: int | None, *, reads: bool = True) -> Report:
    """What was planned so far.

    Args:
        steps: what is planned.
        measured_peak_nbytes: of a whole step, if it was measured.
        reads: whether code may be read for it, as of `Part.report`, allocators emulated, and other
            plans searched for.
    """
    parts, setting = steps.graphs.current, steps.options.setting
    curve = _step_curve(parts)
    asked = (sentence for part in parts for sentence in part.subject.constraints.sentences)
    graphs = tuple(
        steps.graphs.reports(steps.surroundings.now, reads=reads, accumulates=steps.accumulates)
    )
    return Report(
        budget_nbytes=steps.budget_nbytes if parts else 0,
        resident=resident_of_step([part.resident.parts for part in parts], graphs),
        graphs=graphs,
        measured_peak_nbytes=measured_peak_nbytes,
        compiler=setting.compiler,
        device=setting.device_name(steps.device),
        torch_version=torch.__version__,
        fallbacks=tuple(steps.told.fallbacks),
        user_constraints=tuple(dict.fromkeys(asked)),
        curve=curve.points,
        facts=(
            *environment_facts(steps.device),
            *_elsewhere(setting),
            *_compiles(steps),
            *([Fact(TUNED, steps.tuned)] if steps.tuned else []),
            *_sizes(parts),
            *(Fact(LEFT_OUT, sentence) for sentence in curve.left_out),
            *(Fact(COMMUNICATED, sentence) for sentence in _kept_of_communication(parts)),
            *(_checkpoints(steps) if reads else ()),
            *(_would_wait(steps, parts) if reads else ()),
            *_wait_together(steps, graphs),
        ),
        optimizer=steps.resident.optimizer,
        eager_peak_nbytes=_eager_peak_nbytes(steps),
        baseline_eager_peak_nbytes=_baseline_eager_peak_nbytes(steps, graphs),
        reserved=_reserved(steps, parts) if reads else None,
    )


def line_of(steps: Steps, measured_peak_nbytes: int | None) -> str:
    """The summary, for which nothing is read, nor made again that was recalled."""
    if all(isinstance(part.planned, Planned) for part in steps.graphs.parts.values()):
        return one_line(report_of(steps, measured_peak_nbytes, reads=False))
    peak, budget = map(format_nbytes, (steps.peak_nbytes, steps.budget_nbytes))
    return f"autoremat: peak {peak} (budget {budget})"


def _reserved(steps: Steps, parts: list[Part]) -> ReservedMemory | None:
    """What CUDA's allocator reserves for a step that does not run, where all of it is known."""
    spec, tensors = steps.options.setting.spec, steps.resident.tensors
    if steps.offline is None or tensors is None or not parts or steps.told.fallbacks:
        return None
    device_nbytes = device_nbytes_of(steps.device) if spec is None else spec.memory_nbytes
    return reserved_memory(parts, tensors, device_nbytes)


def _elsewhere(setting: Setting) -> Iterator[Fact]:
    """What a plan for a device that is not here was made from."""
    if setting.spec is not None:
        yield Fact(
            PLANNED_FOR,
            how_planned(setting.spec, from_code=setting.reads_inductor, on_gpu=setting.stands_in),
        )


def _checkpoints(steps: Steps) -> Iterator[Fact]:
    sentence = cost_of_checkpoints(steps)
    if sentence is not None:
        yield Fact(CHECKPOINTS, sentence)


def _would_wait(steps: Steps, parts: list[Part]) -> Iterator[Fact]:
    """What values would save that wait beside a GPU that is not here, where a curve is wanted."""
    setting, offline = steps.options.setting, steps.offline
    if setting.spec is None or setting.offload is not None or len(parts) != 1:
        return
    if offline is None or not offline.curve_points:
        return
    with contextlib.suppress(Exception):  # what is only told may cost nobody their plan
        host, part = host_of(_MUCH_NBYTES, None, setting.spec), parts[0]
        if isinstance(host, HostMemory):
            limit_s = offline.curve_limit_s / 2
            sentence = what_waiting_saves(part.subject, part.choice, host, limit_s)
            if sentence is not None:
                yield Fact(WOULD_WAIT, sentence)


def _wait_together(steps: Steps, graphs: Sequence[GraphReport]) -> Iterator[Fact]:
    """What waits at once in a step of several runs, where that is more than a run's."""
    if steps.options.setting.offload is None:
        return
    together_nbytes = steps.graphs.host_nbytes(steps.surroundings.now)
    most_nbytes = max((g.waiting.host_peak_nbytes for g in graphs if g.waiting), default=0)
    if together_nbytes > most_nbytes:
        size = format_nbytes(together_nbytes)
        yield Fact(TOGETHER, f"In all runs of the step together, at most {size} may wait at once.")


def _kept_of_communication(parts: list[Part]) -> Iterator[str]:
    for part in parts:
        sentence = kept_of_communication(part.subject, part.choice)
        if sentence is not None:
            yield sentence


def stored_plan_of(steps: Steps, *, instead: Mapping[str, Part]) -> StoredPlan:
    """What was planned so far, for a file.

    Args:
        steps: with graphs and their plans; of two plans of a graph, a file keeps the leaner one.
        instead: graphs that are stored in another way than they run now.
    """
    parts = {**steps.graphs.parts, **instead}
    names = dict.fromkeys(steps.graphs.graphs)
    graphs = tuple(parts[name].planned.whole.stored for name in names if name in parts)
    setting = steps.options.setting
    device_name = setting.device_name(steps.device)
    return StoredPlan(graphs, setting.compiler, device_name, torch.__version__)


def explained(
    name: str,
    narrowed: Narrowed,
    subject: Subject,
    plain: Subject,
    choice: Choice,
    formula: PeakFormula | None,
    resident: Resident | None,
) -> GraphReport:
    """A graph's report, what the user asked for among its constraints; arguments of `explain`."""
    found = explain(name, subject, plain, choice, formula, resident, narrowed)
    return replace(found, constraints=(*subject.constraints.sentences, *found.constraints))


def _compiles(steps: Steps) -> Iterator[Fact]:
    """How often graphs were compiled: once a step is settled, never again."""
    if steps.number and not steps.offline:
        latest = steps.compiled_in[-1] if steps.compiled_in else 0
        text = f"{len(steps.compiled_in)}, the latest in step {latest} of {steps.number}"
        yield Fact(COMPILES, text)


def _sizes(parts: list[Part]) -> Iterator[Fact]:
    """For which ranges of sizes the graphs were planned, and how far that is proven."""
    found = [text for part in parts for text in _sizes_of(part)]
    yield from (Fact(SIZES, text) for text in dict.fromkeys(found))


def _sizes_of(part: Part) -> Iterator[str]:
    if part.covered is not None:
        yield str(part.covered)
    for one in part.smaller or ():
        now, before = (f"{recomputed_share(p.choice):.1%}" for p in (one, part))
        yield f"{one.covered}; recomputes {now} of a step where the plan before recomputes {before}"


def _eager_peak_nbytes(steps: Steps) -> int:
    """Of code outside of the graphs, where the step peaks there; else 0."""
    around = steps.surroundings.now
    eager_nbytes = steps.graphs.eager_peak_nbytes(around)
    return eager_nbytes if eager_nbytes > steps.graphs.graphs_peak_nbytes(around) else 0


def _baseline_eager_peak_nbytes(steps: Steps, graphs: Sequence[GraphReport]) -> int:
    """The same without a plan, where that is known of all graphs."""
    baselines_nbytes = [graph.baseline_peak_nbytes for graph in graphs]
    if not all(baselines_nbytes):
        return 0
    eager_nbytes = steps.graphs.baseline_eager_peak_nbytes(steps.surroundings.now)
    return eager_nbytes if eager_nbytes > max(baselines_nbytes, default=0) else 0


def _step_curve(parts: list[Part]) -> Curve:
    """Of a step of one graph; the curves of several do not add up to one."""
    curves = [part.planned.whole.curve for part in parts]
    if len(curves) < 2 or not any(curve.points for curve in curves):
        return curves[0] if curves else Curve()
    return Curve(left_out=(f"the curves of {len(curves)} graphs do not add up to one",))
