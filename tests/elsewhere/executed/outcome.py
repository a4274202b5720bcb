"""What a case's step did when it was executed.

Enters: a case. Leaves: its plans as they were read, and as they ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.elsewhere.executed.cases import Case
from tests.elsewhere.executed.plans import Eager, Program, Step, in_eager
from tests.elsewhere.executed.work import Executor, Ran, Work


@dataclass(frozen=True)
class Outcome:
    """Of one case.

    Attributes:
        programs: the plans; the first is torch's own partition.
        ran: the same, as they ran.
        kernels: how many kernels were interpreted.
        eager: the step op by op.
    """

    programs: Sequence[Program]
    ran: Sequence[Ran]
    kernels: int
    eager: Eager

    def errors(self) -> Iterator[tuple[str, float]]:
        """By name, each gradient's largest difference from eager's, relative to the largest."""
        for name, eager in zip(self.programs[0].inputs, self.eager.gradients, strict=True):
            if eager is not None:
                yield name, _difference(self.ran[0].gradients[name], eager)

    def changes(self) -> Iterator[tuple[str, float]]:
        """By name, how far each gradient of other plans is from the first's; 0 if bit for bit."""
        for name, gradient in self.ran[0].gradients.items():
            others = (ran.gradients[name] for ran in self.ran)
            yield (
                name,
                max(
                    0.0 if torch.equal(gradient, other) else _difference(other, gradient)
                    for other in others
                ),
            )

    def is_left_as_in_eager(self, name: str) -> bool:
        """Whether an input, such as a buffer, is after the step what it is after eager's."""
        after = self.eager.after[self.programs[0].inputs.index(name)]
        return all(_difference(ran.inputs[name], after) < 1e-6 for ran in self.ran)


def _difference(value: Tensor, from_: Tensor) -> float:
    largest = from_.double().abs().max().clamp(min=1e-30)
    return float((value.double() - from_.double()).abs().max() / largest)


def outcome_of(case: Case, executor: Executor) -> Outcome:
    """Plan a case for its GPU, and execute what Inductor writes."""
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    with case.surrounding():
        step = Step(model, batch, case.device)
        programs = list(step.programs())
        spec, eager = step.subject.elsewhere, step.eager
        assert spec is not None, "no code was generated"
        ran, kernels = executor.run(Work(programs, eager.values, spec))
        if case.drops:
            eager = in_eager(model, batch, list(ran[0].saved.values()))
    return Outcome(programs, ran, len(kernels), eager)
