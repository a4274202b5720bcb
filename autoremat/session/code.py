"""The compiled code of one Dynamo graph, under each of its plans.

Enters: a graph as Dynamo handed it over, its first plan compiled, then other plans of it. Leaves:
code for the plan that a run is to have. Guarantees: Dynamo takes no part in it, so there are no
guards to fail and no recompiles to count; where a plan cannot be compiled, the latest code stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from autoremat_solver import Plan
from torch import fx

from autoremat.emit.planned_graph import PlannedGraph, fingerprint
from autoremat.emit.split import PartitionError
from autoremat.emit.torch_split import Modules
from autoremat.planning.choice import Choice
from autoremat.planning.part import Part, Planned

Compiled = Callable[..., Any]
Found = TypeVar("Found")


class Code:
    """Of one graph.

    Attributes:
        first: under its first plan.
        compiles: how often the graph was compiled.
    """

    def __init__(
        self, part: Part, first: Compiled, again: Callable[[Part], Compiled | None]
    ) -> None:
        """Of a graph that was compiled by its first plan.

        Args:
            part: that plan.
            first: what came of it.
            again: compiles the graph by another plan; None if that cannot be.
        """
        self.first = first
        self.compiles = 1
        self._again = again
        self._latest = (first, part)
        self._known = {_key(part): self._latest}
        self._failed: dict[int, Part] = {}

    def of(self, part: Part) -> tuple[Compiled, Part]:
        """The code of a plan, compiled if need be, and the plan that it really is of."""
        known = self._known.get(_key(part))
        found = known or self._equal_to(part) or self._compiled(part)
        if found is None:
            return self._latest
        found = self._known[_key(part)] = (found[0], part)  # what is known of its runs may be new
        if part.shrunk <= 1:  # of a part of its ranges, it stands in for no other
            self._latest = found
        return found

    def keep(self, parts: Iterable[Part]) -> None:
        """Forget code of other plans than these; plans that are equal have the same."""
        found = {_key(part): self._equal_to(part) for part in parts}
        self._known = {key: (code[0], code[1]) for key, code in found.items() if code is not None}
        self._failed = {key: part for key, part in self._failed.items() if key in found}

    def _compiled(self, part: Part) -> tuple[Compiled, Part] | None:
        if _key(part) in self._failed:
            return None
        compiled = self._again(part)
        if compiled is None:
            self._failed[_key(part)] = part
            return None
        self.compiles += 1
        return compiled, part

    def _equal_to(self, part: Part) -> tuple[Compiled, Part] | None:
        for compiled, known in self._known.values():
            one, other = part.choice, known.choice
            if _written(one) == _written(other):
                return compiled, part
        return None


def _written(choice: Choice) -> tuple[Plan, str, bool]:
    """All that the code of a graph depends on."""
    return choice.solution.plan, choice.method, choice.in_order


def _key(part: Part) -> int:
    return id(part.planned)


class TracedOnly(Generic[Found]):
    """Asks something of a joint graph, and ends its compile there: a `Partitioner`.

    Attributes:
        fingerprint: of the joint graph.
    """

    def __init__(self, ask: Callable[[fx.GraphModule, int, Sequence[int] | None], Found]) -> None:
        """Of none yet.

        Args:
            ask: given the joint graph, how many of its outputs are the forward's, and positions
                of inputs that stay.
        """
        self.fingerprint = ""
        self._ask = ask
        self._found: Found | None = None

    def partition(
        self,
        module: fx.GraphModule,
        _joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_keywords: Any,
    ) -> Modules:
        """Ask it.

        Raises:
            InterruptedError: always.
        """
        self.fingerprint = fingerprint(module)
        self._found = self._ask(module, num_fwd_outputs, static_lifetime_input_indices)
        raise InterruptedError("Nothing is compiled.")

    def run(self, compile_graph: Callable[[], object]) -> Found:
        """The answer, out of a compile that splits by this.

        Raises:
            Exception: whatever comes before there is one.
            RuntimeError: if the compile asked for no split.
        """
        try:
            compile_graph()
        except Exception:  # Inductor wraps ours into one of its own
            if self._found is None:
                raise
        if self._found is None:
            raise RuntimeError("Compiled again, the graph needs no backward.")
        return self._found


def written(planned: Planned) -> PlannedGraph:
    """A graph with the modules of its plan."""
    return PlannedGraph(planned.subject.joint, planned.choice.forward, planned.choice.backward)


class Written:
    """Splits a joint graph that was planned already as its plan says: a `Partitioner`."""

    def __init__(self, planned: PlannedGraph, known: str) -> None:
        """Of one plan.

        Args:
            planned: the graph with its plan.
            known: fingerprint of the joint graph.
        """
        self._planned = planned
        self._known = known

    def partition(self, module: fx.GraphModule, _joint_inputs: Any, **_keywords: Any) -> Modules:
        """Forward and backward of the plan.

        Raises:
            PartitionError: if the graph is another one than was planned.
        """
        if fingerprint(module) != self._known:
            raise PartitionError("Compiled again, the joint graph is another one.")
        copied = self._planned.copied()
        return copied.forward, copied.backward
