"""The cheapest plan of a small problem that may also offload, by brute force.

It goes on where `exhaustive` ends: moves begin a copy to the host, wait for it, or begin one back,
and a state knows besides how long the copies under way still take. It shares nothing with the
solver but `Problem`. It follows the sentences of `StepKind`, `Plan` and `Link` one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoremat_solver import Op, Problem

from tests.solver.exhaustive import NEVER, Exhaustive, Instance, State

Lasting = frozenset[tuple[str, float]]  # by value, how long a copy of it still takes


@dataclass(frozen=True)
class Both:
    """Both memories and both copy engines; times are from now on.

    Attributes:
        device: what ran, and which instances are there.
        host: instances there.
        leaving: copies to the host that nobody waited for; their instances have to stay.
        coming: copies back that nobody waited for; what they are of has to stay on the host.
        out_us: until the engine to the host is free.
        in_us: until the one back is.
    """

    device: State
    host: frozenset[Instance] = frozenset()
    leaving: Lasting = frozenset()
    coming: Lasting = frozenset()
    out_us: float = 0.0
    in_us: float = 0.0

    def after(self, us: float) -> Both:
        """The same so much later."""
        return replace(
            self,
            leaving=frozenset((name, max(0.0, left - us)) for name, left in self.leaving),
            coming=frozenset((name, max(0.0, left - us)) for name, left in self.coming),
            out_us=max(0.0, self.out_us - us),
            in_us=max(0.0, self.in_us - us),
        )


class ExhaustiveOffload:
    """Every plan of one problem within two budgets."""

    def __init__(self, problem: Problem, budget_nbytes: int, host_nbytes: int) -> None:
        assert problem.link is not None
        self.problem, self.link = problem, problem.link
        self.budget_nbytes, self.host_nbytes = budget_nbytes, host_nbytes
        self.runs = Exhaustive(problem, budget_nbytes)
        self.size, self.pinned = self.runs.size, self.runs.pinned

    def cheapest_us(self) -> float:
        """Least time of any plan; infinite if there is none."""
        begin = Both(State(0, frozenset(), frozenset()))
        queue = [(self.left_us(begin), 0, 0.0, begin)]
        order = itertools.count(-1, -1)
        seen: set[Both] = set()
        while queue:
            _, _, now_us, state = heapq.heappop(queue)
            if state in seen:
                continue
            seen.add(state)
            if self.is_done(state):
                return now_us
            for us, new in self.moves(state):
                if new not in seen:
                    least_us = now_us + us + self.left_us(new)
                    heapq.heappush(queue, (least_us, next(order), now_us + us, new))
        return NEVER

    def left_us(self, state: Both) -> float:
        """What has to run yet, once each."""
        left = self.runs.mandatory[state.device.done :]
        any_order = self.runs.any_order - state.device.ran
        return math.fsum(
            op.time_us for op in [*left, *map(self.problem.op_by_name.__getitem__, any_order)]
        )

    def is_done(self, state: Both) -> bool:
        """Whether all ran, the outputs are there, and no copy is under way."""
        device = state.device
        all_ran = device.done == len(self.runs.mandatory) and self.runs.any_order <= device.ran
        there = {i.name for i in device.held}
        return all_ran and self.pinned <= there and not state.leaving and not state.coming

    def moves(self, state: Both) -> Iterator[tuple[float, Both]]:
        """All that may be done next: how long computing takes until then, and the state then."""
        leaving, coming = dict(state.leaving), dict(state.coming)
        for op in self.problem.ops:
            yield from self.run(state, op, coming)
        for i in state.device.held:
            if i.name not in self.pinned and i.name not in leaving and i.name not in coming:
                held = state.device.held - {i}
                yield 0.0, replace(state, device=replace(state.device, held=held))
                yield from self.offload(state, i)
        for name, left_us in leaving.items():
            later = state.after(left_us)
            yield left_us, replace(later, leaving=later.leaving - {(name, 0.0)})
        for i in state.host:
            if i.name not in leaving and i.name not in coming:
                yield 0.0, replace(state, host=state.host - {i})
                if i.name not in {one.name for one in state.device.held}:
                    yield from self.reload(state, i)

    def run(self, state: Both, op: Op, coming: dict[str, float]) -> Iterator[tuple[float, Both]]:
        """One run: it waits for what is coming and goes over nothing that is leaving."""
        waits_us = max((coming[name] for name in op.inputs if name in coming), default=0.0)
        leaving = {name for name, _ in state.leaving}
        for us, device in self.runs.run(state.device, op):
            gone = {i.name for i in state.device.held - device.held}
            if gone & leaving:
                continue
            later = state.after(waits_us)
            here = frozenset(one for one in later.coming if one[0] not in op.inputs)
            yield waits_us + us, replace(replace(later, coming=here), device=device).after(us)

    def offload(self, state: Both, i: Instance) -> Iterator[tuple[float, Both]]:
        """Begin a copy to the host, behind those that were begun before."""
        if i.name in {one.name for one in state.host} or not self.size[i.name]:
            return  # an older copy could have been let go; what takes no bytes can stay
        if sum(self.size[one.name] for one in state.host | {i}) <= self.host_nbytes:
            own_us = self.link.out_us(self.size[i.name])
            out_us = state.out_us + own_us
            computing_us = self.link.ask_us + self.link.slowdown * own_us
            leaving = state.leaving | {(i.name, out_us)}
            new = replace(state, host=state.host | {i}, leaving=leaving, out_us=out_us)
            yield computing_us, new.after(computing_us)

    def reload(self, state: Both, i: Instance) -> Iterator[tuple[float, Both]]:
        """Begin a copy back, behind those that were begun before."""
        held = state.device.held | {i}
        used = sum(self.size[one.name] for one in held) + self.problem.resident_nbytes
        if used <= self.budget_nbytes:
            own_us = self.link.in_us(self.size[i.name])
            in_us = state.in_us + own_us
            computing_us = self.link.ask_us + self.link.slowdown * own_us
            device = replace(state.device, held=held)
            coming = state.coming | {(i.name, in_us)}
            new = replace(state, device=device, coming=coming, in_us=in_us)
            yield computing_us, new.after(computing_us)


def cheapest_us(problem: Problem, budget_nbytes: int, host_nbytes: int) -> float:
    """Least time of any plan within both budgets; infinite if there is none."""
    return ExhaustiveOffload(problem, budget_nbytes, host_nbytes).cheapest_us()
