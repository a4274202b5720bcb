"""Proof that two modules compute what the joint graph does, random numbers included.

Enters: a joint graph, and a forward and a backward module made from it. Leaves: the first
difference in words, or nothing. Guarantees: with no difference, every output is the same
expression of the same inputs and draws, and every draw happens once, or again under the
generator's state of its first run.

Values are numbered [Cocke1970]: nodes get one number if they apply one operator to values of equal
numbers. A draw is an expression of its own, known by the node's name in the joint graph. Run again
without its state it is another one, and so is all that is computed from it.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from typing import Any

import torch
from torch import fx

from autoremat import _torch
from autoremat.graph.constraints import RUNNING_STATISTICS, is_training_batch_norm
from autoremat.graph.random_draws import is_random
from autoremat.host.operators import COPIES

aten = torch.ops.aten

_COMPARABLE = (str, int, float, complex, bool, type(None), torch.dtype, torch.device)


def first_difference(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int
) -> str | None:
    """What the two modules do otherwise than the joint graph; None if nothing.

    Args:
        joint: the graph that they were made from.
        forward: its leading outputs are the joint graph's leading ones.
        backward: its outputs are the joint graph's other ones; its inputs have the names of what
            the forward made.
        num_fwd_outputs: how many those leading ones are.
    """
    numbers: dict[Hashable, int] = {}
    whole = _Run(numbers)
    expected = whole.of_module(joint, {})
    ours = _Run(numbers, allowed=whole.drawn)
    first = ours.of_module(forward, {})
    second = ours.of_module(backward, {node.name: n for node, n in first.items()})
    if ours.unpaired is not None:
        return f"{ours.unpaired} draws random numbers that are not those of its first run."
    results = _results(forward, first)[:num_fwd_outputs] + _results(backward, second)
    for position, (mine, theirs) in enumerate(zip(results, _results(joint, expected), strict=True)):
        if mine != theirs:
            part = "forward" if position < num_fwd_outputs else "backward"
            return f"Output {position} ({part}) is computed otherwise than in the joint graph."
    return None


def _results(module: fx.GraphModule, number_of: Mapping[fx.Node, int]) -> list[object]:
    leaves = _torch.arg_tree_leaves(*module.graph.output_node().args)
    return [number_of[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


class _Run:
    """Numbers the values of modules that run one after the other.

    Attributes:
        drawn: the number of each draw, and the call that made it.
        unpaired: the first node that draws what the joint graph does not.
    """

    def __init__(self, numbers: dict[Hashable, int], allowed: Container[int] | None = None) -> None:
        self.drawn: dict[int, Hashable] = {}
        self.unpaired: str | None = None
        self._numbers = numbers
        self._allowed = allowed
        self._number_of: dict[fx.Node, int] = {}
        self._draw_of_state: dict[int, int] = {}

    def of_module(self, module: fx.GraphModule, made: Mapping[str, int]) -> dict[fx.Node, int]:
        """Numbers of all nodes; inputs that are in `made` are values of an earlier module."""
        self._number_of = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known = made.get(node.name)
                self._number_of[node] = self._new("input", node.name) if known is None else known
            elif node.op == "get_attr":
                self._number_of[node] = self._new("attribute", node.target)
            elif node.op == "call_function":
                self._number_of[node] = self._of_call(node)
        return self._number_of

    def _new(self, *expression: Hashable) -> int:
        """The number of an expression, a new one if it was not met before."""
        return self._numbers.setdefault(expression, len(self._numbers))

    def _of_call(self, node: fx.Node) -> int:
        target = node.target
        if target is _torch.run_with_rng_state:
            return self._replayed(node)
        if target is _torch.run_and_save_rng_state:
            return self._drawn_with_state(node)
        if is_random(node):
            return self._draw(node.name, self._call(node, target, *node.args))
        if _torch.is_getitem(node):
            return self._element(node)
        if target in COPIES:
            copied: Any = node.args[0]
            return self._number_of[copied]
        if target is aten.squeeze.dim and self._is_lifted_sum(node.args[0]):
            return self._lifted_sum(node.args[0])
        return self._new(self._call(node, target, *node.args))

    def _call(self, node: fx.Node, *target_and_args: Any) -> Hashable:
        """What a node runs on which values."""
        return self._frozen(target_and_args), self._frozen(node.kwargs)

    def _frozen(self, value: Any) -> Hashable:
        """An argument in a form that can be compared, nodes as their numbers."""
        if isinstance(value, fx.Node):
            return ("value", self._number_of[value])
        if isinstance(value, (list, tuple)):
            return tuple(self._frozen(part) for part in value)
        if isinstance(value, dict):
            return tuple((key, self._frozen(part)) for key, part in sorted(value.items()))
        if isinstance(value, slice):
            return ("slice", *map(self._frozen, (value.start, value.stop, value.step)))
        return (type(value), value if isinstance(value, _COMPARABLE) else str(value))

    def _draw(self, name: str, call: Hashable) -> int:
        number = self._new("draw", name, call)
        if number in self.drawn or (self._allowed is not None and number not in self._allowed):
            return self._unpaired(name)
        self.drawn[number] = call
        return number

    def _unpaired(self, name: str) -> int:
        self.unpaired = self.unpaired or name
        return self._new("unpaired draw", len(self._numbers))

    def _drawn_with_state(self, node: fx.Node) -> int:
        """A pair: the state before the draw, and the draw, which has its name."""
        name = "".join(user.name for user in node.users if user.args[1] == 1)
        draw = self._draw(name, self._call(node, *node.args))
        self._draw_of_state[self._new("state", draw)] = draw
        return draw

    def _replayed(self, node: fx.Node) -> int:
        """The draw whose state and call these are."""
        state: Any = node.args[0]
        call = node.args[1:]
        draw = self._draw_of_state.get(self._number_of[state])
        if draw is None or self.drawn[draw] != self._call(node, *call):
            return self._unpaired(node.name)
        return draw

    def _element(self, node: fx.Node) -> int:
        source: Any = node.args[0]
        index: Any = node.args[1]
        if source.target is _torch.run_and_save_rng_state:
            draw = self._number_of[source]
            return self._new("state", draw) if index == 0 else draw
        if is_training_batch_norm(source) and index not in RUNNING_STATISTICS:
            # The rewrite repeats it without the statistics, which its output does not depend on.
            x, weight, bias, _mean, _variance, *rest = source.args
            target = aten._native_batch_norm_legit.no_stats
            again = self._new(self._call(source, target, x, weight, bias, *rest))
            return self._new(_torch.getitem, again, index)
        return self._new(_torch.getitem, self._number_of[source], index)

    def _is_lifted_sum(self, node: Any) -> bool:
        """A sum of gradients as the rewrite hides it from Inductor's fusion."""
        return node.target is aten.add.Tensor and any(map(_is_lifted, node.args))

    def _lifted_sum(self, node: Any) -> int:
        terms = [term.args[0] if _is_lifted(term) else term for term in node.args]
        return self._new(self._call(node, node.target, *terms))


def _is_lifted(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is aten.unsqueeze.default
