"""A plan as a file: which operations of which graphs run in which order.

Enters: the planned graphs of one step, as names and shapes, or a file from anywhere. Leaves: JSON
of schema "autoremat.plan/1", or a checked `StoredPlan`; a file that is not one raises
`SteeringError` with the reason. Holds no times and no sizes in bytes: a plan is valid wherever its
graphs are the same. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autoremat.errors import PlanMismatch, SteeringError

SCHEMA = "autoremat.plan/1"
_NAME, _VERSION = SCHEMA.split("/")


@dataclass(frozen=True)
class NodeRecord:
    """What must be the same of one node for a plan to be a plan of its graph.

    Attributes:
        name: of the node.
        target: its operator, or "input" or "output".
        inputs: names of the nodes it reads.
        results: dtype and shape of each tensor it makes, such as "float32 (8, 512)".
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        """In words."""
        made = f" of {', '.join(self.results)}" if self.results else ""
        read = f", reading {', '.join(self.inputs)}" if self.inputs else ""
        return f"{self.name} = {self.target}{made}{read}"


@dataclass(frozen=True)
class StoredGraph:
    """One planned graph.

    Attributes:
        nodes: its joint graph of forward and backward.
        schedule: the operations in the order in which they run; a repeat is a recompute. Among
            them, of a plan that sends values away, "offload NAME", "release NAME", "reload NAME".
        saved: names of what the backward receives, sorted.
        method: how the plan was found; the compiler's own partition has no schedule of its own.
        is_own: whether the graph is split along the schedule; if not, torch's partitioner did it.
        in_order: whether Inductor is held to that order within the backward, too.
    """

    nodes: tuple[NodeRecord, ...]
    schedule: tuple[str, ...]
    saved: tuple[str, ...]
    method: str
    is_own: bool = True
    in_order: bool = True


@dataclass(frozen=True)
class StoredPlan:
    """The plans of one step's graphs, in the order in which they were planned.

    Attributes:
        graphs: the plans.
        compiler: "inductor" or "eager": it decides which graph is planned.
        device: what it was made for.
        torch_version: of the torch that captured the graphs.
    """

    graphs: tuple[StoredGraph, ...]
    compiler: str
    device: str = ""
    torch_version: str = ""


def first_mismatch(stored: tuple[NodeRecord, ...], found: tuple[NodeRecord, ...]) -> str | None:
    """The first node in which two graphs differ, in words; None if they are the same."""
    for number, (theirs, ours) in enumerate(zip_longest(stored, found)):
        if theirs != ours:
            there = str(theirs) if theirs is not None else "no more nodes"
            here = str(ours) if ours is not None else "no more nodes"
            return f"node {number}: the plan has {there}; the model has {here}"
    return None


def require_same(
    stored: StoredPlan, number: int, nodes: tuple[NodeRecord, ...], torch_version: str
) -> StoredGraph:
    """The stored plan of the step's graph of that number.

    Raises:
        PlanMismatch: naming the first difference.
    """
    if number >= len(stored.graphs):
        raise PlanMismatch(
            f"The plan has {len(stored.graphs)} graph(s), the model's step has more: graph "
            f"{number} begins with {nodes[0] if nodes else 'nothing'}. Was it planned for "
            "another model, or for inputs that take another way through it?"
        )
    graph = stored.graphs[number]
    difference = first_mismatch(graph.nodes, nodes)
    if difference is None:
        return graph
    versions = ""
    if stored.torch_version != torch_version:
        versions = f" It was made with torch {stored.torch_version}; this is {torch_version}."
    raise PlanMismatch(
        f"This is no plan of this model and batch. In graph {number}, {difference}.{versions} "
        "Plan again, or give the model and batch that the plan was made for."
    )


def digest(plan: StoredPlan) -> str:
    """Short text that is equal for plans of the same operations."""
    return hashlib.sha256(repr((plan.compiler, plan.graphs)).encode()).hexdigest()[:12]


def write(plan: StoredPlan, path: str | Path) -> None:
    """Store a plan, in place of what the path held.

    Raises:
        OSError: if the path cannot be written: it holds what it held.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.part")
    try:
        temporary.write_text(as_text(plan), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def as_text(plan: StoredPlan) -> str:
    """What the file of a plan holds."""
    return "".join(_lines(plan))


def _lines(plan: StoredPlan) -> Iterator[str]:
    """JSON with one node on a line, so that two plans can be compared line by line."""
    head = {"schema": SCHEMA, "compiler": plan.compiler, "device": plan.device}
    head["torch_version"] = plan.torch_version
    yield json.dumps(head)[:-1] + ',\n"graphs": ['
    for number, graph in enumerate(plan.graphs):
        facts = {"method": graph.method, "is_own": graph.is_own, "in_order": graph.in_order}
        yield ("," if number else "") + "\n" + json.dumps(facts)[:-1] + ',\n"nodes": [\n'
        rows = ([n.name, n.target, n.inputs, n.results] for n in graph.nodes)
        yield ",\n".join(json.dumps(row) for row in rows)
        yield '\n],\n"schedule": ' + json.dumps(graph.schedule)
        yield ',\n"saved": ' + json.dumps(graph.saved) + "}"
    yield "\n]}\n"


def read(path: str | Path) -> StoredPlan:
    """The plan that `write` stored.

    Raises:
        OSError: if the file cannot be read.
        SteeringError: if it is no plan, incomplete, or of a newer schema.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SteeringError(
            f"{path} is no plan: it is not JSON ({error}). Is the file complete?"
        ) from error
    schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
    if schema != SCHEMA:
        raise SteeringError(_foreign(path, schema))
    try:
        return StoredPlan(
            graphs=tuple(_graph(graph) for graph in _list(data["graphs"])),
            compiler=_text(data["compiler"]),
            device=_text(data["device"]),
            torch_version=_text(data["torch_version"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SteeringError(
            f"{path} is no complete plan: a field is missing or of the wrong type "
            f"({type(error).__name__}: {error}). Save the plan again."
        ) from error


def _foreign(path: Path, schema: object) -> str:
    newer = re.fullmatch(rf"{re.escape(_NAME)}/([0-9]{{1,9}})", str(schema))
    if newer and int(newer[1]) > int(_VERSION):
        return (
            f"{path} has schema {schema!r}, written by a newer autoremat; this one reads "
            f"{SCHEMA!r}. Update autoremat, or save the plan with this version."
        )
    return (
        f"{path} is no plan of a model: expected schema {SCHEMA!r}, found {schema!r:.80}. "
        "autoremat.save_plan(model, path) writes one."
    )


def _graph(data: Any) -> StoredGraph:
    return StoredGraph(
        nodes=tuple(
            NodeRecord(_text(name), _text(target), _texts(inputs), _texts(results))
            for name, target, inputs, results in _list(data["nodes"])
        ),
        schedule=_texts(data["schedule"]),
        saved=_texts(data["saved"]),
        method=_text(data["method"]),
        is_own=_flag(data, "is_own"),
        in_order="in_order" not in data or _flag(data, "in_order"),  # older files have none
    )


def _flag(data: Any, name: str) -> bool:
    if not isinstance(data[name], bool):
        raise TypeError(f"{name} is true or false")
    return bool(data[name])


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r:.40}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r:.40}")
    return value


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in _list(value))
