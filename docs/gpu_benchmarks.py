"""Make `gpu_benchmarks.md` and the rows beside it, `gpu_benchmarks.json`, on the GPU at hand.

    python docs/gpu_benchmarks.py [--models llama_1b,vit_l] [--most 64] [--resume]
    python docs/gpu_benchmarks.py --tiny --out FOLDER/page.md  # is the script sound? on a CPU

For each model and batch (1, 2, 4 and so on, until no variant fits any more): eager mode,
checkpoints around every layer, `torch.compile`, torch's own `activation_memory_budget`, and
autoremat at shares of what eager's step needs and at 90 % of the device. Each variant runs in a
process of its own, one after the other. Rows are stored as batches come; `--resume` measures only
those that are missing.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

import torch
from gpu_benchmark_models import BATCH, DEVICE, TINY, TINY_TOKENS, UNITS
from page_tables import table, versions
from row_store import Row, Store, describe

from autoremat.comparison.model import OK
from autoremat.comparison.race import compare
from autoremat.cost.machine import device_title
from autoremat.graph.devices import device_nbytes

HERE = Path(__file__).parent
PAGE = HERE / "gpu_benchmarks.md"
MODELS = HERE / "gpu_benchmark_models.py"
VARIANTS = ("every-layer", "compile", "torch:0.5", "torch:0.1")
SHARES = ("75%", "50%", "25%")  # of what eager's step needs above its resident bytes
USED = 0.9  # of the device's memory: what is left is for libraries and fragments
WHOLE = "autoremat, all of the device"
GIB = 2**30

INTRODUCTION = """# On a GPU

Forward and backward of models with random weights in bfloat16; no optimizer. Peaks are
`max_memory_allocated`, resident bytes included and libraries' workspaces not; reserved is
`max_memory_reserved`. Batches double until nothing fits: the largest is the largest of these.
"""


def key_of(model: str, batch: int, variant: str) -> str:
    """Of a row."""
    return f"{model}, batch {batch}, {variant}"


def measured(model: str, batch: int, args: argparse.Namespace) -> list[Row]:
    """A row for each variant of a model at a batch."""
    os.environ |= {BATCH: str(batch), DEVICE: args.device, TINY: str(int(args.tiny))}
    whole = int(USED * device_nbytes(torch.device(args.device)))
    comparison = compare(
        f"{MODELS}:{model}",
        budgets=[*args.shares, whole],
        variants=args.variants,
        compiler=args.compiler,
        rounds=args.rounds,
        time_limit=args.time_limit,
        timeout=args.timeout,
        alone=True,
    )
    units = TINY_TOKENS if args.tiny and UNITS[model] > 1 else UNITS[model]
    rows = []
    for row in comparison.rows:
        variant = WHOLE if row is comparison.rows[-1] else row.name
        per_second = row.samples_per_second and units * row.samples_per_second
        where = {"key": key_of(model, batch, variant), "model": model, "batch": batch}
        rows.append({**asdict(row), **where, "variant": variant, "units_per_second": per_second})
    return rows


def run_model(model: str, store: Store, args: argparse.Namespace) -> None:
    """All batches of a model, until nothing fits."""
    batch = 1
    while batch <= args.most:
        known = [
            row for row in store.rows.values() if (row["model"], row["batch"]) == (model, batch)
        ]
        if not (args.resume and known):
            known = measured(model, batch, args)
            for row in known:
                store.add(row)
                print(f"{row['key']:50s} {row['status']}", flush=True)
        if not any(row["status"] == OK for row in known):
            return
        batch *= 2


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    parts = [INTRODUCTION]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        parts += [f"## {model}\n", "### Largest batch\n", table(LARGEST, largest(own))]
        for batch in dict.fromkeys(row["batch"] for row in own):
            parts.append(f"### Batch {batch}\n")
            parts.append(table(COLUMNS, [row for row in own if row["batch"] == batch]))
    parts += [
        f"Run {n + 1}: `{run['command']}`, {run['date']}, {run['device']}, {versions(run)}.\n"
        for n, run in enumerate(runs)
    ]
    return "\n".join(parts)


def largest(rows: list[Row]) -> list[Row]:
    """By variant, its row with the largest batch that ran, and its fastest one's throughput."""
    found = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        ran = [r for r in rows if r["variant"] == variant and r["status"] == OK]
        if ran:
            rates = [r["units_per_second"] for r in ran if r["units_per_second"]]
            last = max(ran, key=lambda row: row["batch"])
            found.append({**last, "best": max(rates, default=None)})
    return found


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f}"


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


COLUMNS = {
    "variant": lambda row: row["variant"],
    "budget GiB": lambda row: _gib(row["budget_nbytes"]),
    "predicted GiB": lambda row: _gib(row["predicted_peak_nbytes"]),
    "peak GiB": lambda row: _gib(row["peak_nbytes"]),
    "reserved GiB": lambda row: _gib(row["reserved_nbytes"]),
    "step ms": lambda row: _number(row["step_seconds"] and 1e3 * row["step_seconds"], 1),
    "tokens or images per s": lambda row: _number(row["units_per_second"]),
    "times eager's": lambda row: _number(row["time_ratio"], 2),
    "": lambda row: "" if row["status"] == OK else f"{row['status']}: {row['message'][:100]}",
    "run": lambda row: str(row["run"] + 1),
}
LARGEST = {
    "variant": COLUMNS["variant"],
    "batch": lambda row: str(row["batch"]),
    "peak GiB": COLUMNS["peak GiB"],
    "reserved GiB": COLUMNS["reserved GiB"],
    "tokens or images per s": COLUMNS["tokens or images per s"],
    "the most at any batch": lambda row: _number(row["best"]),
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--tiny` takes what a CPU does in a minute."""

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=listed, default=list(UNITS))
    parser.add_argument("--most", type=int, default=1024, help="the largest batch to try")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each variant")
    parser.add_argument("--time-limit", type=float, default=30.0, help="of a plan, in seconds")
    parser.add_argument("--timeout", type=float, default=1800.0, help="of a variant, in seconds")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page; its rows lie beside it")
    parser.add_argument("--resume", action="store_true", help="keep the batches that are there")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the rows")
    parser.add_argument("--tiny", action="store_true", help="tiny models, two variants, on the CPU")
    args = parser.parse_args(words)
    unknown = [name for name in args.models if name not in UNITS]
    if unknown:
        parser.error(f"Unknown model {unknown[0]!r}. There are: {', '.join(UNITS)}.")
    args.device, args.compiler = "cuda", "inductor"
    args.variants, args.shares = VARIANTS, SHARES
    if args.tiny:
        args.device, args.compiler = "cpu", "eager"
        args.variants, args.shares, args.rounds = ("every-layer",), (), 2
    elif not (args.page or torch.cuda.is_available()):
        parser.error("There is no GPU here. --tiny tries the script on a CPU.")
    return args


def main(words: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = arguments(words)
    device = "" if args.page else device_title(torch.device(args.device))
    run = describe("gpu_benchmarks.py", ("torch", "transformers"), device=device)
    store = Store(args.out.with_suffix(".json"), page, run)
    for model in [] if args.page else args.models:
        run_model(model, store, args)
    store.write()


if __name__ == "__main__":
    main()
