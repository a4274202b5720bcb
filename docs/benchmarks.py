"""Regenerate `benchmarks.md`, its picture, and the rows beside it, `benchmarks.json`.

    python docs/benchmarks.py [--quick] [--models mlp,bert] [--compilers eager,inductor]
                              [--budgets 75,50,35,beside,smallest] [--resume]

Each point (model, variant, budget) is measured in its own process (`benchmark_worker.py`), one
after the other; the processes of a model then stay, and their steps are timed in turn, so that all
variants of a model are timed in one run, interleaved. Under Inductor the budgets are the measured
peaks of what users have without autoremat ("beside"), and the smallest that has a plan. A point
that crashes or passes `--timeout` is a row that says so. Rows are stored as they come; `--resume`
measures only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmark_models import MODELS
from benchmark_page import page
from benchmark_plot import draw
from benchmark_sac_ilp import LEAST
from benchmark_worker import SEED, Point
from row_store import Row, Store, describe

from autoremat.comparison.process import Worker, median_step, ratios, rounds

HERE = Path(__file__).parent
ROWS, LOGS = HERE / "benchmarks.json", HERE / "benchmark_logs"
PICTURE = HERE / "benchmarks.svg"
BUDGETS = {
    "eager": ["100", "75", "50", "35", "25", "smallest"],
    "inductor": ["beside", "smallest"],
}
BESIDE = "beside"  # a budget: as much as each of the others takes
OURS = "autoremat"
TORCH_BUDGETS = [0.7, 0.5, 0.3, 0.1]
SAC_ILP_SHARES = [0.5, LEAST]
ALIKE = 0.01  # peaks that differ by less are one budget


def peers(model: str, compiler: str) -> Iterator[Point]:
    """What users have without autoremat: the rows that ours are compared with."""
    if compiler == "inductor":
        yield Point(model, compiler, "plain")
    for variant in ("checkpoint", "selective"):
        yield Point(model, compiler, variant)
    if compiler == "inductor":
        for setting in TORCH_BUDGETS:
            yield Point(model, compiler, "torch budget", setting)
    else:  # its decisions are about operations in eager mode
        for share in SAC_ILP_SHARES:
            yield Point(model, compiler, "sac_ilp", share)


def planned(
    model: str, compiler: str, eager: Row, others: Iterable[Row], args: argparse.Namespace
) -> Iterator[Point]:
    """Our rows: resident plus what another takes above it, or a share of what eager's step does."""
    resident, limit = eager["resident_nbytes"], args.time_limit
    for name in args.budgets or BUDGETS[compiler]:
        if name == BESIDE:
            for other in different(others):
                budget = resident + other["peak_nbytes"]
                yield Point(model, compiler, OURS, None, budget, limit, other["key"])
        elif name == "smallest":
            yield Point(model, compiler, OURS, None, None, limit)
        else:
            budget = resident + int(eager["peak_nbytes"] * float(name) / 100)
            yield Point(model, compiler, OURS, float(name), budget, limit)


def different(others: Iterable[Row]) -> Iterator[Row]:
    """Of those that ran, from the smallest peak up, the first of those that are alike."""
    last = 0.0
    ran = (row for row in others if row["status"] == "ok")
    for row in sorted(ran, key=lambda row: row["peak_nbytes"]):
        if row["peak_nbytes"] > last * (1 + ALIKE):
            last = row["peak_nbytes"]
            yield row


def run_model(model: str, compiler: str, store: Store, args: argparse.Namespace) -> None:
    """Measure all points of a model under one compiler, then time their steps in turn."""
    eager_point = Point(model, "eager", "plain")
    eager_worker, eager = start(eager_point, args)
    if eager_point.key not in store.rows or eager["status"] != "ok":
        store.add(eager)
    if eager["status"] != "ok":
        return
    workers: dict[str, Worker] = {eager_point.key: eager_worker}
    fresh: dict[str, Row] = {eager_point.key: eager}
    try:

        def measure(points: Iterable[Point]) -> None:
            for point in points:
                if args.resume and is_done(store.rows.get(point.key)):
                    continue
                workers[point.key], fresh[point.key] = start(point, args)
                store.add(fresh[point.key])

        others = list(peers(model, compiler))
        measure(others)
        known = [store.rows[other.key] for other in others]
        measure(planned(model, compiler, eager, known, args))
        if len(fresh) == 1 and is_done(store.rows[eager_point.key]):
            return
        sound = {key: w for key, w in workers.items() if fresh[key]["status"] == "ok"}
        times = list(rounds(sound, args.rounds, args.timeout))
        for key in sound:
            if all(key in taken for taken in times):
                store.add({**fresh[key], **time_row(times, key, eager_point.key)})
    finally:
        for worker in workers.values():
            worker.close()


def is_done(row: Row | None) -> bool:
    """Whether a stored row needs no further measurement."""
    if row is None:
        return False
    return row["status"] in ("infeasible", "no peer") or "time_ratio" in row


def start(point: Point, args: argparse.Namespace) -> tuple[Worker, Row]:
    """Start a point's process and wait for its row."""
    began = time.perf_counter()
    LOGS.mkdir(exist_ok=True)
    worker = Worker(
        [sys.executable, str(HERE / "benchmark_worker.py"), json.dumps(asdict(point))],
        LOGS / (point.key.replace("/", "-").replace(" ", "_") + ".log"),
        {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    message = worker.receive(args.timeout)
    row = {**asdict(point), "key": point.key, **message}
    row["wall_seconds"] = time.perf_counter() - began
    print(f"{point.key:45s} {summary(row)}", flush=True)
    return worker, row


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] == "ok":
        return (
            f"peak {row['peak_nbytes'] / 2**20:7.1f} MiB above resident, gradient error "
            f"{row['gradient_error']:.1e}, {row['wall_seconds']:.0f} s"
        )
    return f"{row['status']}: {row.get('message', row.get('smallest_peak_nbytes'))}"


def time_row(times: list[dict[str, float]], key: str, eager: str) -> Row:
    """Median step time, and the median of the ratios to eager's step of the same round."""
    found = ratios(times, key, eager)
    return {
        "step_seconds": median_step(times, key),
        "time_ratio": statistics.median(found),
        "time_ratio_spread": [min(found), max(found)],
        "rounds": len(found),
    }


def describe_run(args: argparse.Namespace) -> Row:
    """What a reader needs to repeat or to doubt the figures."""
    packages = ["torch", "transformers", "pulp", "highspy", "numpy"]
    return describe(
        "benchmarks.py",
        packages,
        seed=SEED,
        threads=1,
        rounds=args.rounds,
        time_limit=args.time_limit,
        timeout=args.timeout,
    )


def arguments() -> argparse.Namespace:
    """The command line."""

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=listed, default=list(MODELS))
    parser.add_argument("--compilers", type=listed, default=["eager", "inductor"])
    parser.add_argument(
        "--budgets", type=listed, help="percent of eager's peak, 'beside' or 'smallest'"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each variant")
    parser.add_argument("--time-limit", type=float, default=30.0, help="the solver's, in seconds")
    parser.add_argument("--timeout", type=float, default=900.0, help="of one point, in seconds")
    parser.add_argument("--quick", action="store_true", help="50 %% and smallest only, 3 rounds")
    parser.add_argument("--resume", action="store_true", help="keep the rows already measured")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    if args.quick:
        args.budgets, args.rounds = ["50", "smallest"], 3
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    store = Store(ROWS, partial(page, models=list(MODELS)), describe_run(args))
    if not args.page:
        for compiler in args.compilers:
            for model in args.models:
                run_model(model, compiler, store, args)
    store.write()
    draw(store.rows.values(), PICTURE)


if __name__ == "__main__":
    main()
