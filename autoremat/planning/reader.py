"""Plans as Inductor compiles them: written out, and the generated code read.

Enters: a stated graph, a budget, and solutions of its problem. Leaves: `Choice`s. Guarantees: their
peaks are of the code that was read; each way to write a plan out is read once.
There are two ways to write out a plan that recomputes. Held to the plan's order, Inductor makes
every loop where the plan has it, lying as the graph says. Left alone, it computes a loop where it
is first read, which may hold what the loop reads for longer. Where it lays out convolutions in its
own way, channels last, the two differ in peak and time: which is better is seen in their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from autoremat_solver import Plan, Solution
from autoremat_solver.certificate import holds
from autoremat_solver.plan import Status

from autoremat import _torch
from autoremat.emit.rewrite import repeats
from autoremat.inductor.reading import Reading
from autoremat.inductor.wrapper import WrapperError
from autoremat.planning.choice import TORCH, Choice, Modules, as_proven, given, written_out
from autoremat.planning.known_readings import read_once
from autoremat.planning.torch_own import Unplanned
from autoremat.problem.subject import Subject

ALIKE = 0.01  # two ways that differ by no more in peak above what is resident, and in time


class Reader:
    """Writes plans out and reads the code that Inductor generates for them.

    Attributes:
        subject: the graph.
        budget_nbytes: tells what fits.
        unplanned: the graph without a plan of ours.
    """

    def __init__(self, subject: Subject, budget_nbytes: int) -> None:
        """Nothing was read yet."""
        self.subject, self.budget_nbytes = subject, budget_nbytes
        self.unplanned = Unplanned(subject)
        self._seen: dict[tuple[Plan, bool], Choice | None] = {}  # None: it could not be read
        self._lays_out = _torch.prefers_channels_last(subject.joint.forward)

    def read(self, solution: Solution, *, both: bool = True) -> Choice:
        """A plan of ours, as Inductor compiles it: written out as it fits and is fastest.

        Args:
            solution: the plan.
            both: whether both ways to write it out are read, or only the plan's order.
        """
        ways = self.ways(solution) if both else [self.written(solution, in_order=True)]
        fitting = [way for way in ways if way.fits]
        return fastest_of(fitting) if fitting else leanest(ways)

    def ways(self, solution: Solution) -> list[Choice]:
        """The ways to write a plan out, as Inductor compiles them; the plan's order first."""
        first = self.written(solution, in_order=True)
        if not self._lays_out or not repeats(first.backward):
            return [first]
        with suppress(Exception):  # the first one is not lost to it
            return [first, self.written(solution, in_order=False)]
        return [first]

    def written(self, solution: Solution, *, in_order: bool) -> Choice:
        """A plan of ours in one way."""
        key = (solution.plan, in_order)
        if key not in self._seen:
            self._seen[key] = None
            modules = written_out(self.subject, solution.plan, in_order=in_order)
            code = read_once(self.subject, *modules)
            self._seen[key] = self._choice(modules, solution, code, in_order=in_order)
        found = self._seen[key]
        if found is None:
            raise WrapperError("this plan's code could not be read before")
        return replace(found, fits=found.needed_nbytes <= self.budget_nbytes)

    def ways_alike(self, solution: Solution) -> bool:
        """Whether both ways to write a plan out were read, and which is taken does not matter."""
        found = [self._seen.get((solution.plan, in_order)) for in_order in (True, False)]
        ways = [way for way in found if way is not None]
        resident = self.subject.lowered.shell.resident_nbytes
        rows: list[list[float]] = [
            [way.needed_nbytes - resident for way in ways],
            [way.code_us for way in ways if way.code_us is not None],
        ]
        return len(ways) == 2 and all(max(row) <= (1 + ALIKE) * min(row) for row in rows if row)

    def read_own(self, fastest: Solution | None = None, *, strict: bool = False) -> Choice:
        """Torch's own partition, which exists.

        Args:
            fastest: what was proven of our plans; it holds for torch's where that is one of them.
            strict: raise where it does not hold all the same.
        """
        own = self.unplanned.own
        assert own is not None
        solution = given(own.problem, own.torchs.plan, TORCH)
        if fastest is not None:
            bound_us = solution.bound_us
            if own.torchs.is_of(self.subject.lowered.problem):
                bound_us = fastest.bound_us
            solution = replace(solution, bound_us=bound_us, seconds=fastest.seconds)
        solution = _judged(solution, strict=strict)
        choice = self._choice((own.forward, own.backward), solution, self.unplanned.code)
        return replace(choice, torchs=own.torchs)

    def _choice(
        self, modules: Modules, solution: Solution, code: Reading, *, in_order: bool = True
    ) -> Choice:
        fits = code.needed_nbytes <= self.budget_nbytes
        return Choice(
            *(*modules, solution.method, solution, *code.peaks, fits),
            baseline=self.unplanned.baseline,
            baseline_time_us=self.unplanned.time_us,
            is_read=True,
            code_us=code.time_us,
            asked=code.asked,
            in_order=in_order,
        )


def fastest_of(choices: Sequence[Choice]) -> Choice:
    """As their code was read; by the model where that says nothing of one of them."""
    if all(choice.code_us is not None for choice in choices):
        return min(choices, key=lambda choice: choice.code_us or 0.0)
    return min(choices, key=model_us)


def is_faster(one: Choice, other: Choice, *, by: float = 0.0) -> bool:
    """The same of two, by a share of the time."""
    if one.code_us is not None and other.code_us is not None:
        return one.code_us * (1 + by) < other.code_us
    return model_us(one) * (1 + by) < model_us(other)


def leanest(choices: Sequence[Choice]) -> Choice:
    """The smallest real peak."""
    return min(choices, key=lambda choice: choice.needed_nbytes)


def model_us(choice: Choice) -> float:
    """The time of its operations, one by one."""
    return choice.solution.timeline.time_us


def _judged(solution: Solution, *, strict: bool) -> Solution:
    """The status that a plan and its bound have together."""
    time_us, bound_us = solution.timeline.time_us, solution.bound_us
    if not holds("bound in us", bound_us, time_us, strict=strict):
        return replace(solution, bound_us=0.0, status=Status.UNPROVEN)
    return as_proven(solution)
