"""Regenerate `distributed.md` and the rows beside it, `distributed.json`.

    python docs/distributed.py [--quick] [--resume] [--only WAY;...] [--models NAME;...]
    python docs/distributed.py --compiles | --whole [--resume]

Each model, way and number of processes is a group of processes of its own (gloo, on the CPU), one
group after the other, each process on one thread. One that fails or passes `--timeout` between two
rows is a row that says so. Rows are stored as they come; `--resume` runs only what is missing. With
`--compiles` or `--whole` only those rows of one process are run: against the number of layers, or
of blocks beside the whole model; without any choice, everything.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import distributed_compiles
import distributed_whole
from distributed_models import MODELS, WAYS
from distributed_page import page
from distributed_worker import CHECKPOINTS, SMALLEST, TORCH, Case, serve
from row_store import Row, Store, describe

PAGE = Path(__file__).parent / "distributed.md"
SETTINGS = (75, 50, 35, SMALLEST, CHECKPOINTS, TORCH)
PRELOADED = [
    "distributed_worker",
    "distributed_compiles",
    "distributed_whole",
    "autoremat.api",
    "autoremat._torch.compiling",
]
GRACE_SECONDS = 5.0


def cases(args: argparse.Namespace) -> list[Case]:
    """Every model in every way, the fewest processes first."""
    found = [
        Case(model, way, world, args.settings, args.compiler, args.time_limit)
        for model in args.models
        for way in args.only
        for world in ([1] if way == "blocks" else args.worlds)
    ]
    return sorted(found, key=lambda case: case.world)


def run_case(case: Case, timeout: float) -> Iterator[Row]:
    """The rows of a group, and one that says how it failed if it did.

    Its processes are forked from a server that has imported torch and run nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (case, str(Path(folder) / "store"), sender)
        processes = [
            context.Process(target=_serve, args=(rank, *arguments)) for rank in range(case.world)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            yield from _received(case, receiver, timeout)
        finally:
            for process in processes:
                process.join(GRACE_SECONDS)
                process.kill()
                process.join()


def run_compiles(args: argparse.Namespace, store: Store) -> Iterator[Row]:
    """The rows against the number of layers, each of a process of its own."""
    for layers in distributed_compiles.LAYERS:
        for budget in distributed_compiles.BUDGETS:
            facts = {"key": distributed_compiles.key(layers, budget), "layers": layers}
            facts["shared"] = budget
            yield from run_alone(distributed_compiles.serve, (layers, budget), facts, args, store)


def run_whole(args: argparse.Namespace, store: Store) -> Iterator[Row]:
    """The rows of blocks beside the whole model, each of a process of its own."""
    for model in args.models:
        for share in distributed_whole.SHARES:
            facts = {"key": distributed_whole.key(model, share), "whole": model, "share": share}
            yield from run_alone(distributed_whole.serve, (model, share), facts, args, store)


def run_alone(
    target: Callable[..., None],
    case: tuple[Any, ...],
    facts: Row,
    args: argparse.Namespace,
    store: Store,
) -> Iterator[Row]:
    """The row that a process of its own sends, if it is to be made."""
    if args.resume and store.rows.get(facts["key"], {}).get("status") == "ok":
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    given = {"compiler": args.compiler, "time_limit": args.time_limit}
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*case, given, sender))
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(args.timeout) else {"status": "timeout"}
    except EOFError:
        found = {"status": "failed"}
    process.kill()
    process.join()
    yield {**facts, **found}


def _received(case: Case, receiver: Connection, timeout: float) -> Iterator[Row]:
    while receiver.poll(timeout):
        try:
            row = dict(receiver.recv())
        except EOFError:
            return
        yield row
        if row["status"] == "crash":
            return
    yield {
        "key": case.key("failed"),
        "status": "timeout",
        "message": f"no row within {timeout:.0f} s",
    }


def _serve(rank: int, case: Case, store: str, sender: Connection) -> None:
    try:
        serve(case, rank, store, sender.send)
    except Exception as error:
        traceback.print_exc()
        message = f"rank {rank}: {type(error).__name__}: {error}".strip().splitlines()[0]
        sender.send({"key": case.key("failed"), "status": "crash", "message": message[:300]})


def missing(case: Case, store: Store) -> Case:
    """The case with what is not there yet."""
    status = {n: store.rows.get(case.key(n), {}).get("status") for n in case.settings}
    done = [n for n in case.settings if status[n] in ("ok", "no peer")]
    return replace(case, settings=tuple(n for n in case.settings if n not in done))


def summary(row: Row) -> str:
    """One line for the terminal."""
    if "whole" in row and row["status"] == "ok":
        points = distributed_whole.points(row)
        return f"{points:+.2f} points, {row['time_ratio']:.2f} of the whole model's time"
    if row["status"] == "ok" and "compiles" in row:
        seconds = ", ".join(f"{one:.1f}" for one in row["first_steps_seconds"])
        return f"{row['compiles']} compiles, {seconds} s, {row['peak_share']:.3f} of the budget"
    if row["status"] != "ok":
        why = row.get("message") or row.get("why") or row.get("smallest_peak_nbytes")
        return f"{row['status']}: {why}"
    if "measured_nbytes" not in row:
        return f"{row['eager_peak_nbytes']} B, with checkpoints {row['checkpointed_peak_nbytes']} B"
    measured = row["measured_nbytes"]
    predicted = row.get("predicted_nbytes")
    return (
        f"{measured / row['budget_nbytes']:.3f} of {row['budget_nbytes']} B, predicted "
        f"{'-' if predicted is None else f'{predicted / measured:.3f}'} of measured, gradient "
        f"{row['gradient_error']:.0e}, {row['time_ratio']:.2f} of the peer's time, first steps "
        f"{row['first_steps_seconds']:.0f} s, one plan: {row.get('has_one_plan')}, "
        f"told {len(row['told'])}"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small model, two processes")
    parser.add_argument("--compiles", action="store_true", help="against the number of layers")
    parser.add_argument("--whole", action="store_true", help="blocks beside the whole model")
    parser.add_argument("--models", type=lambda text: text.split(";"), help="names, by semicolon")
    parser.add_argument("--only", type=lambda text: text.split(";"), help="ways, by semicolon")
    parser.add_argument("--worlds", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--settings", type=lambda text: tuple(int(n) for n in text.split(",")))
    parser.add_argument("--compiler", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page; its rows lie beside it")
    parser.add_argument("--time-limit", type=float, default=30.0, help="of a solve, in seconds")
    parser.add_argument("--timeout", type=float, default=900.0, help="of a row, in seconds")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    args = parser.parse_args()
    full = [name for name in MODELS if name != "gpt, 2 layers"]
    chosen = ("quick", "page", "only", "models", "worlds", "settings")
    parts = ("compiles", "whole")
    args.groups = not (args.page or args.compiles or args.whole)
    if not any(getattr(args, name) for name in (*chosen, *parts)):
        args.compiles = args.whole = True
    args.models = args.models or (["gpt, 8 layers"] if args.quick else full)
    args.only = args.only or list(WAYS)
    args.worlds = args.worlds or ([2] if args.quick else [2, 4])
    args.settings = args.settings or ((50, 0) if args.quick else SETTINGS)
    return args


def main() -> None:
    """Run what the command line asks for."""
    args = arguments()
    settings = {name: getattr(args, name) for name in ("compiler", "time_limit", "timeout")}
    store = Store(
        args.out.with_suffix(".json"), page, describe("distributed.py", ("torch",), **settings)
    )
    compiles = run_compiles(args, store) if args.compiles else ()
    whole = run_whole(args, store) if args.whole else ()
    for row in itertools.chain(compiles, whole):
        store.add(row)
        print(f"{row['key']:32s} {summary(row)}", flush=True)
    for case in cases(args) if args.groups else []:
        case = missing(case, store) if args.resume else case
        store.rows.pop(case.key("failed"), None)
        for row in run_case(case, args.timeout) if case.settings else ():
            facts = {"group": case.group, **asdict(case)}
            del facts["settings"], facts["rounds"]
            store.add({**facts, **row})
            print(f"{row['key']:32s} {summary(row)}", flush=True)
    store.write()


if __name__ == "__main__":
    main()
