"""Regenerate `compatibility.md` and the rows beside it, `compatibility.json`.

    python docs/compatibility.py [--only gpt2,vit] [--compilers eager,inductor] [--resume]

Each architecture of `compatibility_zoo.py` runs in a process of its own
(`compatibility_worker.py`), one after the other, on one thread. One that crashes or passes
`--timeout` is a row that says so. Rows are stored as they come; `--resume` runs only what is
missing or failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from compatibility_page import page
from compatibility_worker import Job, row_of
from compatibility_zoo import KINDS, ZOO

HERE = Path(__file__).parent
ROWS, PAGE = HERE / "compatibility.json", HERE / "compatibility.md"
COMPILERS = ("eager", "inductor")
GRACE_SECONDS = 2.0  # for an end in good order, once the row is there

Row = dict[str, Any]


class Store:
    """The rows of all runs, by key, written to disk after each change."""

    def __init__(self, run: Row) -> None:
        stored = json.loads(ROWS.read_text()) if ROWS.exists() else {"runs": [], "rows": []}
        self.runs: list[Row] = [*stored["runs"], run]
        self.rows: dict[str, Row] = {row["key"]: row for row in stored["rows"]}

    def add(self, row: Row) -> None:
        """Add or replace a row, and write rows and page."""
        self.rows[row["key"]] = {**row, "run": len(self.runs) - 1}
        self.write()

    def write(self) -> None:
        """Write rows and page in the zoo's order, dropping runs that no row is from."""
        order = {f"{name}/{compiler}": None for compiler in COMPILERS for name in ZOO}
        rows = [self.rows[key] for key in order if key in self.rows]
        renumbered = {old: new for new, old in enumerate(sorted({row["run"] for row in rows}))}
        runs = [self.runs[old] for old in renumbered]
        rows = [{**row, "run": renumbered[row["run"]]} for row in rows]
        temporary = ROWS.with_suffix(".tmp")
        temporary.write_text(json.dumps({"runs": runs, "rows": rows}, indent=1) + "\n")
        temporary.replace(ROWS)
        PAGE.write_text(page(runs, rows, KINDS))

    def has(self, job: Job) -> bool:
        """Whether a job has a row that did not fail."""
        return self.rows.get(job.key, {}).get("status") == "ok"


def run_job(job: Job, timeout: float) -> Row:
    """A job's row from a process of its own, or one that says how it failed.

    The process is forked from a server that has imported torch and transformers and run nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compatibility_worker", "transformers.modeling_utils"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(job, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(timeout):
            return dict(receiver.recv())
        return {"status": "timeout", "message": f"no answer within {timeout:.0f} s"}
    except EOFError:
        process.join()
        return {"status": "crash", "message": f"the process ended with {process.exitcode}"}
    finally:
        process.join(GRACE_SECONDS)
        process.kill()
        process.join()


def _serve(job: Job, sender: Connection) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        sender.send({"status": "ok", **row_of(job)})
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        sender.send({"status": "crash", "message": message[:300]})


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['message']}"
    fallbacks = " | ".join(row["fallbacks"])
    return (
        f"{row['planned_graphs']}/{row['graphs']} graphs, {sum(row['breaks'].values())} breaks, "
        f"error {row['gradient_error']:.1e}, bitwise {row.get('bitwise', '-')}, "
        f"{row['predicted_nbytes']} / {row['measured_nbytes']} / {row['budget_nbytes']} B"
        f"{' at the floor' if 'asked_nbytes' in row else ''}, {row['seconds']:.1f} s {fallbacks}"
    )


def describe_run(args: argparse.Namespace) -> Row:
    """What a reader needs to repeat or to doubt the figures."""
    names = ("torch", "transformers", "highspy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python docs/compatibility.py {' '.join(sys.argv[1:])}".strip(),
        "time_limit": args.time_limit,
        "timeout": args.timeout,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names},
        },
    }


def arguments() -> argparse.Namespace:
    """The command line."""

    def listed(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=listed, default=list(ZOO), help="names, with commas")
    parser.add_argument("--compilers", type=listed, default=["eager"], help="eager,inductor")
    parser.add_argument("--time-limit", type=float, default=5.0, help="of a solve, in seconds")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a process, in seconds")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    for given, known in ((args.only, ZOO), (args.compilers, COMPILERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"Unknown name {unknown[0]!r}. There are: {', '.join(known)}.")
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    store = Store(describe_run(args))
    jobs = [
        Job(name, compiler, args.time_limit) for compiler in args.compilers for name in args.only
    ]
    for job in jobs:
        if args.page or (args.resume and store.has(job)):
            continue
        row = run_job(job, args.timeout)
        facts = {"key": job.key, "name": job.name, "compiler": job.compiler}
        store.add({**facts, "kind": ZOO[job.name].kind, **row})
        print(f"{job.key:32s} {summary(row)}", flush=True)
    store.write()


if __name__ == "__main__":
    main()
