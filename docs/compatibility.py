"""Regenerate `compatibility.md` and the rows beside it, `compatibility.json`.

    python docs/compatibility.py [--only gpt2,vit] [--compilers eager,inductor] [--resume]

Each architecture of `compatibility_zoo.py` runs in a process of its own
(`compatibility_worker.py`), one after the other, on one thread. One that crashes or passes
`--timeout` is a row that says so. Rows are stored as they come; `--resume` runs only what is
missing or failed.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from compatibility_page import page
from compatibility_worker import Job, row_of
from compatibility_zoo import KINDS, UPSTREAM, ZOO
from own_process import in_own_process
from row_store import Row, Store, describe

HERE = Path(__file__).parent
ROWS = HERE / "compatibility.json"
COMPILERS = ("eager", "inductor")
PRELOADED = ["compatibility_worker", "transformers.modeling_utils"]


def has_row(store: Store, job: Job) -> bool:
    """Whether a job has a row that did not fail."""
    return store.rows.get(job.key, {}).get("status") == "ok"


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
    packages = ("torch", "transformers", "highspy")
    return describe("compatibility.py", packages, time_limit=args.time_limit, timeout=args.timeout)


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
    order = (f"{name}/{compiler}" for compiler in COMPILERS for name in ZOO)
    store = Store(
        ROWS,
        partial(page, kinds=KINDS, names=list(ZOO), upstream=UPSTREAM),
        describe_run(args),
        order=order,
    )
    jobs = [
        Job(name, compiler, args.time_limit) for compiler in args.compilers for name in args.only
    ]
    for job in jobs:
        if args.page or (args.resume and has_row(store, job)):
            continue
        row = in_own_process(row_of, job, args.timeout, PRELOADED)
        facts = {"key": job.key, "name": job.name, "compiler": job.compiler}
        store.add({**facts, "kind": ZOO[job.name].kind, **row})
        print(f"{job.key:32s} {summary(row)}", flush=True)
    store.write()


if __name__ == "__main__":
    main()
