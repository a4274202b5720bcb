"""The cheapest plan of a small problem by brute force, for tests to compare the solver with.

It shares nothing with the solver but `Problem`, and knows no schedule: its states are
(operations that ran, instances held), its moves run one operation or let go of one instance, and
Dijkstra finds the cheapest way to the end. It follows the sentences of `Phase`, `Value` and `Plan`
one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoremat_solver import Op, Phase, Problem

NEVER = float("inf")


@dataclass(frozen=True)
class Instance:
    """A value as one run made it: before the backward began or after."""

    name: str
    is_late: bool


@dataclass(frozen=True)
class State:
    """Operations done of those with a place in the order, instances held, and all that ran."""

    done: int
    held: frozenset[Instance]
    ran: frozenset[str]


class Exhaustive:
    """Every plan of one problem within one budget."""

    def __init__(self, problem: Problem, budget_nbytes: int) -> None:
        self.problem, self.budget_nbytes = problem, budget_nbytes
        ordered = (Phase.FORWARD, Phase.BACKWARD)
        self.mandatory = [op for op in problem.ops if op.phase in ordered]
        self.any_order = frozenset(op.name for op in problem.ops if op.phase is Phase.ANY)
        self.mandatory.sort(key=lambda op: op.phase is Phase.BACKWARD)
        self.forward_count = sum(op.phase is not Phase.BACKWARD for op in self.mandatory)
        self.size = {value.name: value.nbytes for value in problem.values}
        self.pinned = frozenset(problem.outputs)

    def cheapest_us(self) -> float:
        """Least time of any plan; infinite if there is none."""
        queue: list[tuple[float, int, State]] = [(0.0, 0, State(0, frozenset(), frozenset()))]
        order = itertools.count(1)
        seen: set[State] = set()
        while queue:
            cost, _, state = heapq.heappop(queue)
            if state in seen:
                continue
            seen.add(state)
            names = {i.name for i in state.held}
            all_ran = state.done == len(self.mandatory) and self.any_order <= state.ran
            if all_ran and self.pinned <= names:
                return cost
            for i in state.held:
                if i.name not in self.pinned:
                    left = replace(state, held=state.held - {i})
                    heapq.heappush(queue, (cost, next(order), left))
            for op in self.problem.ops:
                for us, new in self.run(state, op):
                    heapq.heappush(queue, (cost + us, next(order), new))
        return NEVER

    def may_run(self, state: State, op: Op) -> bool:
        """Whether the phases allow the operation now."""
        if state.done < len(self.mandatory) and op is self.mandatory[state.done]:
            return True
        if op.phase in (Phase.EITHER, Phase.ANY):
            return op.recomputable or op.name not in state.ran
        if op.phase is Phase.BACKWARD or not op.recomputable:
            return False
        return state.done > self.forward_count

    def run(self, state: State, op: Op) -> Iterator[tuple[float, State]]:
        """The cost of running the operation now and the state after it; nothing if it cannot."""
        if not self.may_run(state, op):
            return
        is_next = state.done < len(self.mandatory) and op is self.mandatory[state.done]
        done = state.done + is_next
        is_late = done > self.forward_count
        held = set(state.held)
        if any(self.read(name, held, is_late) is None for name in op.inputs):
            return
        used = sum(self.size[i.name] for i in held) + op.workspace_nbytes
        used += self.problem.resident_nbytes
        for name in op.outputs:
            used += self.size[name]
            old = {i for i in held if i.name == name}
            if old and name not in self.pinned:
                return  # a read would see the new instance: the old one could have been let go
            if not old:
                held.add(Instance(name, is_late))
        room = sum(self.size[name] for name in op.outputs)
        for over in [None, *(i for i in state.held if i.name in op.overwrites)]:
            if over is None:
                taken, left = 0, held
            elif over.name in self.pinned or self.size[over.name] > room:
                continue
            else:  # it ends here
                taken, left = self.size[over.name], held - {over}
            if used - taken <= self.budget_nbytes:
                yield op.time_us, State(done, frozenset(left), state.ran | {op.name})

    def read(self, name: str, held: set[Instance], is_late: bool) -> Instance | None:
        """The held instance that a read may see now."""
        found = next((i for i in held if i.name == name), None)
        value = self.problem.value_by_name[name]
        if found is None or not is_late:
            return found
        if self.problem.producer_of[name].phase is Phase.BACKWARD:
            return found
        if (value.must_save and found.is_late) or (value.must_recompute and not found.is_late):
            return None
        return found


def cheapest_us(problem: Problem, budget_nbytes: int) -> float:
    """Least time of any plan within the budget; infinite if there is none."""
    return Exhaustive(problem, budget_nbytes).cheapest_us()
