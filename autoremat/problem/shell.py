"""What stands around a graph in its step, as the solver's problem has to know it.

Enters: a graph's own operations, and a `Shell`: incoming gradients, what is resident, what other
graphs and the optimizer take. Leaves: the solver's `Problem`, in which each of these is an
operation without time. Guarantees: nothing of the shell is dug out of a problem again; who wants a
number of it asks the shell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autoremat_solver import Link, Op, Phase, Plan, Problem, Step, StepKind, Value

LOSS_BOUNDARY = "backward_begins"
LATER_GRADIENTS = "gradients_of_later_graphs"
GRADIENTS_LAID_OUT = "gradients_laid_out"
OPTIMIZER_STEP = "optimizer_step"
BOUNDARY = (LOSS_BOUNDARY, GRADIENTS_LAID_OUT)  # between forward and backward, in this order
MARKERS = frozenset({*BOUNDARY, OPTIMIZER_STEP})  # operations that no node stands for

_COPIES = frozenset({StepKind.OFFLOAD, StepKind.RELEASE, StepKind.RELOAD})


@dataclass(frozen=True)
class Operations:
    """What a graph does itself.

    Attributes:
        forward: operations of its forward, in order.
        backward: operations of its backward, which read incoming gradients as well.
        values: what they make, by name.
        outputs: of the values, those that are live at the end.
    """

    forward: tuple[Op, ...]
    backward: tuple[Op, ...]
    values: Mapping[str, Value]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Shell:
    """What stands around a graph in its step.

    Attributes:
        tangents: bytes of each incoming gradient, by its storage.
        held: of them, those that somebody holds until the backward ends.
        layout_nbytes: of incoming gradients that are there twice while they are laid out anew.
        resident_nbytes: live during the whole step.
        optimizer_nbytes: what the optimizer's step takes for itself after the backward.
        later_gradients_nbytes: what the backwards of later graphs return, live until the end.
        room_nbytes: what later graphs take while they run, beside what crosses from forward to
            backward.
        link: the way to where values may wait that leave the device.
    """

    tangents: Mapping[str, int]
    held: tuple[str, ...]
    layout_nbytes: int
    resident_nbytes: int
    optimizer_nbytes: int
    later_gradients_nbytes: int = 0
    room_nbytes: int = 0
    link: Link | None = None

    @property
    def free_nbytes(self) -> int:
        """Of the room, what the incoming gradients do not take already."""
        made_nbytes = sum(self.tangents.values()) + self.later_gradients_nbytes
        return max(0, self.room_nbytes - made_nbytes)

    def around(self, graph: Operations) -> Problem:
        """The problem of a graph in this shell."""
        ops = (*graph.forward, *self._before_backward(), *graph.backward, *self._after_backward())
        later = dict.fromkeys([LATER_GRADIENTS] if self.later_gradients_nbytes else [])
        made = {name: Value(name, nbytes) for name, nbytes in self.tangents.items()} | {
            **graph.values
        }
        return Problem(
            values=(
                *(made[name] for op in ops for name in op.outputs if name not in later),
                *(Value(name, self.later_gradients_nbytes) for name in later),
            ),
            ops=ops,
            outputs=tuple(dict.fromkeys((*graph.outputs, *self.held, *later))),
            resident_nbytes=self.resident_nbytes,
            link=self.link,
        )

    def _before_backward(self) -> Iterator[Op]:
        later = (LATER_GRADIENTS,) if self.later_gradients_nbytes else ()
        yield _marker(LOSS_BOUNDARY, self.free_nbytes, (*self.tangents, *later))
        if self.layout_nbytes:
            yield _marker(GRADIENTS_LAID_OUT, self.layout_nbytes)

    def _after_backward(self) -> Iterator[Op]:
        if self.optimizer_nbytes:
            yield _marker(OPTIMIZER_STEP, self.optimizer_nbytes)


def _marker(name: str, workspace_nbytes: int, outputs: tuple[str, ...] = ()) -> Op:
    return Op(name, (), outputs, 0.0, workspace_nbytes, Phase.BACKWARD, recomputable=False)


def in_order(problem: Problem, forward: list[str], backward: list[str]) -> Plan:
    """The plan that runs these operations, with those of the shell in their places."""
    before = (name for name in BOUNDARY if name in problem.op_by_name)
    return closed(problem, (*forward, *before, *backward))


def closed(problem: Problem, steps: Iterable[str]) -> Plan:
    """The plan of these steps, which ends with the optimizer's exactly if the problem has one.

    Args:
        problem: the graph's.
        steps: as `in_texts` wrote them.
    """
    end = [OPTIMIZER_STEP] if OPTIMIZER_STEP in problem.op_by_name else []
    found = [(_copy(text), text) for text in [*(s for s in steps if s != OPTIMIZER_STEP), *end]]
    runs = iter(Plan.of(text for copy, text in found if copy is None).steps)
    return Plan(tuple(next(runs) if copy is None else copy for copy, _ in found))


def in_texts(plan: Plan) -> tuple[str, ...]:
    """Its steps: an operation that runs by its name, a copy as "offload NAME" and so on."""
    return tuple(s.target if s.is_run else f"{s.kind.value} {s.target}" for s in plan.steps)


def has_copies(steps: Iterable[str]) -> bool:
    """Whether any of the steps that `in_texts` wrote is a copy."""
    return any(_copy(text) is not None for text in steps)


def _copy(text: str) -> Step | None:
    kind, _, value = text.partition(" ")  # names of nodes have no spaces
    return Step(StepKind(kind), value) if value and kind in _COPIES else None
