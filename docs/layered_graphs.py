"""Random layered graphs without phases, and what the solver's free orders make of them.

`python docs/layered_graphs.py` prints a table: per graph and share of its peak, the peak and the
extra time of the plan found, the operations counted for it, and processor seconds. `--graph` reads
a published one. The graphs are those of *Neural Topological Ordering for Computation
Graphs* (Gagrani et al., 2022) by a recipe that was read off the two published ones at hand (100 and
250 nodes), since their text states it in an appendix that was not at hand: layers of random widths
between a source and a sink; between neighbours a band that has a fifth of the edges beyond those
that connect everything; skip edges to layers uniformly ahead, 16 for 100 others; sizes from a
mixture of four Gaussians in steps of 10 bytes, times uniform below 1,000; a random order.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

from autoremat_solver import Op, Phase, Problem, Value
from autoremat_solver.effort import Effort
from autoremat_solver.model.indexed import index
from autoremat_solver.node_link import read_problem
from autoremat_solver.search.anneal import annealed
from autoremat_solver.simulate import measure

DENSITY = 0.2  # of the edges between two layers beyond those that connect all of both
SKIPS = 0.16  # skip edges per edge between neighbours
WEIGHTS, MEANS, DEVIATIONS = (0.3, 0.3, 0.3, 0.1), (0.5, 1.0, 3.0, 5.0), (0.5, 1.0, 1.0, 1.0)


def layered_graph(nodes: int, seed: int) -> Problem:
    """A random layered graph without phases; its peak is that of the order of its operations.

    Args:
        nodes: how many operations, source and sink included; each makes one value.
        seed: of all random choices.
    """
    chance = random.Random(f"{nodes} {seed}")
    layers = _layers(nodes, chance)
    readers: list[set[int]] = [set() for _ in range(nodes)]
    between = sum(_connect(readers, *pair, chance) for pair in pairwise(layers))
    for _ in range(round(SKIPS * between)):
        _skip(readers, layers[1:-1], chance)
    inputs: list[list[int]] = [[] for _ in range(nodes)]
    for node, reading in enumerate(readers):
        for reader in sorted(reading):
            inputs[reader].append(node)
    order = _random_order(inputs, readers, chance)
    ops = tuple(
        Op(str(v), tuple(map(str, inputs[v])), (str(v),), chance.randrange(1000), phase=Phase.ANY)
        for v in order
    )
    return Problem(tuple(Value(str(v), _nbytes(chance)) for v in order), ops)


def _layers(nodes: int, chance: random.Random) -> list[list[int]]:
    """The nodes of each layer: half as many as there are layers, give or take three quarters."""
    mean = (nodes / 2) ** 0.5
    layers, made = [[0]], 1
    while made < nodes - 1:
        width = min(nodes - 1 - made, max(1, round(mean * chance.uniform(0.25, 1.75))))
        layers.append(list(range(made, made + width)))
        made += width
    return [*layers, [nodes - 1]]


def _connect(
    readers: list[set[int]], here: list[int], there: list[int], chance: random.Random
) -> int:
    """Edges in a band from one layer to the next; how many."""
    long = max(len(here), len(there))
    pairs = {(i * len(here) // long, i * len(there) // long) for i in range(long)}
    beside = sorted(
        ((i, j) for i in range(len(here)) for j in range(len(there))),
        key=lambda pair: (
            abs((pair[0] + 0.5) / len(here) - (pair[1] + 0.5) / len(there)) + chance.random() / long
        ),
    )
    wanted = round(long + DENSITY * (len(beside) - long))
    for pair in beside:
        if len(pairs) >= wanted:
            break
        pairs.add(pair)
    for i, j in pairs:
        readers[here[i]].add(there[j])
    return len(pairs)


def _skip(readers: list[set[int]], layers: list[list[int]], chance: random.Random) -> None:
    """An edge from a node to one at least two layers ahead, each of these as likely."""
    if len(layers) < 3:
        return
    here = chance.choices(range(len(layers) - 2), [len(layer) for layer in layers[:-2]])[0]
    there = chance.randrange(here + 2, len(layers))
    readers[chance.choice(layers[here])].add(chance.choice(layers[there]))


def _random_order(
    inputs: list[list[int]], readers: list[set[int]], chance: random.Random
) -> list[int]:
    """A topological order, at each place any of those that may come next."""
    missing = [len(values) for values in inputs]
    ready, order = [0], []
    while ready:
        node = ready.pop(chance.randrange(len(ready)))
        order.append(node)
        for reader in sorted(readers[node]):
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return order


def _nbytes(chance: random.Random) -> int:
    part = chance.choices(range(4), WEIGHTS)[0]
    while (size := chance.gauss(MEANS[part], DEVIATIONS[part])) <= 0:
        pass
    return max(10, int(size * 100) * 10)


def row(name: str, problem: Problem, share: float, operations: int) -> str:
    """A row of the table: what so many operations find at a share of the given order's peak."""
    indexed = index(problem)
    given = measure(indexed, list(range(len(problem.ops))))
    budget, effort = int(share * given.peak_nbytes), Effort(operations)
    began = time.process_time()
    found = given
    for steps in annealed(indexed, [], budget, effort):
        found = measure(indexed, steps)
    seconds = time.process_time() - began
    extra = f"{100 * (found.time_us / given.time_us - 1):.2f}"
    return (
        f"| {name} | {share:.0%} | {found.peak_nbytes / given.peak_nbytes:.1%} "
        f"| {extra if found.peak_nbytes <= budget else 'none found'} "
        f"| {(operations - effort.operations) / 1e6:.0f} | {seconds:.0f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[500, 1000, 2000])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.9, 0.8, 0.7])
    parser.add_argument("--effort", type=int, default=40_000, help="operations per node")
    parser.add_argument("--graph", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    graphs = [(str(path.stem), read_problem(path.read_text())) for path in given.graph]
    for nodes in given.nodes:
        graphs += [(f"{nodes}, seed {s}", layered_graph(nodes, s)) for s in range(given.seeds)]
    print("| graph | budget | peak | extra time, % | million operations | processor s |")
    print("|---|---|---|---|---|---|")
    for name, problem in graphs:
        for share in given.shares:
            print(row(name, problem, share, given.effort * len(problem.ops)), flush=True)


if __name__ == "__main__":
    main()
