"""Problems from text: networkx node-link graphs, our own schema, and what is neither."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import networkx
import pytest
from autoremat_solver import Phase, Plan, Problem, ProblemError, Solver, read_problem, simulate

Graph = dict[str, Any]


def diamond() -> Graph:
    """Edges a -> b -> d and a -> c -> d, with sizes 10, 20, 30, 40 and times 1, 2, 3, 4."""
    return {
        "directed": True,
        "multigraph": False,
        "graph": {},
        "nodes": [
            {"id": name, "time": place, "nbytes": 10 * place}
            for place, name in enumerate("abcd", start=1)
        ],
        "edges": [
            {"source": source, "target": target} for source, target in ("ab", "ac", "bd", "cd")
        ],
    }


def read(graph: Graph) -> Problem:
    return read_problem(json.dumps(graph))


def in_order(problem: Problem) -> Plan:
    return Plan.of(op.name for op in problem.ops)


def test_a_node_is_an_operation_and_its_value() -> None:
    """Sizes and times are the node's, reads are the edges, and without phases all are ANY."""
    problem = read(diamond())
    assert [(v.name, v.nbytes) for v in problem.values] == [
        ("a", 10),
        ("b", 20),
        ("c", 30),
        ("d", 40),
    ]
    assert [(op.name, op.inputs, op.outputs, op.time_us) for op in problem.ops] == [
        ("a", (), ("a",), 1.0),
        ("b", ("a",), ("b",), 2.0),
        ("c", ("a",), ("c",), 3.0),
        ("d", ("b", "c"), ("d",), 4.0),
    ]
    assert {op.phase for op in problem.ops} == {Phase.ANY}
    assert problem.outputs == ()


def test_phases_are_taken_over() -> None:
    """A graph in which every node has a phase has a forward and a backward."""
    graph = diamond()
    for node, phase in zip(graph["nodes"], ("forward",) * 2 + ("backward",) * 2, strict=True):
        node["phase"] = phase
    assert [op.phase for op in read(graph).ops] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2


@pytest.mark.parametrize("edges", ["edges", "links"])
@pytest.mark.parametrize("kind", [networkx.DiGraph, networkx.MultiDiGraph])
def test_what_networkx_writes_is_read(kind: type[networkx.DiGraph], edges: str) -> None:
    """Both names of the edge list; parallel edges are one read; integer ids become names."""
    graph = kind()
    graph.add_node(1, time=1.5, nbytes=10)
    graph.add_node(2, time=2, nbytes=20.0)
    graph.add_edge(1, 2)
    graph.add_edge(1, 2)
    problem = read(networkx.node_link_data(graph, edges=edges))
    assert [(op.name, op.inputs, op.time_us) for op in problem.ops] == [
        ("1", (), 1.5),
        ("2", ("1",), 2.0),
    ]
    assert [value.nbytes for value in problem.values] == [10, 20]


def test_nodes_out_of_order_are_sorted_and_no_more_than_needed() -> None:
    """c, d, b, a with c free and a -> b -> d: c stays first, then the others as edges demand."""
    graph = diamond()
    by_id = {node["id"]: node for node in graph["nodes"]}
    graph["nodes"] = [by_id[name] for name in "cdba"]
    graph["edges"] = [{"source": "a", "target": "b"}, {"source": "b", "target": "d"}]
    assert [op.name for op in read(graph).ops] == ["c", "a", "b", "d"]


def layered(seed: int) -> Graph:
    """Layers of a few nodes; each reads some nodes of earlier layers."""
    draw = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    edges = []
    for _ in range(8):
        earlier = [node["id"] for node in nodes]
        for _ in range(draw.randint(1, 4)):
            new = len(nodes)
            nodes.append({"id": new, "time": draw.randint(0, 9), "nbytes": draw.randint(0, 99)})
            for source in draw.sample(earlier, min(len(earlier), draw.randint(0, 3))):
                edges.append({"source": source, "target": new})
    return {"directed": True, "multigraph": False, "graph": {}, "nodes": nodes, "edges": edges}


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_counted_as_the_papers_count_it(seed: int) -> None:
    """While j runs, its output is live and every earlier one that j or a later node reads."""
    graph = layered(seed)
    last_read: dict[int, int] = {}
    for edge in graph["edges"]:
        last_read[edge["source"]] = max(last_read.get(edge["source"], -1), edge["target"])
    sizes = [node["nbytes"] for node in graph["nodes"]]
    live = [
        sizes[j] + sum(sizes[i] for i in range(j) if last_read.get(i, -1) >= j)
        for j in range(len(sizes))
    ]
    problem = read(graph)
    timeline = simulate(problem, in_order(problem))
    assert list(timeline.live_nbytes) == live
    assert timeline.time_us == sum(node["time"] for node in graph["nodes"])


Change = Callable[[Graph], object]
WRONG: list[tuple[str, Change, str]] = [
    ("no time", lambda g: g["nodes"][1].pop("time"), "'b' has no 'time'"),
    ("no nbytes", lambda g: g["nodes"][1].pop("nbytes"), "'b' has no 'nbytes'"),
    ("negative", lambda g: g["nodes"][2].update(nbytes=-1), "'c' has nbytes=-1"),
    ("fraction", lambda g: g["nodes"][2].update(nbytes=1.5), "'c' has nbytes=1.5"),
    ("NaN bytes", lambda g: g["nodes"][2].update(nbytes=float("nan")), "'c' has nbytes=nan"),
    ("endless", lambda g: g["nodes"][2].update(nbytes=float("inf")), "'c' has nbytes=inf"),
    ("huge", lambda g: g["nodes"][2].update(nbytes=2**63), "'c' has nbytes=92233"),
    ("text", lambda g: g["nodes"][2].update(nbytes="10"), "'c' has nbytes='10'"),
    ("bool", lambda g: g["nodes"][2].update(nbytes=True), "'c' has nbytes=True"),
    ("NaN time", lambda g: g["nodes"][0].update(time=float("nan")), "'a' has time=nan"),
    ("negative time", lambda g: g["nodes"][0].update(time=-2), "'a' has time=-2"),
    ("text time", lambda g: g["nodes"][0].update(time="2"), "'a' has time='2'"),
    ("huge time", lambda g: g["nodes"][0].update(time=10**400), "'a' has time=1000"),
    ("mixed phases", lambda g: g["nodes"][1].update(phase="forward"), "'a' has no 'phase'"),
    ("same id", lambda g: g["nodes"][3].update(id="a"), "'a' appears twice"),
    ("same text", lambda g: g["nodes"].extend([_node(7), _node("7")]), "'7' appears beside 7"),
    ("no id", lambda g: g["nodes"][3].pop("id"), "Node number 3 has no 'id'"),
    ("list id", lambda g: g["nodes"][3].update(id=[1]), r"Node number 3 has the id \[1\]"),
    ("node no object", lambda g: g["nodes"].append("e"), "Node number 4 is 'e'"),
    ("unknown end", lambda g: g["edges"][2].update(target="x"), "number 2 has the target 'x'"),
    ("list end", lambda g: g["edges"][2].update(target=["x"]), "number 2 has the target"),
    ("no source", lambda g: g["edges"][2].pop("source"), "number 2 has no 'source'"),
    ("edge no object", lambda g: g["edges"].append("ab"), "Edge number 4 is 'ab'"),
    ("self loop", lambda g: g["edges"][0].update(target="a"), "'a' reads its own output"),
    ("two lists", lambda g: g.update(links=[]), "both 'edges' and 'links'"),
    ("no edges", lambda g: g.pop("edges"), "neither 'edges' nor 'links'"),
    ("edges no list", lambda g: g.update(edges={}), "'edges' is a dict"),
    ("nodes no list", lambda g: g.update(nodes={}), "'nodes' is a dict"),
    ("no nodes", lambda g: g.update(nodes=[], edges=[]), "nothing to plan"),
    ("undirected", lambda g: g.update(directed=False), "undirected"),
]


def _node(name: object) -> dict[str, object]:
    return {"id": name, "time": 1, "nbytes": 1}


@pytest.mark.parametrize(
    ("change", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_graph_is_refused_by_the_name_of_what_is_wrong(
    change: Change, message: str
) -> None:
    """The error names node or edge, and what stands there."""
    graph = diamond()
    read(copy.deepcopy(graph))
    change(graph)
    with pytest.raises(ProblemError, match=message):
        read(graph)


@pytest.mark.parametrize("phase", ["sideways", "any", 1, ["forward"]])
def test_an_unknown_phase_is_refused(phase: object) -> None:
    """Only forward and backward are phases of a node."""
    graph = diamond()
    for node in graph["nodes"]:
        node["phase"] = phase
    with pytest.raises(ProblemError, match=r"'a' has phase .* 'forward' or 'backward'"):
        read(graph)


def test_a_cycle_is_named() -> None:
    """The cycle b -> d -> b is written from the node that stands first."""
    graph = diamond()
    graph["edges"].append({"source": "d", "target": "b"})
    with pytest.raises(ProblemError, match="cycle, 'b' -> 'd' -> 'b'"):
        read(graph)


def test_a_long_cycle_is_shortened() -> None:
    """A cycle through a hundred nodes does not fill the screen."""
    graph = networkx.cycle_graph(100, create_using=networkx.DiGraph)
    networkx.set_node_attributes(graph, 1, "time")
    networkx.set_node_attributes(graph, 1, "nbytes")
    with pytest.raises(ProblemError, match=r"0 -> 1 -> .* -> \.\.\. -> 0") as caught:
        read(networkx.node_link_data(graph, edges="edges"))
    assert len(str(caught.value)) < 300


def test_our_schema_is_read_as_before() -> None:
    """What `to_json` wrote comes back equal."""
    problem = read(diamond())
    assert read_problem(problem.to_json()) == problem


def test_what_older_versions_wrote_in_our_schema_is_read() -> None:
    """They state a time for saving each value, 0: what is not 0 would be lost, so it is refused."""
    problem = read(diamond())
    data = json.loads(problem.to_json())
    data["values"][0]["save_us"] = 0.0
    assert read_problem(json.dumps(data)) == problem
    data["values"][0]["save_us"] = 2.0
    with pytest.raises(ProblemError, match="save_us"):
        read_problem(json.dumps(data))


def test_our_schema_needs_whole_bytes() -> None:
    """A fraction of a byte is refused by the value's name."""
    text = read(diamond()).to_json().replace('"nbytes": 30', '"nbytes": 30.5')
    with pytest.raises(ProblemError, match=r"nbytes of value 'c' is 30\.5"):
        read_problem(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (json.dumps(diamond())[:100], "not JSON .* complete"),
        ("<!DOCTYPE html><html></html>", "begins with '<!DOCTYPE html>"),
        ("[1, 2]", "is a list"),
        ("null", "is a NoneType"),
        ("{}", "no 'nodes' .*none"),
        ('{"name": "x", "layers": []}', "no 'nodes' .*'name', 'layers'"),
        ('{"schema": "autoremat.problem/2"}', "autoremat.problem/2"),
        ('{"schema": "autoremat.problem/1"}', "lacks or mistypes"),
        ("[" * 100_000, "not JSON"),
        ('{"nodes": ' + "9" * 5000 + "}", "not JSON"),
    ],
    ids=lambda text: text[:24],
)
def test_foreign_text_is_refused(text: str, message: str) -> None:
    """What is neither of the two formats is said to be so."""
    with pytest.raises(ProblemError, match=message):
        read_problem(text)


def test_the_solver_takes_a_graph_that_was_read() -> None:
    """Without a budget that binds, every node of the diamond runs once."""
    problem = read(diamond())
    assert Solver(problem).solve(1000).plan == in_order(problem)
