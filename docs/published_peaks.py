"""Peaks of training steps that others have published, predicted without a GPU.

    python docs/published_peaks.py                 # all rows, and the page
    python docs/published_peaks.py --only phi-1.5  # one model, on standard output

Enters: the table below, each row with its source. Leaves: `docs/published_peaks.md`. All were
measured in eager mode; what is planned is the step op by op, without recompute.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from published_lora import AdaptedModel, Sizes
from published_models import Bert
from published_rows import arguments, line, of_all_layers, rewrite, table
from torch import nn

import autoremat

PAGE = Path(__file__).with_suffix(".md")
_NO_BUDGET = "1000TB"


@dataclass(frozen=True)
class Peak:
    """A published peak.

    Attributes:
        name: of the model.
        device: name of the GPU.
        made: the model, with so many layers.
        layers: how many it has.
        inputs: of a micro-batch.
        what: micro-batches of a step, in words.
        optimizer: as `plan` takes it.
        published_nbytes: what was measured.
        beside_nbytes: of it, what the source says is there before a model is.
        is_reserved: whether it is of what the process holds on the device; else of what torch's
            allocator has given away (`torch.cuda.max_memory_allocated`).
        source: where that was published.
        keeps_gradients: whether they are there in each forward: set to zeros, not to None.
        trained: parameters that are trained, where the source says so.
    """

    name: str
    device: str
    made: Callable[[int], nn.Module]
    layers: int
    inputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    what: str
    optimizer: str
    published_nbytes: int
    source: str
    beside_nbytes: int = 0
    is_reserved: bool = False
    keeps_gradients: bool = False
    trained: int | None = None


def _adapted(name: str, layers: int, tokens: int, trained: int, sizes: Sizes) -> list[Peak]:
    """The rows of a model with adapters, by sequences of a micro-batch."""
    return [
        Peak(
            name,
            "A100 40GB",
            lambda layers: AdaptedModel(layers, tokens, sizes),
            layers,
            lambda batch=batch: (_ids(batch, tokens), _ids(batch, tokens - 1)),
            f"{batch} x {tokens} tokens",
            "AdamW",
            int(gigabytes * 1e9),
            _LITGPT,
            trained=trained,
        )
        for batch, gigabytes in _LITGPTS[name].items()
    ]


def _ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.empty(batch, tokens, dtype=torch.int64, device="meta")


def _berts(batch: int, what: str, mebibytes: int) -> Peak:
    return Peak(
        *("BERT-large", "V100 16GB", Bert, 24),
        lambda: (_ids(batch, 512), _ids(batch, 1)),
        *(what, "AdamW-fused", mebibytes << 20, _TRANSFORMERS),
        beside_nbytes=1343 << 20,
        is_reserved=True,
        keeps_gradients=True,
    )


_LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
_TRANSFORMERS = "https://huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one"
_LITGPTS = {  # gigabytes by sequences of a micro-batch
    "phi-1.5": {1: 4.82, 2: 6.76, 4: 10.68},
    "StableLM Alpha 3B": {1: 9.69, 2: 12.10, 4: 16.92},
    "Llama 2 7B": {1: 21.30, 2: 29.07},
    "Llama 2 13B": {1: 38.12},
}
_PHI = Sizes(2048, 32, 8192, 51200, rotary=0.5, parallel=True, one_norm=True, head_bias=True)
_STABLE = Sizes(4096, 32, 16384, 50688, rotary=0.25, parallel=True)
PEAKS = (
    *_adapted("phi-1.5", 24, 1044, 1_572_864, _PHI),
    *_adapted("StableLM Alpha 3B", 16, 1034, 2_097_152, _STABLE),
    *_adapted("Llama 2 7B", 32, 1304, 4_194_304, Sizes(4096, 32, 11008, 32000, llama=True)),
    *_adapted("Llama 2 13B", 40, 1304, 6_553_600, Sizes(5120, 40, 13824, 32000, llama=True)),
    _berts(4, "4 x 512 tokens", 14949),
    _berts(1, "4 x (1 x 512 tokens)", 8681),
)


def predicted_nbytes(peak: Peak, *, whole: bool = False) -> int:
    """What the source's meter would show; of equal layers, two and four are planned if not all.

    What is reserved is no linear function of the layers.
    """
    if whole or peak.is_reserved:
        return peak.beside_nbytes + _peak_nbytes(peak, peak.layers)
    return peak.beside_nbytes + int(of_all_layers(partial(_peak_nbytes, peak), peak.layers))


def _peak_nbytes(peak: Peak, layers: int) -> int:
    """Of a step without recompute, with so many layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = autoremat.plan(
            _model(peak, layers),
            *peak.inputs(),
            device=peak.device,
            budget=_NO_BUDGET,
            optimizer=peak.optimizer,
            setup=autoremat.TrainingSetup(accumulate=1 + peak.keeps_gradients),
            compiler="eager",
            verbose=False,
            time_limit=1.0,
        )
    assert report.predicted_peak_nbytes == report.baseline_peak_nbytes, "nothing is recomputed"
    if peak.is_reserved:
        assert report.reserved is not None, "planned for a GPU"
        return report.reserved.peak_nbytes
    return report.baseline_peak_nbytes


def _model(peak: Peak, layers: int) -> nn.Module:
    with torch.device("meta"):
        return peak.made(layers).train()


def row(peak: Peak) -> tuple[list[str], float]:
    """Cells of the table, and the error."""
    whole = _model(peak, peak.layers)
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    if peak.trained not in (None, trained):
        raise SystemExit(f"{peak.name}: {trained} parameters are trained, not {peak.trained}")
    found = predicted_nbytes(peak)
    error = found / peak.published_nbytes - 1
    cells = [
        f"[{peak.name}]({peak.source})",
        peak.device,
        peak.what,
        "reserved" if peak.is_reserved else "allocated",
        f"{peak.published_nbytes / 1e9:.2f}",
        f"{found / 1e9:.2f}",
        f"{error:+.1%}",
    ]
    return cells, error


_HEAD = ("model", "GPU", "batch", "meter", "published, GB", "predicted, GB", "error")


def page(rows: list[tuple[list[str], float]]) -> str:
    """The table, and how far off it is."""
    errors = [abs(error) for _, error in rows]
    within = sum(error <= 0.1 for error in errors)
    summary = (
        f"Median error {statistics.median(errors):.1%}, the largest {max(errors):.1%}; {within} of "
        f"{len(errors)} within 10 %."
    )
    return "\n".join([*table(_HEAD, [cells for cells, _ in rows]), "", summary]) + "\n"


def main() -> None:
    """Plan, print, and write the page."""
    asked = arguments(__doc__)
    chosen = [peak for peak in PEAKS if asked.only.lower() in peak.name.lower()]
    rows = []
    for peak in chosen:
        rows.append(row(peak))
        print(line(rows[-1][0]), flush=True)
        if asked.whole and not peak.is_reserved:
            print(f"all layers planned: {predicted_nbytes(peak, whole=True) / 1e9:.2f} GB")
    if not asked.only:
        rewrite(PAGE, page(rows), "within 10 %.\n")


if __name__ == "__main__":
    main()
