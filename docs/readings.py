"""Regenerate `readings.md` and the rows beside it, `readings.json`.

    python docs/readings.py [--only MODEL;...] [--percent 60,45,30,0] [--resume]

How well the problem foretells what Inductor's generated code takes, before any of it is read. Each
point runs in a process of its own, one after the other, on one thread; run it alone, since searches
end by a time limit.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from own_process import in_own_process
from page_arguments import parsed, parser_of
from page_tables import mib, percent, table, versions
from readings_worker import Point, row_of
from row_store import Row, Store, describe

PAGE = Path(__file__).parent / "readings.md"
USUAL = ["llama_8k", "gpt2_8k", "t5", "vit", "resnet50", "unet", "bert"]
PRELOADED = ["readings_worker", "autoremat.api", "autoremat._torch.compiling"]

PERCENT = [60, 45, 30, 0]

INTRODUCTION = """# What is modelled, and what Inductor's code takes

Under Inductor a plan is searched for on a problem of operations, and what counts is read from the
code that Inductor generates for it ([how it works](how_it_works.md)). Every plan that was read on
the way to a budget is here, with the peak that the problem had foretold. All bytes are above what
is resident (weights, gradients, optimizer state, batch). Nothing was run for this page.
"""


def error(reading: Row) -> float:
    """By how much more was read than modelled, in percent of what was read."""
    return float(100 * (reading["read"] - reading["modelled"]) / reading["read"])


def point_keys(model: str, percents: list[int]) -> list[str]:
    """Of the rows of a model."""
    return [Point(model, percent, 0.0).key for percent in percents]


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    done = [row for row in rows if row["status"] == "ok"]
    errors = [abs(error(reading)) for row in done for reading in row["readings"]]
    counts = [len(row["readings"]) for row in done if "peak" in row]
    parts = [INTRODUCTION]
    if errors and counts:
        parts.append(
            f"{len(errors)} readings: half of them within {percent(statistics.median(errors))}, "
            f"{sum(found <= 3 for found in errors)} within 3 %, the worst off by "
            f"{percent(max(errors), 1)}. Plans that fit were found with "
            f"{statistics.median(counts):g} readings in the median.\n"
        )
    parts.append(table(COLUMNS, rows))
    keys = {row["key"] for row in rows}
    missing = [name for name in USUAL if not keys.issuperset(point_keys(name, PERCENT))]
    if missing:
        parts.append(f"\nNot all of it was run of {', '.join(missing)}.\n")
    parts += [
        f"\nRun {n + 1}: `{run['command']}`, {run['date']}, {run['cpu']}, {versions(run)}.\n"
        for n, run in enumerate(runs)
    ]
    return "\n".join(parts)


COLUMNS = {
    "model, budget": lambda row: row["key"],
    "budget MiB": lambda row: (
        mib(row["unplanned"] * row["percent"] / 100) if row.get("unplanned") else ""
    ),
    "peak MiB": lambda row: (
        f"none below {mib(row['refused_at'])}" if "refused_at" in row else mib(row.get("peak"))
    ),
    "times unplanned": lambda row: f"{row['time']:.3f}" if "time" in row else "",
    "processor s": lambda row: f"{row.get('processor_seconds', 0):.0f}",
    "read above modelled": lambda row: ", ".join(
        f"{r['method']} {percent(error(r), 1)}" for r in row.get("readings", ())
    ),
    "": lambda row: "" if row["status"] == "ok" else f"{row['status']}: {row['message']}",
    "run": lambda row: str(row["run"] + 1),
}


def main() -> None:
    """Run what the command line asks for."""
    parser = parser_of(__doc__, USUAL, PAGE)
    parser.add_argument(
        "--percent", type=lambda text: [int(n) for n in text.split(",")], default=PERCENT
    )
    parser.add_argument("--time-limit", type=float, default=30.0, help="of a search, in seconds")
    args = parsed(parser)
    run = describe("readings.py", ("torch", "highspy", "transformers"), time_limit=args.time_limit)
    store = Store(args.out.with_suffix(".json"), page, run)
    points = [Point(model, n, args.time_limit) for model in args.only for n in args.percent]
    for point in points:
        if args.page or (args.resume and store.rows.get(point.key, {}).get("status") == "ok"):
            continue
        row = in_own_process(row_of, point, args.timeout, PRELOADED)
        store.add({"key": point.key, "percent": point.percent, **row})
        print(point.key, {k: v for k, v in row.items() if k != "readings"}, flush=True)
    store.write()


if __name__ == "__main__":
    main()
