"""Regenerate `solver_benchmarks.md` and the rows beside it, `solver_benchmarks.json`.

    python docs/solver_benchmarks.py [--graphs gpt2_12,unet] [--budgets 75,50,35,25,floor]
                                     [--instances DIR] [--time-limit 10] [--ablation] [--resume]

Captures the joint graphs that the cache folder `.solver_problems/` lacks (`solver_graphs.py`, which
runs torch), then runs the solver on each, without torch: every solve in a process of its own
(`solver_benchmark_worker.py`), one after the other, on one thread. With `--instances`, or the
environment variable AUTOREMAT_INSTANCES, a folder of published graphs in node-link JSON is run as
well, and with `--ablation` every strategy alone. A solve that crashes or passes `--timeout` is a
row that says so. Rows are stored as they come; `--resume` runs only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from row_store import Row, Store, describe
from solver_benchmark_page import BOUND, GRAPHS, INSTANCES, STRATEGIES, page
from solver_benchmark_worker import Job, digest

HERE = Path(__file__).parent
ROWS = HERE / "solver_benchmarks.json"
PROBLEMS = HERE / ".solver_problems"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DONE = ("ok", "none")


def has_row(store: Store, job: Job) -> bool:
    """Whether a job's row is there, from the problem as its file is now."""
    row = store.rows.get(job.key)
    if row is None or row["status"] not in DONE:
        return False
    return bool(row["digest"] == digest(Path(job.path).read_text()))


def capture(graph: str, store: Store, args: argparse.Namespace) -> Path | None:
    """The file of a graph's problem, captured now if it is not there; None if that failed."""
    path = PROBLEMS / f"{graph}.json"
    key = {"key": f"size/{graph}", "section": "size", "graph": graph}
    if not path.exists():
        command = [sys.executable, str(HERE / "solver_graphs.py"), graph, str(PROBLEMS)]
        captured = run(command, args.timeout)
        if captured["status"] != "ok":
            store.add({**key, **captured})
            return None
    facts = json.loads(path.with_suffix(".facts.json").read_text())
    store.add({**key, **facts, **run_job(Job("size", graph, str(path)), args.timeout)})
    return path


def jobs_of(graph: str, path: Path, args: argparse.Namespace) -> Iterator[Job]:
    """Everything that is asked about a captured graph."""
    for share in args.budgets:
        yield Job("solve", graph, str(path), share, time_limit=args.time_limit)
    for share in args.ablation_budgets if args.ablation else []:
        for strategy in (BOUND, *STRATEGIES):
            yield Job("ablation", graph, str(path), share, strategy, args.time_limit)


def published_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """The published instances that the folder holds."""
    if args.instances is None:
        return
    for instance in INSTANCES:
        path = args.instances / f"{instance}.json"
        for share in (90.0, 80.0, 70.0) if path.exists() else ():
            yield Job("published", instance, str(path), share, time_limit=args.time_limit)


def do(job: Job, store: Store, args: argparse.Namespace) -> None:
    """Run a job and store its row."""
    if args.resume and has_row(store, job):
        return
    row = run_job(job, args.timeout)
    facts = {"key": job.key, "section": job.section, "graph": job.graph}
    facts |= {"share": job.share, "strategy": job.strategy}
    store.add({**facts, **row})
    print(f"{job.key:40s} {summary(row)}", flush=True)


def run_job(job: Job, timeout: float) -> Row:
    """A job's row from a process of its own."""
    worker = str(HERE / "solver_benchmark_worker.py")
    return run([sys.executable, worker, json.dumps(asdict(job))], timeout)


def run(command: list[str], timeout: float) -> Row:
    """The row that a process printed in its last line, or one that says how it failed."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "message": f"no answer within {timeout:.0f} s"}
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        why = next((line for line in reversed(lines) if line and not line[0].isspace()), "")
        return {"status": "crash", "message": f"exit code {ended.returncode}: {why[:300]}"}
    lines = ended.stdout.strip().splitlines()
    return {"status": "ok", **(json.loads(lines[-1]) if lines else {})}


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row.get('message', 'no plan fits')}"
    extra = 100 * (row["time_us"] / row["baseline_us"] - 1)
    gap = f", gap {100 * row['gap']:.2f} %" if "gap" in row else ""
    return f"extra {extra:.2f} %{gap}, {row['seconds']:.1f} s {row.get('outcome', '')}"


def describe_run(args: argparse.Namespace) -> Row:
    """What a reader needs to repeat or to doubt the figures."""
    return describe(
        "solver_benchmarks.py",
        ("highspy", "pulp", "numpy"),
        threads=1,
        time_limit=args.time_limit,
        timeout=args.timeout,
    )


def arguments() -> argparse.Namespace:
    """The command line."""

    def listed(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def shares(text: str) -> list[float | None]:
        return [None if word == "floor" else float(word) for word in listed(text)]

    folder = os.environ.get("AUTOREMAT_INSTANCES")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=listed, default=GRAPHS, help="'' for none")
    parser.add_argument(
        "--budgets",
        type=shares,
        default=shares("75,50,35,25,floor"),
        help="percent of the baseline's peak above what is resident, or 'floor'; '' for none",
    )
    parser.add_argument("--instances", type=Path, default=Path(folder) if folder else None)
    parser.add_argument("--time-limit", type=float, default=10.0, help="of a solve, in seconds")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a process, in seconds")
    parser.add_argument("--ablation", action="store_true", help="run every strategy alone as well")
    parser.add_argument("--ablation-budgets", type=shares, default=shares("50,25"))
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    unknown = [graph for graph in args.graphs if graph not in GRAPHS]
    if unknown:
        parser.error(f"Unknown graph {unknown[0]!r}. There are: {', '.join(GRAPHS)}.")
    if None in args.ablation_budgets:
        parser.error("--ablation-budgets takes percent only: no strategy alone searches the floor.")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    store = Store(ROWS, page, describe_run(args))
    if not args.page:
        for graph in args.graphs:
            path = capture(graph, store, args)
            for job in jobs_of(graph, path, args) if path is not None else ():
                do(job, store, args)
        for job in published_jobs(args):
            do(job, store, args)
    store.write()


if __name__ == "__main__":
    main()
