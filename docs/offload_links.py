"""Regenerate `offload_links.md` and the rows beside it, `offload_links.json`.

    python docs/offload_links.py [--only GRAPH;...] [--resume] [--page]

Nothing runs but the search: the solver's graphs with a host beside the device, over three links,
by recompute alone, by sending away alone, and by both. Each graph in a process of its own.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from autoremat_solver import Link, OffloadSolver, Problem, Solution, Solver
from autoremat_solver.plan import Status
from measured_models import run
from page_tables import MIB, Promise, how_made, is_done, table_of_cells, verdicts
from row_store import Row
from solver_graphs import GRAPHS, capture

from autoremat.cost.device_specs import find_link, find_spec

PAGE = Path(__file__).parent / "offload_links.md"
SHARES = (0.5, 0.35, 0.25)  # of what the step without a plan takes above what is resident
FLOOR = "floor"  # the smallest peak of recompute alone
TIME_LIMIT_S = 5.0
LATENCY_US = 10.0
LINKS = {"PCIe 4": "A100", "PCIe 5": "H100", "NVLink-C2C": "H200"}  # each beside a GPU
ALONE = "recompute only"
WAYS = {"offload only": False, "both": True}
BUDGETS = [*(f"{share:.0%}" for share in SHARES), FLOOR]

ABOUT = f"""# Values that wait elsewhere: three links

What the search finds where values may [wait on the host](offload.md): on the joint graphs of
`docs/solver_graphs.py` (small widths, real depth), with times of operations as measured on this
processor, where their matrix products are bound by computing as wide ones are on a GPU. So that
such a graph says something of a GPU, a link is as slow beside this machine's memory as it is beside
the memory of a GPU, by its data sheet: {{ratios}}. Each copy takes {LATENCY_US:.0f} us more, both
ways copy at once, and the host has as much memory as is asked for. Budgets are shares of what the
step without a plan takes above what is resident; the floor is the smallest peak found of recompute
alone. `time_limit={TIME_LIMIT_S:.0f}`. Nothing of this has run: what steps do that run is
[on another page](offload_figures.md).

Cells are what a step takes more, of the time of the step without a plan; empty where no plan was
found that fits.
"""


def memory_nbytes_per_us() -> float:
    """Of this machine: what a copy of large memory reads and writes."""
    source = torch.ones(64 * MIB // 4)
    to = torch.empty_like(source)
    taken = []
    for _ in range(9):
        began = time.perf_counter_ns()
        to.copy_(source)
        taken.append((time.perf_counter_ns() - began) / 1e3)
    return 2 * source.nbytes / statistics.median(taken)


def slower(link: str) -> float:
    """How many times a link's rate is in that of the memory of its GPU."""
    return find_spec(LINKS[link]).bandwidth_gbps / find_link(link).gbps


def row_of(name: str) -> Row:
    """A graph over each link."""
    torch.set_num_threads(1)
    problem = max((one.problem for one in capture(GRAPHS[name]())), key=lambda p: len(p.ops))
    rate, found = memory_nbytes_per_us(), {"links": {}}
    alone = Solver(problem, time_limit_s=TIME_LIMIT_S)
    plain = alone.fastest().timeline
    resident, above = problem.resident_nbytes, plain.peak_nbytes - problem.resident_nbytes
    floor = alone.smallest_peak(time_limit_s=TIME_LIMIT_S).timeline.peak_nbytes
    nbytes = [resident + int(share * above) for share in SHARES] + [floor]
    budgets = dict(zip(BUDGETS, nbytes, strict=True))
    found[ALONE] = {b: _more(alone.solve(n), plain.time_us) for b, n in budgets.items()}
    found["floor_share"] = (floor - resident) / above
    for link in LINKS:
        speed = rate / slower(link)
        linked = replace(problem, link=Link(speed, speed, LATENCY_US))
        ways = found["links"].setdefault(link, {})
        for way, recomputes in WAYS.items():
            solver = _solver(linked, recompute=recomputes)
            solved = {b: solver.solve(n) for b, n in budgets.items()}
            ways[way] = {b: _more(s, plain.time_us) for b, s in solved.items()}
            least = solver.smallest_peak().timeline.peak_nbytes
            ways[way]["least_share"] = (least - resident) / above
    return found


def _solver(problem: Problem, *, recompute: bool) -> OffloadSolver:
    host_nbytes = sum(value.nbytes for value in problem.values)
    return OffloadSolver(problem, host_nbytes, time_limit_s=TIME_LIMIT_S, recompute=recompute)


def _more(found: Solution, plain_us: float) -> float | None:
    """What a plan takes beyond the step without one, of that; None if it does not fit."""
    if found.status is Status.INFEASIBLE:
        return None
    return found.timeline.time_us / plain_us - 1


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _times(rows: Sequence[Row]) -> str:
    names = ["graph", "budget", ALONE, *(f"{link}, {way}" for link in LINKS for way in WAYS)]
    cells = (
        [
            *(row["key"], budget, _percent(row[ALONE][budget])),
            *(_percent(row["links"][link][way][budget]) for link in LINKS for way in WAYS),
        ]
        for row in rows
        for budget in BUDGETS
    )
    return table_of_cells(names, cells)


def _peaks(rows: Sequence[Row]) -> str:
    names = ["graph", ALONE, *(f"{link}, {way}" for link in LINKS for way in WAYS)]
    cells = (
        [
            *(row["key"], _percent(row["floor_share"])),
            *(_percent(row["links"][link][way]["least_share"]) for link in LINKS for way in WAYS),
        ]
        for row in rows
    )
    return table_of_cells(names, cells)


def _promises(rows: Sequence[Row]) -> Iterator[Promise]:
    cells = [(row, link, b) for row in rows for link in LINKS for b in BUDGETS]
    for other, text in ((ALONE, "recompute alone"), ("offload only", "sending away alone")):
        judged = []
        for row, link, budget in cells:
            ways = row["links"][link]
            ours, theirs = ways["both"][budget], (row if other == ALONE else ways)[other][budget]
            if theirs is not None:
                is_kept = ours is not None and ours <= theirs + 1e-6
                judged.append((f"{row['key']} {link} {budget}", is_kept))
        yield f"both together are never slower than {text}", judged
    yield (
        "the smallest peak of both is never above that of recompute alone",
        [
            (
                f"{row['key']} {link}",
                row["links"][link]["both"]["least_share"] <= row["floor_share"] + 1e-9,
            )
            for row in rows
            for link in LINKS
        ],
    )


def _gains(rows: Sequence[Row]) -> Iterator[str]:
    """By link, what both take of the time of recompute alone, in the geometric mean."""
    for link in LINKS:
        ratios = [
            (1 + row["links"][link]["both"][budget]) / (1 + row[ALONE][budget])
            for row in rows
            for budget in BUDGETS
            if None not in (row[ALONE][budget], row["links"][link]["both"][budget])
        ]
        if ratios:
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            yield f"- {link}: {mean:.3f} over {len(ratios)} budgets, at best {min(ratios):.3f}"


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if is_done(row)]
    failed = [f"- {row['key']}: {row.get('message', '')}" for row in rows if not is_done(row)]
    missing = "; ".join(key for key in GRAPHS if key not in {row["key"] for row in rows})
    ratios = ", ".join(f"{n} 1/{slower(n):.0f} of an {d}'s" for n, d in LINKS.items())
    return "\n".join(
        [
            ABOUT.format(ratios=ratios),
            _times(done),
            "What both take of the time that recompute alone takes, in the mean over graphs and "
            "budgets:\n",
            *_gains(done),
            "",
            "## The smallest peak\n",
            "Found, above what is resident, of what the step without a plan takes.\n",
            _peaks(done),
            verdicts(_promises(done)),
            "## How this was made\n",
            how_made(runs),
            *failed,
            "",
            f"Not run: GPUs{'; ' if missing else ''}{missing}.",
            "",
        ]
    )


if __name__ == "__main__":
    run(PAGE, page, list(GRAPHS), row_of, ("floor_share", "message"))
