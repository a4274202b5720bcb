"""Training steps that others have published, predicted without a GPU: tokens or images per second.

    python docs/published_steps.py                     # all rows, and the page
    python docs/published_steps.py --only TinyLlama    # one, on standard output

Enters: the table below, each row with its source. Leaves: `docs/published_steps.md`. A step of
layers that are equal is planned with two and with four of them; the rest is taken to be linear,
which `--whole` checks by planning all layers. What the plan does not know is added here, by the
bytes that it moves: AdamW, and adding to gradients. Communication is taken to be hidden.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from published_models import Bert, DiffusionUnet, LanguageModel, ResNet50, VisionTransformer
from published_rows import arguments, line, of_all_layers, rewrite, table
from torch import nn

import autoremat
from autoremat.cost.device_specs import find_spec

PAGE = Path(__file__).with_suffix(".md")
_NO_BUDGET = "1000TB"
_ADAMW_NBYTES = 28  # of a parameter: it, its gradient and two moments read, all but that written
_ADDED_NBYTES = 12  # of a gradient that is added to: both read, one written

Made = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Step:
    """A published step.

    Attributes:
        name: of the model.
        device: name of the GPU.
        made: the model, with so many layers.
        layers: how many it has; 0 if it is planned whole.
        batch: sequences or images in a micro-batch of one GPU.
        tokens: of a sequence; 0 for images.
        published: tokens or images per second and GPU.
        source: where that was published.
        compiler: "inductor" where kernels were fused, by it or by hand; else "eager".
        calibrates: whether shares of the data sheets were chosen by it.
        micro_batches: of one optimizer step.
        shards: GPUs that share the optimizer's state.
        note: what differs, or how the figure is derived.
        precision: of `TrainingSetup`.
        image: sizes of one.
    """

    name: str
    device: str
    made: Made
    layers: int
    batch: int
    tokens: int
    published: float
    source: str
    compiler: str
    calibrates: bool
    micro_batches: int = 1
    shards: int = 1
    note: str = ""
    precision: str = "autocast"
    image: tuple[int, ...] = (3, 224, 224)


def _gpt(width: int, heads: int, tokens: int, vocabulary: int = 50304, *, bias: bool) -> Made:
    sizes = {"width": width, "heads": heads, "tokens": tokens, "vocabulary": vocabulary}
    return lambda layers: LanguageModel(layers, **sizes, bias=bias)


def _llama(width: int, heads: int, hidden: int, tokens: int, *, groups: int = 0) -> Made:
    sizes = {"width": width, "heads": heads, "hidden": hidden, "tokens": tokens, "groups": groups}
    return lambda layers: LanguageModel(layers, **sizes, vocabulary=32000, llama=True, bias=False)


_IBM = "https://pytorch.org/blog/maximizing-training/"
_IBM_COMPILED = "https://pytorch.org/blog/maximizing-training-throughput/"
_FLASH = "https://github.com/Dao-AILab/flash-attention/blob/main/training/README.md"
_MOSAIC = "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
_TIMM = (
    "https://github.com/huggingface/pytorch-image-models/blob/main/results/"
    "benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
)
_DIFFUSION = "https://github.com/mosaicml/diffusion#how-many-gpus-do-i-need"
_TRANSFORMERS = "https://huggingface.co/docs/transformers/v4.27.2/en/perf_train_gpu_one"
_NANO = "https://github.com/karpathy/nanoGPT/issues/"
_TINY = "https://github.com/jzhang38/TinyLlama"
_7B = _llama(4096, 32, 11008, 4096)
_BY_MFU = "by the MFU beside that of eager, whose tokens per second are published"

STEPS = (
    Step(
        *("Llama-2 7B", "A100 80GB", _7B, 32, 2, 4096, 4414, _IBM_COMPILED, "inductor", True),
        shards=128,
        note=_BY_MFU,
    ),
    Step(
        *("Llama-2 7B", "H100 80GB", _7B, 32, 2, 4096, 9122, _IBM_COMPILED, "inductor", True),
        shards=464,
        note=_BY_MFU,
    ),
    Step(
        *("Llama-2 7B", "A100 80GB", _7B, 32, 2, 4096, 3700, _IBM, "eager", False),
        shards=128,
    ),
    Step(
        *("Llama-2 7B", "H100 80GB", _7B, 32, 2, 4096, 7500, _IBM, "eager", False),
        shards=96,
        note="a tenth of the time is communication, says the source",
    ),
    Step(
        *("TinyLlama 1.1B", "A100 40GB", _llama(2048, 32, 5632, 2048, groups=4), 22, 8, 2048),
        *(24000, _TINY, "inductor", False),
        shards=16,
        note="fused by hand",
    ),
    Step(
        *("GPT3 125M", "A100 80GB", _gpt(768, 12, 2048, 50264, bias=True), 12, 32, 2048),
        *(163_750, _FLASH, "inductor", False),
        note="fused by hand",
    ),
    Step(
        *("GPT3 355M", "A100 80GB", _gpt(1024, 16, 2048, 50264, bias=True), 24, 16, 2048),
        *(62_875, _FLASH, "inductor", False),
        note="fused by hand; micro-batch not published",
    ),
    Step(
        *("GPT3 1.3B", "A100 80GB", _gpt(2048, 16, 2048, 50264, bias=True), 24, 8, 2048),
        *(21_125, _FLASH, "inductor", False),
        shards=8,
        micro_batches=8,
        note="fused by hand",
    ),
    Step(
        *("GPT-2 124M", "A100 40GB", _gpt(768, 12, 1024, bias=False), 12, 12, 1024),
        *(109_300, _NANO + "110", "inductor", False),
        micro_batches=5,
        note="562 ms for 61,440 tokens; a nightly before torch 2.0",
    ),
    Step(
        *("GPT-2 124M", "RTX 4090", _gpt(768, 12, 1024, bias=False), 12, 12, 1024),
        *(105_600, _NANO + "182", "inductor", False),
        micro_batches=5,
        note="29 % of an A100's throughput, as nanoGPT counts; a nightly before torch 2.0",
    ),
    Step(
        *("MPT 1B", "H100 80GB", _gpt(2048, 16, 2048, 50432, bias=False), 24, 14, 2048),
        *(45_455, _MOSAIC, "eager", False),
        shards=8,
    ),
    Step(
        *("MPT 7B", "H100 80GB", _gpt(4096, 32, 2048, 50432, bias=False), 32, 6, 2048),
        *(10_643, _MOSAIC, "eager", False),
        shards=8,
    ),
    Step(
        *("MPT 3B", "A100 80GB", _gpt(2560, 20, 2048, 50432, bias=False), 32, 10, 2048),
        *(10_811, _MOSAIC, "eager", False),
        shards=8,
        micro_batches=2,
    ),
    Step(
        *("MPT 125M", "A100 80GB", _gpt(768, 12, 2048, 50432, bias=False), 12, 32, 2048),
        *(141_737, _MOSAIC, "eager", False),
        shards=8,
        micro_batches=2,
    ),
    Step(
        *("BERT-large", "V100 16GB", Bert, 24, 4, 512, 8.86 * 512, _TRANSFORMERS, "eager", False),
        precision="fp32",
        note="float32; 8.86 texts per second, what the trainer does included",
    ),
    *(
        Step(
            *("Stable Diffusion 2, UNet", "A100 40GB", lambda _: DiffusionUnet(), 0, 16, 0),
            *(rate / 8, _DIFFUSION, "eager", False),
            shards=8,
            micro_batches=16,
            precision="bf16",
            image=(4, side // 8, side // 8),
            note=f"{side} x {side}, on eight GPUs, all in bfloat16; which A100 is not published",
        )
        for side, rate in ((256, 1100.0), (512, 290.0))
    ),
    Step(
        "ViT-B/16",
        "RTX 3090",
        lambda layers: VisionTransformer(layers, width=768, heads=12),
        *(12, 192, 0, 390.9, _TIMM, "eager", False),
    ),
    Step(
        *("ResNet-50", "RTX 3090", lambda _: ResNet50(), 0, 512, 0, 826.1, _TIMM, "eager", False),
    ),
)


def predicted(step: Step, *, code: bool, whole: bool = False) -> float:
    """Tokens or images per second and GPU.

    Args:
        step: what is planned.
        code: whether the generated code tells the time, where there is any.
        whole: whether all layers are planned.
    """
    if whole or not step.layers:
        time_us = _time_us(step, step.layers, code=code)
    else:
        time_us = of_all_layers(partial(_time_us, step, code=code), step.layers)
    num_parameters = _size(step, step.layers)
    moved = _ADAMW_NBYTES * num_parameters / step.shards / step.micro_batches
    if step.micro_batches > 1:
        moved += _ADDED_NBYTES * num_parameters / step.shards
    time_us += moved / (find_spec(step.device).copy_gbps * 1e3)
    return 1e6 * step.batch * max(1, step.tokens) / time_us


def _time_us(step: Step, layers: int, *, code: bool) -> float:
    """Forward and backward of one micro-batch, without a plan."""
    inputs = _inputs(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = autoremat.plan(
            _model(step, layers),
            *inputs,
            device=step.device,
            budget=_NO_BUDGET,
            setup=autoremat.TrainingSetup(precision=step.precision),
            compiler=step.compiler,
            code=code,
            verbose=False,
            time_limit=1.0,
        )
    if report.code_times_us is not None:
        return report.code_times_us[0]
    return report.baseline_time_us


def _model(step: Step, layers: int) -> nn.Module:
    with torch.device("meta"):
        return step.made(layers)


def _size(step: Step, layers: int) -> int:
    return sum(parameter.numel() for parameter in _model(step, layers).parameters())


def _inputs(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    if step.tokens:
        ids = torch.empty(step.batch, step.tokens, dtype=torch.int64, device="meta")
        return ids, ids
    images = torch.empty(step.batch, *step.image, device="meta")
    return images, torch.empty(step.batch, dtype=torch.int64, device="meta")


def row(step: Step) -> tuple[list[str], float, float]:
    """Cells of the table, and the errors of both predictions."""
    graph = predicted(step, code=False)
    code = predicted(step, code=True) if step.compiler == "inductor" else graph
    errors = [found / step.published - 1 for found in (code, graph)]
    what = f"{step.batch} x {step.tokens} tokens" if step.tokens else f"{step.batch} images"
    shown = f"{code:,.0f}" if step.compiler == "inductor" else ""
    cells = [
        f"[{step.name}]({step.source})",
        step.device,
        what,
        step.compiler,
        "calibrates" if step.calibrates else "tests",
        f"{step.published:,.0f}",
        shown,
        f"{errors[0]:+.0%}" if shown else "",
        f"{graph:,.0f}",
        f"{errors[1]:+.0%}",
        step.note,
    ]
    return cells, *errors


_HEAD = (
    *("model", "GPU", "micro-batch", "kernels", "row", "published", "by code", "error"),
    *("by graph", "error", "remark"),
)


def page(rows: list[tuple[list[str], float, float]]) -> str:
    """The table, and how far off it is."""
    lines = [*table(_HEAD, [cells for cells, *_ in rows]), ""]
    for kind in ("calibrates", "tests"):
        errors = [abs(code) for cells, code, _ in rows if cells[4] == kind]
        within = sum(error <= 0.25 for error in errors)
        lines.append(
            f"- Rows of which each {kind}: median error {statistics.median(errors):.0%}, the "
            f"largest {max(errors):.0%}; {within} of {len(errors)} within 25 %."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plan, print, and write the page."""
    asked = arguments(__doc__)
    chosen = [step for step in STEPS if asked.only.lower() in step.name.lower()]
    rows = []
    for step in chosen:
        rows.append(row(step))
        print(line(rows[-1][0]), flush=True)
        if asked.whole:
            linear, whole = (predicted(step, code=False, whole=all_of) for all_of in (False, True))
            print(f"all layers planned: {whole:,.0f}, from two and four: {linear:,.0f}")
    if not asked.only:
        rewrite(PAGE, page(rows), "within 25 %.\n")


if __name__ == "__main__":
    main()
