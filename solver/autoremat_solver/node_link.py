"""Reads a problem from text: our own schema, or a networkx node-link graph.

Enters: JSON text. Leaves: a `Problem`, or a `ProblemError` that names the node, edge or field at
fault and says what is needed there.

A node-link graph (`networkx.node_link_data`) is how the published instances are exchanged. Each
node is one operation that makes one value, both named after the node's id; an edge from a to b
says that b reads what a makes. Nodes carry `time` (any unit, taken over as it is), `nbytes`, and
perhaps `phase`, "forward" or "backward". Without phases operations run in any order that the edges
allow, and as often as the plan wants. The file's order of nodes is the order without recompute,
with which plans are compared; where it contradicts the edges, the closest topological order takes
its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from typing import Any

from autoremat_solver.problem import SCHEMA, Op, Phase, Problem, ProblemError, Value

EDGE_KEYS = ("edges", "links")
PHASES = {phase.value: phase for phase in (Phase.FORWARD, Phase.BACKWARD)}
LARGEST_NBYTES = 2**63 - 1

_EXPECTED = (
    f"Expected an object with schema {SCHEMA!r}, or a networkx node-link graph with 'nodes' and "
    "'edges' or 'links'."
)


def read_problem(text: str) -> Problem:
    """The problem that a JSON text states, in our schema or as a node-link graph.

    Raises:
        ProblemError: if the text is neither, or contradicts itself.
    """
    data = _decode(text)
    if "schema" not in data:
        return _problem_of_graph(data)
    problem = Problem.from_json(text)
    _require_whole_sizes(problem)
    return problem


def is_node_link(text: str) -> bool:
    """Whether `read_problem` takes the text as a node-link graph; its times have no known unit.

    Raises:
        ProblemError: if the text is neither that nor our schema.
    """
    return "schema" not in _decode(text)


def _decode(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ProblemError(f"The text is empty. {_EXPECTED}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProblemError(
            f"The text is not JSON ({error}); it begins with {text.strip()[:30]!r}. "
            "Is the file complete, and is it the right one?"
        ) from error
    if not isinstance(data, dict):
        raise ProblemError(f"The JSON is a {type(data).__name__}. {_EXPECTED}")
    if "schema" in data:
        if data["schema"] != SCHEMA:
            raise ProblemError(f"The JSON has the schema {data['schema']!r}. {_EXPECTED}")
    elif "nodes" not in data:
        fields = ", ".join(repr(name) for name in list(data)[:6]) or "none"
        raise ProblemError(f"The JSON has no 'nodes' (its fields: {fields}). {_EXPECTED}")
    return data


def _require_whole_sizes(problem: Problem) -> None:
    sizes: list[tuple[str, object]] = [("resident_nbytes", problem.resident_nbytes)]
    sizes += [(f"nbytes of value {value.name!r}", value.nbytes) for value in problem.values]
    sizes += [(f"workspace_nbytes of {op.name!r}", op.workspace_nbytes) for op in problem.ops]
    for what, size in sizes:
        if isinstance(size, bool) or not isinstance(size, int):
            raise ProblemError(f"The {what} is {size!r}: give a whole number of bytes.")


def _problem_of_graph(data: dict[str, Any]) -> Problem:
    if data.get("directed", True) is not True:
        raise ProblemError(
            "The graph is undirected, so who reads whose output is unknown. "
            "Write a networkx.DiGraph, with edges from the producer to the reader."
        )
    nodes = _nodes(data["nodes"])
    edges = _edges(data, nodes)
    phases = _phases(nodes)
    nbytes = {name: _nbytes(name, node.get("nbytes")) for name, node in nodes.items()}
    times = {name: _time(name, node.get("time")) for name, node in nodes.items()}
    reads: dict[Hashable, dict[str, None]] = {name: {} for name in nodes}
    for source, target in edges:
        reads[target][str(source)] = None
    order = _topological(list(nodes), edges)
    return Problem(
        values=tuple(Value(str(name), nbytes[name]) for name in order),
        ops=tuple(
            Op(str(name), tuple(reads[name]), (str(name),), times[name], phase=phases[name])
            for name in order
        ),
    )


def _nodes(found: object) -> dict[Hashable, dict[str, Any]]:
    """The nodes by id, in the file's order."""
    if not isinstance(found, list):
        raise ProblemError(f"'nodes' is a {type(found).__name__}: give a list of objects.")
    if not found:
        raise ProblemError("The graph has no nodes: there is nothing to plan.")
    nodes: dict[Hashable, dict[str, Any]] = {}
    names: dict[str, Hashable] = {}
    for place, node in enumerate(found):
        if not isinstance(node, dict):
            raise ProblemError(f"Node number {place} is {node!r}: give an object with an 'id'.")
        if "id" not in node:
            raise ProblemError(f"Node number {place} has no 'id': give each node its own.")
        name = node["id"]
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ProblemError(f"Node number {place} has the id {name!r}: give a string or int.")
        if str(name) in names:
            other = names[str(name)]
            alike = "twice" if type(other) is type(name) else f"beside {other!r}"
            raise ProblemError(f"Node id {name!r} appears {alike}: ids must be unique as text.")
        names[str(name)] = name
        nodes[name] = node
    return nodes


def _edges(
    data: dict[str, Any], nodes: dict[Hashable, dict[str, Any]]
) -> list[tuple[Hashable, Hashable]]:
    keys = [key for key in EDGE_KEYS if key in data]
    if len(keys) != 1:
        fault = "both 'edges' and 'links'" if keys else "neither 'edges' nor 'links'"
        raise ProblemError(f"The graph has {fault}: give one list of edges, empty if none.")
    found = data[keys[0]]
    if not isinstance(found, list):
        raise ProblemError(f"{keys[0]!r} is a {type(found).__name__}: give a list of objects.")
    edges = []
    for place, edge in enumerate(found):
        if not isinstance(edge, dict):
            raise ProblemError(f"Edge number {place} is {edge!r}: give an object.")
        for end in ("source", "target"):
            if end not in edge:
                raise ProblemError(f"Edge number {place} has no {end!r}: give a node's id.")
            known = isinstance(edge[end], str | int) and edge[end] in nodes
            if not known or isinstance(edge[end], bool):
                raise ProblemError(
                    f"Edge number {place} has the {end} {edge[end]!r}, which is no node's id."
                )
        if edge["source"] == edge["target"]:
            raise ProblemError(
                f"Node {edge['source']!r} reads its own output (edge number {place}): "
                "remove the self loop."
            )
        edges.append((edge["source"], edge["target"]))
    return edges


def _phases(nodes: dict[Hashable, dict[str, Any]]) -> dict[Hashable, Phase]:
    given = {name: node.get("phase") for name, node in nodes.items()}
    if all(phase is None for phase in given.values()):
        return dict.fromkeys(nodes, Phase.ANY)
    for name, phase in given.items():
        if phase is None:
            raise ProblemError(
                f"Node {name!r} has no 'phase', but others have one: give every node "
                "'forward' or 'backward', or none of them."
            )
        if not isinstance(phase, str) or phase not in PHASES:
            raise ProblemError(f"Node {name!r} has phase {phase!r}: give 'forward' or 'backward'.")
    return {name: PHASES[str(phase)] for name, phase in given.items()}


def _nbytes(name: Hashable, size: object) -> int:
    whole = int(size) if isinstance(size, float) and size.is_integer() else size
    if isinstance(whole, bool) or not isinstance(whole, int) or not 0 <= whole <= LARGEST_NBYTES:
        raise _wrong(
            name, "nbytes", size, "the bytes of its output, a whole number from 0 to 2^63 - 1"
        )
    return whole


def _time(name: Hashable, time: object) -> float:
    needed = "the duration of one run, a finite number from 0, in the same unit for all nodes"
    if isinstance(time, bool) or not isinstance(time, int | float):
        raise _wrong(name, "time", time, needed)
    try:
        duration = float(time)
    except OverflowError:
        duration = math.inf
    if not 0 <= duration < math.inf:
        raise _wrong(name, "time", time, needed)
    return duration


def _wrong(name: Hashable, field: str, found: object, needed: str) -> ProblemError:
    shown = repr(found)[:40]
    fault = f"no {field!r}" if found is None else f"{field}={shown}"
    return ProblemError(f"Node {name!r} has {fault}: give {needed}.")


def _topological(names: list[Hashable], edges: list[tuple[Hashable, Hashable]]) -> list[Hashable]:
    """The file's order if the edges allow it, else the topological order nearest to it."""
    place = {name: i for i, name in enumerate(names)}
    if all(place[source] < place[target] for source, target in edges):
        return names
    import networkx  # here, since its import takes longer than most files take to read

    graph = networkx.DiGraph(edges)
    graph.add_nodes_from(names)
    try:
        return list(networkx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except networkx.NetworkXUnfeasible as error:
        cycle = [source for source, _ in networkx.find_cycle(graph)]
        first = cycle.index(min(cycle, key=place.__getitem__))
        cycle = [*cycle[first:], *cycle[: first + 1]]
        shown = [repr(name) for name in cycle]
        if len(shown) > 12:
            shown[10:-1] = ["..."]
        raise ProblemError(
            f"The graph has a cycle, {' -> '.join(shown)}: no order can run it. "
            "Remove one of these edges."
        ) from error
