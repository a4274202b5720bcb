"""Regenerate `timing_rounds.md`: how far off the times of calls are, by the rounds that are taken.

    python docs/timing_rounds.py

A minute. Nothing else should run meanwhile: it brings its own load.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from page_tables import how_made, table_of_cells
from row_store import describe
from torch.nn.functional import gelu, scaled_dot_product_attention

from autoremat.cost.runs import time_us

PAGE = Path(__file__).parent / "timing_rounds.md"
ROUNDS = 72
TAKEN = (2, 3, 5, 9)
PRODUCTS = (
    (1024, 384, 128),
    (1024, 512, 128),
    (1024, 128, 512),
    (128, 512, 1024),
    (512, 128, 1024),
)
LOADS = {"nothing else": None, "a loop, 0.3 s of every 0.6": (0.3, 0.3), "a loop": (60.0, 0.0)}
ESTIMATES: dict[str, Callable[[Sequence[float]], float]] = {
    "quietest": min,
    "second quietest": lambda taken: sorted(taken)[1],
    "median": statistics.median,
}
ABOUT = f"""# Rounds of a measurement

What a call takes is measured in rounds over all calls of a graph, since load comes in bursts. Plans
follow from how calls compare, not from how fast the machine was. So here are {ROUNDS} rounds over
eight calls of a small GPT, and of the rounds that stand together: how far what is taken of them is
from the median of all, against the mean distance of all calls. A call is 10 % off where a plan
would take it for 10 % dearer beside the others than it is. `autoremat.cost.timings` takes the
quietest of five.
"""


def calls() -> dict[str, Callable[[], object]]:
    """What is timed."""
    found: dict[str, Callable[[], object]] = {}
    for n, m, k in PRODUCTS:
        a, b = torch.randn(n, k), torch.randn(k, m)
        found[f"{n} x {k} x {m}"] = lambda a=a, b=b: a @ b  # type: ignore[misc]
    q, x = torch.randn(4, 4, 256, 32), torch.randn(4, 256, 512)
    found["attention"] = lambda: scaled_dot_product_attention(q, q, q, is_causal=True)
    found["gelu"], found["log_softmax"] = lambda: gelu(x), lambda: x.log_softmax(-1)
    return found


@contextlib.contextmanager
def beside(load: tuple[float, float] | None) -> Iterator[None]:
    """A loop in another process, which works and rests for so many seconds."""
    if load is None:
        yield
        return
    code = "import time\nwhile True:\n end = time.time() + {}\n while time.time() < end: pass\n"
    text = f"{code.format(load[0])} time.sleep({load[1]})"
    process = subprocess.Popen([sys.executable, "-c", text])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rounds_of(timed: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """By call, its time in each round."""
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, run in timed.items():
            taken[name].append(time_us(run, torch.device("cpu")))
    return taken


def errors(
    taken: Mapping[str, list[float]], count: int, estimate: Callable[[Sequence[float]], float]
) -> list[float]:
    """Sorted, how far calls are off beside the others, for all rounds that stand together."""
    truth = {name: statistics.median(times) for name, times in taken.items()}
    found = []
    for first in range(0, ROUNDS - count + 1, max(1, count // 2)):
        logs = [math.log(estimate(t[first : first + count]) / truth[n]) for n, t in taken.items()]
        mean = statistics.mean(logs)
        found += [math.exp(abs(log - mean)) - 1 for log in logs]
    return sorted(found)


def cells(taken: Mapping[str, list[float]], count: int) -> Iterator[str]:
    """Nine of ten are nearer, and the farthest."""
    yield str(count)
    for estimate in ESTIMATES.values():
        found = errors(taken, count, estimate)
        yield f"{100 * found[9 * len(found) // 10]:.0f} %, {100 * found[-1]:.0f} %"


def main() -> None:
    """Write the page."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    timed = calls()
    parts = [ABOUT]
    for name, load in LOADS.items():
        with beside(load):
            taken = rounds_of(timed)
        parts.append(f"## Beside {name}\n\nNine of ten calls are nearer; the farthest:\n")
        names = ["rounds", *ESTIMATES]
        parts.append(table_of_cells(names, (cells(taken, count) for count in TAKEN)))
    parts += ["## How this was made\n", how_made([describe("timing_rounds.py", ("torch",))]), ""]
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
