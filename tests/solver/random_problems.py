"""Random steps and graphs without phases, with every kind of operation and value.

One seed gives one problem. `TINY` ones are small enough for the exhaustive search.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from autoremat_solver import Op, Phase, Plan, Problem, Region, Value


@dataclass(frozen=True)
class Shape:
    """How large a random step may be; EITHER operations listed in the backward come on top.

    Attributes:
        most_ops: operations.
        most_backward: BACKWARD ones among them.
        most_nbytes: of a value, and of a workspace about a third of it.
        most_us: of an operation.
    """

    most_ops: int
    most_backward: int
    most_nbytes: int
    most_us: int


TINY = Shape(7, 6, 9, 9)
MIDDLE = Shape(24, 10, 50, 20)


def random_step(seed: int, shape: Shape = TINY) -> Problem:
    """A forward and a backward: must_save, must_recompute, run-once, outputs, workspaces."""
    draw = _Draw(random.Random(seed), shape)
    rng = draw.rng
    count = rng.randint(2, shape.most_ops)
    backward = rng.randint(0, min(count - 1, shape.most_backward))
    forward: list[str] = []
    either: list[str] = []
    for i in range(count - backward):
        if rng.random() < 0.3:
            either += draw.op(f"e{i}", forward + either, Phase.EITHER)
        else:
            forward += draw.op(f"f{i}", forward, Phase.FORWARD)
    gradients: list[str] = []
    for k in range(backward):
        before = gradients[-1:] if rng.random() < 0.7 else []
        gradients += draw.op(f"b{k}", forward + either, Phase.BACKWARD, before)
        if rng.random() < 0.05:
            either += draw.op(f"l{k}", forward + either, Phase.EITHER)
    return draw.problem(rng.choice((0, 0, 1, 2, 3)))


def random_overwriting_step(seed: int, shape: Shape = TINY) -> Problem:
    """A random step, most of whose operations may leave their results where they read."""
    problem, rng = random_step(seed, shape), random.Random(seed)

    def op(known: Op) -> Op:
        if rng.random() < 0.2:
            return known
        return replace(known, overwrites=tuple(rng.sample(known.inputs, len(known.inputs))))

    return replace(problem, ops=tuple(map(op, problem.ops)))


def random_graph(seed: int, shape: Shape = TINY) -> Problem:
    """A graph without phases: close to a chain, or not at all."""
    draw = _Draw(random.Random(seed), shape)
    chained = draw.rng.choice((0.2, 0.9))
    made: list[str] = []
    for i in range(draw.rng.choice((2, 4, 6, 7, 7, 7)) * shape.most_ops // 7):
        before = made[-1:] if draw.rng.random() < chained else []
        made += draw.op(f"o{i}", made, Phase.ANY, before)
    return draw.problem(draw.rng.choice((0, 0, 1, 2)))


def random_regions(seed: int, most_count: int = 9) -> Problem:
    """A step of one region or two within others, with values that run from run to run."""
    draw = _Draw(random.Random(seed), TINY)
    rng = draw.rng
    count = rng.choice((1, 1, 2))
    made: list[str] = draw.op("f0", [], Phase.FORWARD)
    parts: list[list[str]] = [[] for _ in range(count)]
    pairs: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    for number in range(count):
        inside: list[str] = []
        for i in range(rng.randint(1, 3)):
            parts[number].append(f"f{number}{i}")
            inside += draw.op(parts[number][-1], made + inside, Phase.FORWARD, rng.sample(made, 1))
        pairs[number] += zip(rng.sample(made, 1), rng.sample(inside, 1), strict=True)
        made += inside + draw.op(f"f_{number}", made + inside, Phase.FORWARD)
    gradients = draw.op("b0", made, Phase.BACKWARD)
    for number in reversed(range(count)):
        inside = []
        for i in range(rng.randint(1, 3)):
            parts[number].append(f"b{number}{i}")
            before = rng.sample(gradients + inside, 1)
            inside += draw.op(parts[number][-1], made, Phase.BACKWARD, before)
        pairs[number] += zip(rng.sample(gradients, 1), rng.sample(inside, 1), strict=True)
        gradients += inside + draw.op(f"b_{number}", made + gradients + inside, Phase.BACKWARD)
    regions = tuple(
        Region(f"r{number}", tuple(parts[number]), rng.randint(1, most_count), tuple(pairs[number]))
        for number in range(count)
    )
    return replace(draw.problem(rng.randint(0, 3)), regions=regions)


def random_region_plan(problem: Problem, seed: int) -> Plan:
    """All operations in their order, and before some of the backward others of their region again.

    What may not be made again may be among them: `check` tells.
    """
    rng = random.Random(seed)
    region_of = {name: region.name for region in problem.regions for name in region.ops}
    forward = [op.name for op in problem.ops if op.phase is Phase.FORWARD]
    steps = list(forward)
    for op in problem.ops[len(forward) :]:
        alike = [name for name in forward if region_of.get(name) == region_of.get(op.name)]
        is_first = len(steps) == len(forward)
        chosen = set() if is_first else set(rng.sample(alike, rng.randint(0, min(2, len(alike)))))
        steps += [name for name in forward if name in chosen]
        steps.append(op.name)
    return Plan.of(steps)


class _Draw:
    """The values and operations drawn so far; two problems in five allow everything."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng, self._shape = rng, shape
        self._is_plain = rng.random() < 0.4
        self._values: list[Value] = []
        self._ops: list[Op] = []

    def op(
        self, name: str, readable: list[str], phase: Phase, before: list[str] | None = None
    ) -> list[str]:
        """Add an operation with one output or two; their names."""
        rng, shape = self.rng, self._shape
        reads = rng.sample(
            readable, min(len(readable), rng.randint(0, 3 if phase is Phase.BACKWARD else 2))
        )
        marked = phase is not Phase.BACKWARD and not self._is_plain
        made = [f"{name}_{j}" for j in range(rng.choice((1, 1, 1, 2)))]
        for value in made:
            mark = rng.random() if marked else 0.5
            nbytes = rng.randint(0, shape.most_nbytes)
            self._values.append(Value(value, nbytes, mark < 0.1, mark > 0.93))
        self._ops.append(
            Op(
                name,
                tuple(dict.fromkeys([*reads, *(before or ())])),
                tuple(made),
                float(rng.randint(0, shape.most_us)),
                rng.choice((0, 0, shape.most_nbytes // 3)),
                phase,
                recomputable=self._is_plain or rng.random() < 0.85,
            )
        )
        return made

    def problem(self, outputs: int) -> Problem:
        """All of it, with so many outputs."""
        names = [value.name for value in self._values]
        chosen = tuple(self.rng.sample(names, min(len(names), outputs)))
        return Problem(tuple(self._values), tuple(self._ops), chosen, self.rng.randint(0, 4))
