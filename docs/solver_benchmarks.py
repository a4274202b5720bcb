"""Regenerate `solver_benchmarks.md` and the rows beside it, `solver_benchmarks.json`.

    python docs/solver_benchmarks.py [--graphs gpt2_12,unet] [--budgets 75,50,35,25,floor]
                                     [--instances DIR] [--layered] [--growth] [--leave-one-out]
                                     [--efforts] [--repeats 20] [--all] [--before CHECKOUT]
                                     [--resume]

Captures the joint graphs that the cache folder `.solver_problems/` lacks (`solver_graphs.py`, which
runs torch), then runs the solver on each, without torch: every solve in a process of its own
(`solver_benchmark_worker.py`), one after the other, on one thread. With `--instances`, or the
environment variable AUTOREMAT_INSTANCES, a folder of published graphs in node-link JSON is run as
well; `--all` asks for everything else that the page has room for. A solve that crashes or passes
`--timeout` is a row that says so. Rows are stored as they come; `--resume` runs only what is
missing. `--repeats` burns all processors for a while; let nothing else be measured meanwhile.
`--before` solves the same problems with the solver of another checkout, through its own worker: it
may watch the clock, so it has to run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import solver_layered_page as layered
from row_store import Row, Store, describe
from solver_benchmark_page import GRAPHS, INSTANCES, PUBLISHED_SHARES, TEN, page
from solver_benchmark_worker import Job, digest
from solver_experiments_page import (
    BEFORE_S,
    CONDITIONS,
    EFFORT_GRAPHS,
    EFFORT_SHARES,
    EFFORTS,
    LEFT_OUT_SHARES,
    REPEATED,
    STAGES,
    may_differ,
)

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


def jobs_of(graph: str, path: Path, store: Store, args: argparse.Namespace) -> Iterator[Job]:
    """Everything that is asked about a captured graph; the whole solver first."""
    base = Job("solve", graph, str(path), time_limit=args.time_limit)
    for share in args.budgets:
        yield replace(base, share=share)
    for share in LEFT_OUT_SHARES if args.leave_one_out and graph in TEN else ():
        whole = store.rows.get(replace(base, share=share).key)
        for stage in STAGES:
            if may_differ(stage.name, whole):
                yield replace(base, section="without", share=share, without=stage.name)
    for share in EFFORT_SHARES if args.efforts and graph in EFFORT_GRAPHS else ():
        for effort in EFFORTS:
            if effort != base.effort:
                yield replace(base, section="effort", share=share, effort=effort)


def do_before(job: Job, store: Store, args: argparse.Namespace) -> None:
    """Ask the solver of an earlier checkout for the same plan, in the time that its page gave."""
    worker = str(args.before / "docs" / "solver_benchmark_worker.py")
    ours = replace(job, section="before")
    if args.resume and has_row(store, ours):
        return
    asked = {"section": job.section, "graph": job.graph, "path": str(Path(job.path).resolve())}
    asked |= {"share": job.share, "time_limit": BEFORE_S}
    row = run([sys.executable, worker, json.dumps(asked)], args.timeout)
    store.add({"key": ours.key, "section": "before", "graph": job.graph, "share": job.share, **row})
    print(f"{ours.key:40s} {summary(row)}", flush=True)


def published_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """The published instances that the folder holds."""
    if args.instances is None:
        return
    for instance in INSTANCES:
        path = args.instances / f"{instance}.json"
        for share in PUBLISHED_SHARES if path.exists() else ():
            yield Job("published", instance, str(path), share, time_limit=args.time_limit)


def layered_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Random layered graphs, generated anew."""
    if not args.layered and not args.growth:
        return
    from layered_graphs import layered_graph

    for nodes in layered.NODES:
        for seed in range(layered.SEEDS):
            graph = f"layered_{nodes}_{seed}"
            path = PROBLEMS / f"{graph}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(layered_graph(nodes, seed).to_json())
            job = Job("layered", graph, str(path), time_limit=args.time_limit)
            for share in layered.SHARES if args.layered else ():
                yield replace(job, share=share)
            for share in layered.GROWTH_SHARES if args.growth else ():
                yield replace(job, section="growth", share=share)


def repeat(graph: str, share: float | None, store: Store, args: argparse.Namespace) -> None:
    """Solve one problem again and again, an equal share of the times in each condition."""
    job = Job("repeat", graph, str(PROBLEMS / f"{graph}.json"), share, time_limit=args.time_limit)
    count = max(2, -(-args.repeats // len(CONDITIONS)))
    for condition in CONDITIONS:
        key = {"key": f"{job.key}/{condition}", "section": "repeat", "graph": graph}
        if args.resume and has_row(store, replace(job, without=condition)):
            continue
        rows = solves_under(condition, job, count, args.timeout)
        failed = [row for row in rows if row["status"] != "ok"]
        facts = failed[0] if failed else {"status": "ok", "digest": rows[0]["digest"]}
        figures = {} if failed else {"plans": [row["plan"] for row in rows]}
        figures["cpu"] = [row.get("cpu_seconds", 0.0) for row in rows]
        store.add({**key, "share": share, "condition": condition, **facts, **figures})
        print(f"{key['key']:40s} {len(set(figures.get('plans', [])))} plans of {len(rows)} solves")


def solves_under(condition: str, job: Job, count: int, timeout: float) -> list[Row]:
    """The rows of some solves of one problem."""
    environment, before = dict(ENVIRONMENT), None
    if condition == "four threads":
        environment["OMP_NUM_THREADS"] = "4"
    if condition == "one processor":
        before = _bind
    at_once = 2 if condition == "two at once" else 1
    with ExitStack() as stack:
        if condition == "under load":
            stack.enter_context(load())
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        jobs = [job] * count
        return list(pool.map(lambda job: run_job(job, timeout, environment, before), jobs))


def _bind() -> None:
    """Leave this process one of its processors."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@contextmanager
def load() -> Iterator[None]:
    """Two processes per processor that do nothing but take it."""
    burn = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def do(job: Job, store: Store, args: argparse.Namespace) -> None:
    """Run a job and store its row."""
    if args.resume and has_row(store, job):
        return
    row = run_job(job, args.timeout)
    facts = {"key": job.key, "section": job.section, "graph": job.graph}
    facts |= {"share": job.share, "without": job.without, "effort": job.effort}
    store.add({**facts, **row})
    print(f"{job.key:40s} {summary(row)}", flush=True)


def run_job(
    job: Job,
    timeout: float,
    environment: dict[str, str] = ENVIRONMENT,
    before: Callable[[], None] | None = None,
) -> Row:
    """A job's row from a process of its own; `before` is called in it first."""
    worker = str(HERE / "solver_benchmark_worker.py")
    return run([sys.executable, worker, json.dumps(asdict(job))], timeout, environment, before)


def run(
    command: list[str],
    timeout: float,
    environment: dict[str, str] = ENVIRONMENT,
    before: Callable[[], None] | None = None,
) -> Row:
    """The row that a process printed last (a library may greet, too), or how it failed."""
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            preexec_fn=before,
        )
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "message": f"no answer within {timeout:.0f} s"}
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        why = next((line for line in reversed(lines) if line and not line[0].isspace()), "")
        return {"status": "crash", "message": f"exit code {ended.returncode}: {why[:300]}"}
    rows = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return {"status": "ok", **(json.loads(rows[-1]) if rows else {})}


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row.get('message', 'no plan fits')}"
    if "improvements" in row:
        return f"{row['improvements']} improvements, the first after {row['first']} operations"
    extra = 100 * (row["time_us"] / row["baseline_us"] - 1)
    gap = f", gap {100 * row['gap']:.2f} %" if "gap" in row else ""
    return f"extra {extra:.2f} %{gap}, {row['cpu_seconds']:.1f} s {row.get('outcome', '')}"


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
    parser.add_argument(
        "--time-limit", type=float, default=1000.0, help="of a solve: it should cut nothing off"
    )
    parser.add_argument("--timeout", type=float, default=1000.0, help="of a process, in seconds")
    parser.add_argument("--layered", action="store_true", help="run random layered graphs")
    parser.add_argument("--growth", action="store_true", help="count how annealing improves them")
    parser.add_argument("--leave-one-out", action="store_true", help="run without each stage")
    parser.add_argument("--efforts", action="store_true", help="run with less and more effort")
    parser.add_argument("--repeats", type=int, default=0, help="solve five problems so many times")
    parser.add_argument(
        "--before", type=Path, help="a checkout of an earlier commit, whose solver is run as well"
    )
    parser.add_argument("--all", action="store_true", help="all of these, with 20 repeats")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    unknown = [graph for graph in args.graphs if graph not in GRAPHS]
    if unknown:
        parser.error(f"Unknown graph {unknown[0]!r}. There are: {', '.join(GRAPHS)}.")
    if args.all:
        args.layered = args.growth = args.leave_one_out = args.efforts = True
        args.repeats = args.repeats or 20
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    store = Store(ROWS, page, describe_run(args))
    if not args.page:
        for graph in args.graphs:
            path = capture(graph, store, args)
            for job in jobs_of(graph, path, store, args) if path is not None else ():
                do(job, store, args)
                if args.before and job.section == "solve" and graph in TEN:
                    do_before(job, store, args)
        for job in (*published_jobs(args), *layered_jobs(args)):
            do(job, store, args)
            if args.before and job.section == "published":
                do_before(job, store, args)
        for graph, share in REPEATED if args.repeats else ():
            if graph in args.graphs:
                repeat(graph, share, store, args)
    store.write()


if __name__ == "__main__":
    main()
