"""Regenerate `first_steps.md` and the rows beside it, `first_steps.json`.

    python docs/first_steps.py [--only MODEL;...] [--ways 60,min] [--resume]

What the first training step takes: with `torch.compile`, and with a plan. Cold means that no cache
has anything; warm, that another process has taken the same step before. Each step is taken in a
process of its own, one after the other, on one thread, with one compiler at a time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

from first_steps_worker import PLAIN, Point, row_of
from own_process import in_own_process
from page_arguments import parsed, parser_of
from page_tables import table, verdicts, versions
from row_store import Row, Store, describe

PAGE = Path(__file__).parent / "first_steps.md"
USUAL = ["gpt2_8k", "llama_8k", "vit", "bert", "t5", "resnet50"]
WAYS = ["60", "min"]
PRELOADED = ["first_steps_worker", "autoremat.api", "autoremat._torch.compiling"]
TEMPERATURES = ["cold", "warm"]

INTRODUCTION = """# The first step

What the first training step takes: Dynamo, planning, Inductor, the C++ compiler, and the step.
**Cold**: no cache has anything, neither Inductor's nor ours. **Warm**: another process has taken
the same step before. Seconds are those of the processor, compilers that are called included; each
step is taken in a process of its own, on one thread. Budgets are shares of the peak without a plan
above what is resident; `min` asks for the smallest peak that can be found, which reads the code of
half a dozen lean plans.
"""


def key_of(model: str, way: str, temperature: str) -> str:
    """Of a row."""
    return f"{model}, {way if not way.isdecimal() else way + ' %'}, {temperature}"


def times_plain(row: Row, rows: dict[str, Row]) -> float | None:
    """Over `torch.compile`'s, as cold or as warm."""
    plain = rows.get(key_of(row["model"], PLAIN, row["temperature"]), {})
    if row["way"] == PLAIN or not {"processor_seconds"} <= plain.keys() & row.keys():
        return None
    return float(row["processor_seconds"] / plain["processor_seconds"])


def page(runs: list[Row], rows: list[Row]) -> str:
    """The page."""
    by_key = {row["key"]: row for row in rows}
    found = {row["key"]: ratio for row in rows if (ratio := times_plain(row, by_key)) is not None}

    def ratios(temperature: str, *, least: bool) -> dict[str, float]:
        return {
            key: ratio
            for key, ratio in found.items()
            if by_key[key]["temperature"] == temperature and (by_key[key]["way"] == "min") is least
        }

    promises = [
        ("no point crashed or timed out", [(r["key"], r["status"] == "ok") for r in rows]),
        *(
            (
                f"{temperature}, {what}: at most {most:g} times torch.compile's",
                [(key, ratio <= most) for key, ratio in ratios(temperature, least=least).items()],
            )
            for temperature, what, least, most in [
                ("cold", "with a budget", False, 2.5),
                ("cold", "the smallest peak", True, 2.5),
                ("warm", "with a budget", False, 1.2),
                ("warm", "the smallest peak", True, 1.2),
            ]
        ),
    ]
    medians = [
        f"{temperature}, {'min' if least else 'with a budget'}: {statistics.median(some):.2f}"
        for temperature in TEMPERATURES
        for least in (False, True)
        if (some := list(ratios(temperature, least=least).values()))
    ]
    parts = [
        INTRODUCTION,
        verdicts(promises),
        f"\nTimes `torch.compile`'s, in the median. {'; '.join(medians)}.\n" if medians else "",
        table(_columns(by_key), rows),
        *(
            f"\nRun {n + 1}: `{run['command']}`, {run['date']}, {run['cpu']}, {versions(run)}.\n"
            for n, run in enumerate(runs)
        ),
    ]
    return "\n".join(parts)


def _columns(rows: dict[str, Row]) -> dict[str, object]:
    def ratio(row: Row) -> str:
        found = times_plain(row, rows)
        return "" if found is None else f"{found:.2f}"

    return {
        "step": lambda row: row["key"],
        "processor s": lambda row: f"{row.get('processor_seconds', 0):.1f}",
        "seconds": lambda row: f"{row.get('seconds', 0):.1f}",
        "times torch.compile's": ratio,
        "": lambda row: "" if row["status"] == "ok" else f"{row['status']}: {row['message']}",
        "run": lambda row: str(row["run"] + 1),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = parser_of(__doc__, USUAL, PAGE)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS)
    args = parsed(parser)
    run = describe("first_steps.py", ("torch", "highspy", "transformers"))
    store = Store(args.out.with_suffix(".json"), page, run)
    for model in [] if args.page else args.only:
        ways = [PLAIN, *args.ways]
        keys = [key_of(model, way, temperature) for way in ways for temperature in TEMPERATURES]
        if args.resume and all(store.rows.get(key, {}).get("status") == "ok" for key in keys):
            continue
        _measure(model, ways, store, args.timeout)
    store.write()


def _measure(model: str, ways: list[str], store: Store, timeout: float) -> None:
    """All rows of a model."""
    with tempfile.TemporaryDirectory() as caches:
        asked = Point(model, "", 0, caches)
        found = in_own_process(row_of, asked, timeout, PRELOADED)
    if found["status"] != "ok":
        raise SystemExit(f"The peak of {model} without a plan: {found['message']}")
    unplanned = found["unplanned_nbytes"]
    for way in ways:
        with tempfile.TemporaryDirectory() as caches:
            for temperature in TEMPERATURES:
                point = Point(model, way, unplanned, caches)
                row = in_own_process(row_of, point, timeout, PRELOADED)
                key = key_of(model, way, temperature)
                where = {"model": model, "way": way, "temperature": temperature}
                store.add({"key": key, **where, **row})
                print(key, row, flush=True)


if __name__ == "__main__":
    main()
