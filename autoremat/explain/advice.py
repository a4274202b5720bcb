"""What a user can change about a step, so that it takes less: each with the peak that comes of it.

Enters: a planned graph, and what is resident beside it. Leaves: `Remedy` values. Guarantees: each
figure is what `simulate` says of the same plan for the step so changed (`changed_step`), never a
rule of thumb; what cannot be computed of this graph is not told. Where the code that Inductor
generates takes more than is simulated, so much is added; where it takes less, it may do so after
the change as well, and the figure is a bound. No size is compared but by its hint: advice adds no
guard to what is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from autoremat_solver import Plan, Problem, simulate
from torch import fx

from autoremat import _torch
from autoremat.explain.changed_step import (
    Step,
    chunked,
    head_of,
    numel,
    only_loss,
    results_beside_loss,
)
from autoremat.explain.divided_step import DEVICES, divided
from autoremat.explain.halved_batch import batch_of, halved
from autoremat.explain.narrow_step import is_cast, under_same_plan
from autoremat.explain.places import source_of
from autoremat.graph.joint_graph import JointGraph
from autoremat.memory.residents import Resident
from autoremat.planning.choice import Choice, as_chosen
from autoremat.planning.figures import gradients_by_input
from autoremat.problem.lower import without_spare_states
from autoremat.problem.subject import Subject
from autoremat.reporting import PeakFormula
from autoremat.reporting.remedies import Remedy, of_halves, ranked, smaller_batch
from autoremat.units import format_nbytes

_CHUNKS = (2, 4, 8)
# Block-wise 8-bit optimizers [Dettmers2022]: a byte for each number of either moment, a scale of
# four bytes for each block; small tensors stay as they are.
_BLOCK, _SMALLEST, _SCALE_NBYTES = 256, 4096, 4
_TWO_MOMENTS = ("Adam", "AdamW")
_NARROW = (torch.bfloat16, torch.float16)
MOST_TRACED_NODES = 5_000  # of a joint graph that is worked out again, which takes its time
Narrowed = Callable[[Subject], Subject]
"""The state of a graph under autocast to bfloat16, given the one without."""
_ALIKE = 0.01  # of the state that is counted: it may have counts of steps beside the moments


def advice_of(
    subject: Subject,
    choice: Choice,
    resident: Resident,
    formula: PeakFormula | None,
    narrowed: Narrowed | None = None,
) -> tuple[Remedy, ...]:
    """The changes that lower the peak of a graph most, whatever the plan.

    What goes wrong in one costs nobody the others, nor the report.

    Args:
        subject: the graph.
        choice: its plan.
        resident: what the step holds whatever the plan.
        formula: of the plan's peak, if sizes vary.
        narrowed: states the graph under autocast, where it can be traced again.
    """
    subject = as_chosen(subject, choice)
    plan, problem = choice.solution.plan, subject.lowered.problem
    problem = without_spare_states(problem, plan)
    step = _Planned(subject, problem, plan, choice.peak_nbytes, formula, choice.is_read, narrowed)
    found: list[Remedy] = []
    for ask in (_only_loss, _chunks, _no_gradients, _8_bit, _batch, _divided, _autocast):
        try:
            found += ask(step, resident)
        except Exception:  # what is only told may cost nobody their plan
            continue
    return ranked(found)


@dataclass(frozen=True)
class _Planned:
    """A graph as it runs.

    Attributes:
        subject: the graph.
        problem: without states of draws that the plan repeats nowhere.
        plan: its plan.
        peak_nbytes: the step's, by the meter of the report.
        formula: of the peak, if sizes vary.
        is_read: whether the peak is read from generated code.
        narrowed: states the graph under autocast; None where nobody can.
    """

    subject: Subject
    problem: Problem
    plan: Plan
    peak_nbytes: int
    formula: PeakFormula | None
    is_read: bool
    narrowed: Narrowed | None = None

    @functools.cached_property
    def simulated_nbytes(self) -> int:
        """The peak by the simulator."""
        return simulate(self.problem, self.plan).peak_nbytes

    @property
    def joint(self) -> JointGraph:
        """Forward and backward."""
        return self.subject.joint

    @property
    def is_whole(self) -> bool:
        """Whether the step has no graph beside this one: what it returns, no other graph reads."""
        shell = self.subject.lowered.shell
        return not (shell.later_gradients_nbytes or shell.room_nbytes)

    def remedy(self, name: str, sentence: str, simulated_nbytes: int) -> Iterator[Remedy]:
        """A change that has this peak by the simulator, if the step's falls by it."""
        unseen_nbytes = max(0, self.peak_nbytes - self.simulated_nbytes)
        peak_nbytes = simulated_nbytes + unseen_nbytes
        if peak_nbytes < self.peak_nbytes:
            yield Remedy(name, sentence, self.peak_nbytes - peak_nbytes, peak_nbytes)

    def held_less(self, name: str, sentence: str, nbytes: int) -> Iterator[Remedy]:
        """A change by which so much less is resident."""
        if nbytes > 0:
            yield Remedy(name, sentence, nbytes, self.peak_nbytes - nbytes)


def _only_loss(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Without the results that a loss comes with."""
    beside = results_beside_loss(step.subject) if step.is_whole else []
    if not beside:
        return
    tangents = _torch.results_of_tangents(step.joint.module.graph).values()
    given = ", and the backward is given a gradient for it, zeros where nobody uses it"
    yield from step.remedy(
        "return only the loss",
        f"The model returns {_named(beside, step)} beside its loss, which the caller holds until "
        f"the backward ends{given if set(beside) & set(tangents) else ''}: return only the loss, "
        "unless more is computed from it.",
        only_loss(step.subject, Step(step.problem, step.plan)).peak_nbytes,
    )


def _chunks(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """The layer before a loss, and the loss, for a part of the rows at a time."""
    head = head_of(step.subject) if step.is_whole else None
    if head is None or head.rows < 2 * max(_CHUNKS):
        return
    changed, also = Step(step.problem, step.plan), ""
    if results_beside_loss(step.subject):
        changed, also = only_loss(step.subject, changed), " (and return only the loss)"
    name, shape = head.node.name, " x ".join(map(str, head.shape))
    steps = {
        chunks: chunked(step.subject, changed, head, chunks, is_fused=step.is_read)
        for chunks in _CHUNKS
    }
    chunks = min(steps, key=lambda chunks: steps[chunks].peak_nbytes)
    yield from step.remedy(
        "chunk the loss",
        f"Compute `{name}`{_at(head.node)}, {shape}, and the loss on it in {chunks} chunks of "
        f"rows, each in torch.utils.checkpoint{also}.",
        steps[chunks].peak_nbytes,
    )


def _no_gradients(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Without gradients that exist already as the step begins."""
    nbytes = resident.parts.gradients_nbytes
    if nbytes and not resident.accumulates:
        yield from step.held_less(
            "gradients to None",
            f"{format_nbytes(nbytes)} of gradients exist as the forward begins: unless batches are "
            "accumulated, call optimizer.zero_grad(set_to_none=True) before it.",
            nbytes,
        )


def _8_bit(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Both moments of Adam in a byte each."""
    numbers = list(_numbers_of_parameters(step.joint))
    whole_nbytes = sum(2 * nbytes for _, nbytes in numbers)
    state_nbytes = resident.parts.optimizer_nbytes
    is_known = abs(state_nbytes - whole_nbytes) <= _ALIKE * state_nbytes
    if resident.optimizer not in _TWO_MOMENTS or not is_known:
        return
    saved_nbytes = whole_nbytes - sum(2 * _quantised(*one) for one in numbers)
    yield from step.held_less(
        "8-bit optimizer",
        f"Take {resident.optimizer} with its state of {format_nbytes(state_nbytes)} in 8 bits, "
        f"such as {resident.optimizer}8bit of bitsandbytes.",
        saved_nbytes,
    )


def _numbers_of_parameters(joint: JointGraph) -> Iterator[tuple[int, int]]:
    """Of each parameter that is trained, how many numbers it has, and their bytes."""
    for node in joint.static_inputs & gradients_by_input(joint).keys():
        count = numel(node)
        yield count, count * _torch.fake_value(node).element_size()


def _quantised(count: int, nbytes: int) -> int:
    """Bytes of one moment."""
    return nbytes if count < _SMALLEST else count + _SCALE_NBYTES * -(-count // _BLOCK)


def _batch(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Half of the batch: by the formula of the peak where sizes vary, else worked out for it."""
    found = smaller_batch(step.formula)
    if step.formula is None and _is_alone(step, resident) and _may_be_traced(step):
        batch = batch_of(step.subject)
        found = batch, halved(step.subject, Step(step.problem, step.plan)).peak_nbytes
    if found is None:
        return
    batch, simulated_nbytes = found
    gradients, storages = gradients_by_input(step.joint), step.subject.lowered.storages
    made = [gradient for node, gradient in gradients.items() if node in step.joint.static_inputs]
    new_nbytes = 0 if resident.parts.gradients_nbytes else storages.total_nbytes(made)
    yield from step.remedy(
        "smaller batch", of_halves(batch, new_nbytes), simulated_nbytes + new_nbytes
    )


def _is_alone(step: _Planned, resident: Resident) -> bool:
    """Whether the step has no other graph: later ones leave room, earlier ones hold something."""
    return step.is_whole and step.subject.lowered.shell.resident_nbytes <= resident.nbytes


def _may_be_traced(step: _Planned) -> bool:
    """Whether half of what passes is worth telling, and the graph small enough to be worked out."""
    passing_nbytes = step.simulated_nbytes - step.problem.resident_nbytes
    halves = Remedy("", "", passing_nbytes // 2, step.peak_nbytes - passing_nbytes // 2)
    return bool(ranked([halves])) and len(step.joint.nodes) <= MOST_TRACED_NODES


def _divided(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Parameters, their gradients and the optimizer's state, of which two devices hold half."""
    window = resident.window
    if (
        window is None
        or not step.is_whole
        or step.joint.module.graph.find_nodes(
            op="call_function", target=torch.ops.autoremat.gather.default
        )
    ):
        return
    held = resident.parts
    whole_nbytes = held.parameters_nbytes + held.gradients_nbytes + held.optimizer_nbytes
    ahead = ", another one gathered ahead" if window.ahead_nbytes else ""
    yield from step.remedy(
        "shard over two devices",
        f"Divide the model over {DEVICES} devices by FSDP2's fully_shard: each block, each other "
        f"module with parameters, and the model. Of {format_nbytes(whole_nbytes)} of parameters, "
        f"gradients and optimizer state, each holds half, beside "
        f"{format_nbytes(window.nbytes)} that are gathered or reduced (a unit's "
        f"parameters{ahead}, a unit's gradients).",
        divided(step.subject, Step(step.problem, step.plan), resident, window).peak_nbytes,
    )


def _autocast(step: _Planned, resident: Resident) -> Iterator[Remedy]:
    """Under autocast to bfloat16, traced again: the same operations in the same order."""
    if step.narrowed is None or not step.is_whole or step.plan.offloaded or _is_narrow(step.joint):
        return
    if not _may_be_traced(step):
        return
    after = step.narrowed(step.subject)
    casts_nbytes = sum(map(after.lowered.storages.fake_nbytes.__getitem__, _cast_weights(after)))
    yield from step.remedy(
        "bf16 autocast",
        f'Run the forward under torch.autocast("{step.subject.device.type}", torch.bfloat16): '
        "products, and what is computed from them alone, take half; weights are cast to copies of "
        f"{format_nbytes(casts_nbytes)}, and stay as they are, as do gradients and the "
        "optimizer's state. This is an estimate.",
        under_same_plan(step.subject, step.plan, after).peak_nbytes,
    )


def _is_narrow(joint: JointGraph) -> bool:
    """Whether anything that the forward computes takes half already."""
    values = (_torch.fake_value(node) for node in joint.forward)
    return any(getattr(value, "dtype", None) in _NARROW for value in values)


def _cast_weights(subject: Subject) -> set[str]:
    """Storages that parameters are cast to."""
    storages, joint = subject.lowered.storages, subject.joint
    return {
        name
        for node in joint.forward
        if is_cast(node) and set(storages.read_by(node)) <= _static(subject)
        for name in storages.made_by[node]
    }


def _static(subject: Subject) -> set[str]:
    storages = subject.lowered.storages
    return {name for node in subject.joint.static_inputs for name in storages.of_node[node]}


def _named(nodes: list[fx.Node], step: _Planned) -> str:
    """The largest of some results, and how many there are beside it."""
    storages = step.subject.lowered.storages
    largest = max(nodes, key=lambda node: storages.total_nbytes([node]))
    others = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"`{largest.name}`{_at(largest)}{others}, {format_nbytes(storages.total_nbytes(nodes))},"


def _at(node: fx.Node) -> str:
    source = source_of(node)
    return f" ({source})" if source else ""
