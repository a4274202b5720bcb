"""Whole training steps on the GPU at hand: optimizer, clipping, autocast, a gradient scaler.

    python docs/gpu_steps.py [--only llama,bert] [--compilers eager] [--shares 0.5] --out rows.md
    python docs/gpu_steps.py --tiny --out rows.md   # is the script sound? on a CPU

For each case the step is taken in eager mode, and then under a share of what that needs above its
resident bytes: all that is allocated then, predicted and measured. Each is a process of its own, of
which nothing else is alive. `--jobs` runs several at once: peaks are each process's own, times are
not. Rows are stored as they come, `--resume` goes on.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_benchmark_models import Loss, Made
from own_process import in_own_process
from page_tables import versions
from row_store import Row, Store, describe
from torch import nn

import autoremat
from autoremat.comparison.serve import seconds
from autoremat.errors import OverBudgetWarning
from autoremat.memory.meter import cuda_peaks
from autoremat.session.replans import usual_steps

PRELOADED = ["gpu_steps", "autoremat.api", "autoremat._torch.compiling"]
STEPS = 7  # that are timed, once nothing is planned anew
_storing = threading.Lock()


def llama(*, tiny: bool) -> Made:
    """12 layers of width 1,024, 8 x 1,024 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256 if tiny else 32_000,
        hidden_size=32 if tiny else 1024,
        intermediate_size=64 if tiny else 2816,
        num_hidden_layers=2 if tiny else 12,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        use_cache=False,
    )
    tokens = torch.randint(config.vocab_size, (2, 32) if tiny else (8, 1024))
    return Loss(LlamaForCausalLM(config), "input_ids"), (tokens, tokens)


def bert(*, tiny: bool) -> Made:
    """BERT base with dropout, 16 x 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    small = {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    config = BertConfig(**small) if tiny else BertConfig()
    tokens = torch.randint(config.vocab_size, (2, 16) if tiny else (16, 512))
    return Loss(BertForMaskedLM(config), "input_ids"), (tokens, tokens)


def resnet(*, tiny: bool) -> Made:
    """ResNet-50, 64 images of 224 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(hidden_sizes=[16, 32], depths=[1, 1]) if tiny else ResNetConfig()
    config.num_labels = 10 if tiny else 1000
    size = 32 if tiny else 224
    images = torch.randn(2 if tiny else 64, 3, size, size)
    labels = torch.randint(config.num_labels, images.shape[:1])
    return Loss(ResNetForImageClassification(config), "pixel_values"), (images, labels)


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        make: the model, and a batch.
        dtype: of its parameters.
        autocast: of its operations; None without autocast.
        by_blocks: compiled block by block, not optimised as a whole.
    """

    make: Callable[..., Made]
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    by_blocks: bool = False


CASES = {
    "llama": Training(llama, torch.bfloat16),
    "llama by blocks": Training(llama, torch.bfloat16, by_blocks=True),
    "bert": Training(bert, autocast=torch.bfloat16),
    "resnet": Training(resnet, autocast=torch.float16),
}


@dataclass(frozen=True)
class Point:
    """One process; a budget of None is eager mode."""

    case: str
    compiler: str = ""
    budget_nbytes: int | None = None
    tiny: bool = False


def row_of(point: Point) -> Row:
    """What a step takes."""
    training, device = CASES[point.case], torch.device("cpu" if point.tiny else "cuda")
    torch.manual_seed(0)
    model, batch = training.make(tiny=point.tiny)
    model = model.to(device, training.dtype).train()
    batch = tuple(value.to(device) for value in batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if point.budget_nbytes is not None:
        _plan(model, optimizer, training, point)
    scaler = torch.amp.GradScaler(
        device.type, enabled=training.autocast == torch.float16 and not point.tiny
    )

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(device.type, training.autocast, enabled=training.autocast is not None):
            loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return float(loss.detach())  # what waits for the device

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", OverBudgetWarning)
        first_seconds, loss = seconds(step), 0.0
        for _ in range(usual_steps(device)):
            loss = step()
        times = [seconds(step) for _ in range(STEPS)]
    resident_nbytes = autoremat.resident_nbytes(model, batch, optimizer)
    found = cuda_peaks(step, device)
    if found is None:
        peak_nbytes = resident_nbytes + autoremat.measure_peak(step, device=device)
    else:
        peak_nbytes = found.allocated_nbytes
    row = {
        "resident_nbytes": resident_nbytes,
        "peak_nbytes": peak_nbytes,
        "reserved_nbytes": found and found.reserved_nbytes,
        "first_step_seconds": first_seconds,
        "step_seconds": statistics.median(times),
        "loss": loss,
        "told": [str(entry.message)[:300] for entry in told],
    }
    if point.budget_nbytes is not None:
        report = autoremat.report(model)
        row |= {
            "budget_nbytes": point.budget_nbytes,
            "predicted_peak_nbytes": report.predicted_peak_nbytes,
            "predicted_us": report.predicted_time_us,
            "unseen_nbytes": report.resident.unseen_nbytes,
            "fallbacks": list(map(str, report.fallbacks)),
        }
    return row


def _plan(model: nn.Module, optimizer: Any, training: Training, point: Point) -> None:
    asked: dict[str, Any] = {"compiler": point.compiler, "verbose": False}
    if not training.by_blocks:
        autoremat.optimize(model, point.budget_nbytes or 0, optimizer=optimizer, **asked)
        return
    options = {"budget": point.budget_nbytes, **asked}
    for block in model.model.model.layers:
        block.compile(backend="autoremat", options=options)


def summary(row: Row) -> str:
    """One line for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['message']}"
    text = f"peak {row['peak_nbytes']:,} B, step {1e3 * row['step_seconds']:.1f} ms"
    if "budget_nbytes" in row:
        used = row["peak_nbytes"] / row["budget_nbytes"]
        exact = row["predicted_peak_nbytes"] / row["peak_nbytes"]
        text += f", {used:.3f} of the budget, predicted {exact:.3f} of it, told {len(row['told'])}"
    return text


def measure(case: str, store: Store, args: argparse.Namespace) -> None:
    """Eager mode, and then each compiler at each share; a row is stored as soon as it is there."""

    def row(name: str, point: Point) -> Row:
        key = f"{case}, {name}"
        known = store.rows.get(key, {})
        if args.resume and known.get("status") == "ok":
            return known
        found = {"key": key, **in_own_process(row_of, point, args.timeout, PRELOADED)}
        with _storing:
            store.add(found)
        print(f"{key:32s} {summary(found)}", flush=True)
        return found

    eager = row("eager mode", Point(case, tiny=args.tiny))
    if eager["status"] != "ok":
        return
    resident_nbytes = eager["resident_nbytes"]
    for compiler, share in itertools.product(args.compilers, args.shares):
        budget_nbytes = resident_nbytes + int(share * (eager["peak_nbytes"] - resident_nbytes))
        row(f"{compiler} at {share:.0%}", Point(case, compiler, budget_nbytes, args.tiny))


def page(runs: list[Row], rows: list[Row]) -> str:
    """A line for each row, and what they were run with."""
    lines = [f"- {row['key']}: {summary(row)}\n" for row in rows]
    lines += [f"\n`{run['command']}`, {run['date']}, {versions(run)}\n" for run in runs]
    return "".join(["# Whole steps on a GPU\n\n", *lines])


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=listed, default=list(CASES))
    parser.add_argument("--compilers", type=listed, default=["eager", "inductor"])
    parser.add_argument("--shares", type=lambda t: [float(s) for s in listed(t)], default=[0.5])
    parser.add_argument("--timeout", type=float, default=600.0, help="of a process, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--out", type=Path, required=True, help="the page; its rows lie beside it")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args(words)
    unknown = [name for name in args.only if name not in CASES]
    if unknown:
        parser.error(f"Unknown case {unknown[0]!r}. There are: {', '.join(CASES)}.")
    if not (args.tiny or torch.cuda.is_available()):
        parser.error("There is no GPU here. --tiny tries the script on a CPU.")
    return args


def main(words: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = arguments(words)
    run = describe("gpu_steps.py", ("torch", "transformers"), jobs=args.jobs)
    store = Store(args.out.with_suffix(".json"), page, run)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(partial(measure, store=store, args=args), args.only))


if __name__ == "__main__":
    main()
