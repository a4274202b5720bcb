"""A step of half of its batch, where sizes are numbers: for the figures of advice.

Enters: a stated graph whose sizes do not vary, a problem of it and its plan. Leaves: the same
operations in the same order, with what their values take then. Guarantees: every operation has been
worked out once more, on fake tensors of another batch, and what a value takes in both tells what it
takes in half. The other batch is a larger one: no dimension of it is 1, which would go with any
other. Numbers that stood for the batch when the graph was traced are changed where shapes ask for
it; where they do not tell, where a value grows neither with the batch nor not at all, or where the
gradient of a parameter would come out in another shape, `CannotChange`. What operations take for
themselves is taken to grow as what they read and make together does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from autoremat_solver import Op
from torch import fx

from autoremat import _torch
from autoremat.explain.changed_step import CannotChange, Step
from autoremat.explain.places import op_name
from autoremat.graph.joint_graph import JointGraph
from autoremat.memory.storage_sizes import rounded_nbytes
from autoremat.planning.figures import gradients_by_input
from autoremat.problem.subject import Subject

Shape = tuple[int, ...]

TIMES = 3  # as large is the other batch
# Operators' names for the shape of what they make, or of what their gradient was given.
_SHAPES = frozenset({"size", "shape", "input_size", "input_sizes"})
_COUNTING = {"arange": "end", "iota": "length"}  # from 0 to what they call so
_SAMPLES = "N"  # the batch, to a norm over groups
_SAME_NUMBERS = frozenset({"_reshape_alias", "_unsafe_view", "reshape", "view", "view_copy"})
_COUNTS = frozenset({torch.int32, torch.int64})
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def batch_of(subject: Subject) -> int:
    """The first dimension of all that a graph is called with.

    Raises:
        CannotChange: if they have none in common, or sizes vary.
    """
    joint = subject.joint
    if any(_has_symbols(node) for node in joint.nodes):
        raise CannotChange("sizes vary")
    firsts = {_shape(node)[0] for node in _given(joint) if not _is_for_all(node)}
    if len(firsts) != 1 or 1 in firsts:
        raise CannotChange("its inputs have no batch in common")
    (batch,) = firsts
    if batch == 2:
        raise CannotChange("one sample has code of its own")
    if any(_may_be_of_pairs(node) for node in _given(joint)):
        raise CannotChange("its batch is like another size")
    return batch


def halved(subject: Subject, step: Step) -> Step:
    """The step of half of the batch, rounded up.

    Args:
        subject: the graph.
        step: of it.

    Raises:
        CannotChange: if it has no batch, or an operation cannot be worked out for another one.
    """
    joint, storages, device = subject.joint, subject.lowered.storages, subject.device
    batch = batch_of(subject)
    inputs = [node for node in _given(joint) if _shape(node)[0] == batch]
    again = _Again(batch, inputs)
    mode = _torch.fake_mode_of([_torch.fake_value(node) for node in inputs])
    with mode, _torch.failing_quietly(), torch.no_grad():
        again.run(joint)
    for node, gradient in gradients_by_input(joint).items():
        if node in joint.static_inputs and again.shape(gradient) != _shape(gradient):
            raise CannotChange("a parameter would have a gradient of another shape")
    share = (batch + 1) // 2 / batch
    read = {name for node in inputs for name in storages.of_node[node]}

    def half(name: str, root: fx.Node) -> int:
        is_more = storages.nbytes[name] > rounded_nbytes(_torch.fake_value(root).nbytes, device)
        if is_more and name in read:
            return storages.nbytes[name]  # a view of what is there for more than this step
        growth = again.growth([root, *root.all_input_nodes] if is_more else [root])
        return rounded_nbytes(_scaled(storages.nbytes[name], growth, share), device)

    now = {name: half(name, root) for name, root in storages.root.items()}
    saved_nbytes = sum(storages.nbytes[name] - now[name] for name in read)

    def smaller(op: Op) -> Op:
        node = subject.lowered.node_of.get(op.name)
        if node is None or not op.workspace_nbytes:
            return op
        growth = again.growth([node, *node.all_input_nodes])
        return replace(op, workspace_nbytes=_scaled(op.workspace_nbytes, growth, share))

    problem = replace(
        step.problem,
        values=tuple(
            replace(value, nbytes=min(value.nbytes, now.get(value.name, value.nbytes)))
            for value in step.problem.values
        ),
        ops=tuple(map(smaller, step.problem.ops)),
        resident_nbytes=step.problem.resident_nbytes - saved_nbytes,
    )
    return Step(problem, step.plan)


def _given(joint: JointGraph) -> list[fx.Node]:
    """What the model is called with that has a first dimension."""
    return [n for n in joint.primals if n not in joint.static_inputs and _shape(n)]


def _short_name(node: fx.Node) -> str:
    """Of its operator, in whichever overload."""
    return op_name(node).split(".")[0]


def _shape(node: fx.Node) -> Shape:
    return tuple(getattr(_torch.fake_value(node), "shape", ()))


def _is_for_all(node: fx.Node) -> bool:
    """Whether it is one row for all samples, as positions are, and no data of one sample."""
    return _shape(node)[0] == 1 and not _torch.fake_value(node).is_floating_point()


def _may_be_of_pairs(node: fx.Node) -> bool:
    """Whether it could be a mask of a sequence by itself, which has nothing of a batch."""
    value = _torch.fake_value(node)
    return value.dim() == 2 and len({*value.shape}) == 1 and value.dtype not in _COUNTS


def _has_symbols(node: fx.Node) -> bool:
    value = _torch.fake_value(node)
    if isinstance(value, _SYMBOLS):
        return True
    return any(isinstance(n, _SYMBOLS) for t in _torch.tensor_leaves(value) for n in t.shape)


def _scaled(nbytes: int, growth: float, share: float) -> int:
    """Bytes that grow so much from the batch to `TIMES` of it, of a share of it."""
    if not 1 <= growth <= TIMES:
        raise CannotChange("a value grows with more than the batch")
    less = (growth - 1) / (TIMES - 1) * (1 - share)
    return math.ceil(nbytes * (1 - less))


class _Again:
    """Works a graph out for a batch that is `TIMES` as large."""

    def __init__(self, batch: int, inputs: Collection[fx.Node]) -> None:
        """Of no graph yet; of its inputs these are larger."""
        self._batch, self._inputs = batch, frozenset(inputs)
        self._found: dict[fx.Node, Any] = {}
        self._larger = {batch: TIMES * batch}  # sizes that have become so, of any dimension
        self._others = {size for node in inputs for size in _shape(node)[1:]}

    def shape(self, node: fx.Node) -> Shape:
        """Of what a node gives."""
        return tuple(getattr(self._found[node], "shape", ()))

    def growth(self, nodes: Collection[fx.Node]) -> float:
        """How many times as large their tensors are together as for the batch."""
        before, now = (
            sum(t.nbytes for node in nodes for t in _torch.tensor_leaves(found(node)))
            for found in (_torch.fake_value, self._found.__getitem__)
        )
        return now / before if before else 1.0

    def run(self, joint: JointGraph) -> None:
        """All operations, in the order of the graph.

        Raises:
            CannotChange: if one cannot be told.
            Exception: whatever an operator says of shapes that do not go together.
        """
        results = _torch.results_of_tangents(joint.module.graph)
        for node in joint.nodes:
            if node.op == "call_function":
                for tangent in (n for n in node.all_input_nodes if n in results):
                    self._found[tangent] = torch.empty_like(self._found[results[tangent]])
                self._found[node] = self._result(node)
            elif node.op != "output":
                self._found[node] = self._input(node)
            self._note(node)

    def _input(self, node: fx.Node) -> Any:
        value = _torch.fake_value(node)
        return torch.cat([value] * TIMES) if node in self._inputs else value

    def _note(self, node: fx.Node) -> None:
        if node not in self._found:
            return
        for before, now in zip(_shape(node), self.shape(node), strict=False):
            if before != now:
                self._larger[before] = now

    def _result(self, node: fx.Node) -> Any:
        args: list[Any] = [*fx.map_arg(node.args, self._found.__getitem__)]
        kwargs: dict[str, Any] = {**fx.map_arg(node.kwargs, self._found.__getitem__)}
        if isinstance(node.target, _torch.OpOverload):
            for place, given in self._numbers(node, node.target):
                if isinstance(place, str):
                    kwargs[place] = given
                else:
                    args[place] = given
        elif not _torch.is_getitem(node):
            raise CannotChange(f"{node.name} is no operator")
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _numbers(
        self, node: fx.Node, operator: _torch.OpOverload
    ) -> Iterator[tuple[int | str, Any]]:
        """Arguments that may stand for the batch, by position or name, as they are now."""
        for number, argument in enumerate(_torch.arguments_of(operator)):
            name = argument.name
            place = name if name in node.kwargs else number
            given: Any = node.kwargs.get(name, (*node.args, *[None] * (number + 1))[number])
            if name == _SAMPLES and isinstance(given, int):
                yield place, self._larger.get(given, given)
            elif _COUNTING.get(_short_name(node)) == name and given == self._batch:
                if given in self._others:
                    raise CannotChange("the batch is like another size")
                yield place, self._larger[given]
            elif name == "repeats" and isinstance(given, (list, tuple)):
                yield place, self._repeated(node, list(given))
            elif name in _SHAPES and isinstance(given, (list, tuple)):
                yield place, self._sizes(node, list(given))

    def _sizes(self, node: fx.Node, sizes: list[int]) -> list[int]:
        source, name = node.args[0] if node.args else None, _short_name(node)
        if not isinstance(source, fx.Node) or name.startswith("new_"):
            return self._made(sizes)
        before, now = _shape(source), self.shape(source)
        if name in _SAME_NUMBERS:
            return sizes if before == now else self._viewed(before, now, _shape(node))
        if name == "select_backward":  # its gradient has one dimension less
            dim = cast(int, node.args[2]) % len(sizes)
            before, now = ((*shape[:dim], 0, *shape[dim:]) for shape in (before, now))
        return self._aligned(before, now, sizes)

    def _made(self, sizes: list[int]) -> list[int]:
        """Of something new, which is made for the batch if it has a dimension like it."""
        is_first = bool(sizes) and sizes[0] in self._larger
        alike = [0] if is_first else [at for at, size in enumerate(sizes) if size == self._batch]
        if len(alike) > 1:
            raise CannotChange("the batch is like another size")
        return [self._larger[n] if at in alike else n for at, n in enumerate(sizes)]

    def _repeated(self, node: fx.Node, times: list[int]) -> list[int]:
        """Of one, for each sample; what has samples is repeated as often as before."""
        (source, *_) = node.all_input_nodes
        return times if _shape(source) != self.shape(source) else self._made(times)

    def _viewed(self, before: Shape, now: Shape, sizes: Shape) -> list[int]:
        """Of as many numbers, where the dimension that has become larger is split or merged."""
        axes = [n for n, size in enumerate(before) if size != now[n]]
        ahead, size, larger = math.prod(before[: axes[0]]), before[axes[0]], now[axes[0]]
        starts = [math.prod(sizes[:number]) for number in range(len(sizes))]
        within = [
            number
            for number, (start, one) in enumerate(zip(starts, sizes, strict=True))
            if start < ahead * size and start * one > ahead and one % self._batch == 0
        ]
        exact = [number for number in within if sizes[number] in (size, self._batch)]
        chosen = exact if len(within) > 1 else within
        is_known = len(chosen) == 1 or (chosen and self._batch not in self._others)
        if len(axes) > 1 or not is_known:  # of two alike, samples come first: heads come behind
            raise CannotChange("the batch is lost in a view")
        return [n * larger // size if at == chosen[0] else n for at, n in enumerate(sizes)]

    def _aligned(self, before: Shape, now: Shape, sizes: list[int]) -> list[int]:
        """Of what has the dimensions of its source, and perhaps more before them."""
        more = len(sizes) - len(before)
        known = {
            number: now[number - more]
            for number in range(max(0, more), len(sizes))
            if before[number - more] == sizes[number]
        }
        others = self._made([1 if number in known else n for number, n in enumerate(sizes)])
        return [known.get(number, n) for number, n in enumerate(others)]
