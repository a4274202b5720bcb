"""Runs that are described and planned without a GPU: what planning takes, and what it finds.

    python docs/offline_runs.py                  # all rows: as long as seven plans
    python docs/offline_runs.py --only Gemma-2B  # one
    python docs/offline_runs.py --code           # from generated code, as `autoremat plan` does

Enters: the configurations in `examples/`. Leaves: a table in Markdown on standard output, one row
as soon as it is there, as `docs/gpu_without_gpu.md` has it. Each row is one `autoremat plan` in a
process of its own, with nothing found before; processor seconds and memory are what the system
counts for it and its children.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autoremat.units import format_nbytes

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_TOKENS = ("--batch", "1", "--seq", "4096")


@dataclass(frozen=True)
class Run:
    """One row.

    Attributes:
        name: of the model.
        config: in `examples/`.
        arguments: of `autoremat plan`.
    """

    name: str
    config: str
    arguments: tuple[str, ...]


RUNS = (
    Run(
        "Llama-7B",
        "llama_7b.json",
        ("--batch", "4", "--seq", "2048", "--precision", "bf16", "--optimizer", "AdamW-fused"),
    ),
    Run(
        "Qwen2-7B",
        "qwen2_7b.json",
        (
            *(*_TOKENS, "--precision", "bf16", "--optimizer", "AdamW8bit"),
            *("--accumulate", "8", "--loss-chunks", "8"),
        ),
    ),
    Run(
        "Gemma-2B",
        "gemma_2b.json",
        (*_TOKENS, "--precision", "autocast", "--optimizer", "AdamW"),
    ),
    Run(
        "Mixtral-8x7B",
        "mixtral_8x7b.json",
        (*_TOKENS, "--precision", "bf16", "--lora", "q_proj,v_proj", "--optimizer", "AdamW"),
    ),
    Run(
        "ViT-H",
        "vit_huge.json",
        ("--batch", "64", "--precision", "autocast", "--optimizer", "SGD-momentum"),
    ),
    Run(
        "BERT-large",
        "bert_large.json",
        (
            *("--batch", "32", "--seq", "512", "--freeze", "embeddings", "--attention", "eager"),
            *("--precision", "autocast", "--optimizer", "Adafactor"),
        ),
    ),
    Run(
        "Llama-70B",
        "llama_70b.json",
        (
            *(*_TOKENS, "--precision", "bf16", "--optimizer", "AdamW"),
            *("--shards", "64", "--loss-chunks", "8"),
        ),
    ),
)
_COLUMNS = ("model", "run", "processor s", "memory", "resident", "plain peak", "smallest peak")
_DEVICE = "H200"


def row(run: Run, *, code: bool) -> list[str]:
    """What planning a run takes, and finds."""
    command = [sys.executable, "-m", "autoremat", "plan", f"hf:{EXAMPLES / run.config}"]
    command += [*run.arguments, "--device", _DEVICE, "--budget", "min", "--curve", "0", "--json"]
    command += [] if code else ["--no-code"]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as out:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        process = subprocess.Popen(command, stdout=out, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    cells = [run.name, f"`{' '.join(run.arguments)}`", *_taken(used)]
    if process.returncode:
        return [*cells, f"ended with {process.returncode}", "", ""]
    found = json.loads(text)
    sizes = ("resident_nbytes", "baseline_peak_nbytes", "predicted_peak_nbytes")
    return [*cells, *(format_nbytes(found[name]) for name in sizes)]


def _taken(used: resource.struct_rusage) -> tuple[str, str]:
    kilobytes = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return f"{used.ru_utime + used.ru_stime:.0f}", format_nbytes(int(kilobytes * 1024))


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", help="models to plan", choices=sorted({r.name for r in RUNS}))
    parser.add_argument("--code", action="store_true", help="generate and read the GPU's code")
    asked = parser.parse_args()
    print(f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}")
    for run in RUNS:
        if asked.only in (None, run.name):
            print(f"| {' | '.join(row(run, code=asked.code))} |", flush=True)


if __name__ == "__main__":
    main()
