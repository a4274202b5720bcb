"""Arguments and options that several commands share, as typer reads them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from autoremat.targets.arguments import HF, TargetArguments


class Compiler(StrEnum):
    """What runs the planned graphs."""

    INDUCTOR = "inductor"
    EAGER = "eager"


class Goal(StrEnum):
    """What a report tells beside the plan."""

    TIME = "time"
    THROUGHPUT = "throughput"


Target = Annotated[
    str,
    typer.Argument(
        help="The function that makes model and batch, or hf:CONFIG.json.", metavar="TARGET"
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        help="Highest peak allowed: 12GiB, 1.5GB, 123456 (bytes), 80% of the device's memory, auto "
        "(what it has free, less a reserve), or min (as little as can be).",
        show_default=False,
    ),
]
CompilerOption = Annotated[
    Compiler, typer.Option(help="What runs the planned graphs; eager compiles fast.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout in place of the text.")
]
TimeLimit = Annotated[float, typer.Option(help="Seconds to choose a plan, per graph.", min=0.0)]
Batch = Annotated[
    int | None,
    typer.Option(help="Batch size, for hf: targets; 1 without it.", min=1, show_default=False),
]
Seq = Annotated[
    int | None,
    typer.Option(
        help="Tokens per sequence, for hf: targets; 512 without it.", min=1, show_default=False
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Type of the parameters, such as bfloat16, for hf: targets; the configuration's "
        "without it.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="What to plan for: cpu, cuda, or a GPU that need not be here, such as H100 or "
        "a100-40gb, or a file that doctor --gpu --out has exported on one, card.json.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="Such as AdamW, AdamW-fused, AdamW8bit, Adafactor, SGD-momentum: what it holds and "
        "makes counts.",
        show_default=False,
    ),
]
Offload = Annotated[
    str | None,
    typer.Option(
        help="Where values may wait: memory of the GPU's host, such as 24GB, or auto (of this "
        "machine's, what is free less a reserve); on the CPU a folder, "
        "disk:PATH.",
        show_default=False,
    ),
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="How they get there: pcie3, pcie4, pcie5, nvlink-c2c, or bytes per second each way; "
        "the GPU's own without it.",
        show_default=False,
    ),
]
ReportFile = Annotated[
    Path | None, typer.Option(help="Write the report as JSON.", show_default=False)
]
Html = Annotated[
    Path | None, typer.Option(help="Write a self-contained page here.", show_default=False)
]
Csv = Annotated[Path | None, typer.Option(help="Write the values as a table.", show_default=False)]
Snapshot = Annotated[
    Path | None,
    typer.Option(help="Write a memory snapshot for PyTorch's viewer.", show_default=False),
]
Trace = Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace files that autoremat did not write.")]


def target_given(
    text: str, batch: int | None, seq: int | None, dtype: str | None
) -> TargetArguments:
    """What a command is to load; sizes that it could not heed are a wrong use."""
    given = {"batch": batch, "seq": seq, "dtype": dtype}
    given = {name: value for name, value in given.items() if value is not None}
    target = TargetArguments(text, **given)  # type: ignore[arg-type]
    if given and not target.is_hf:
        options = " and ".join(f"--{name}" for name in given)
        raise typer.BadParameter(
            f"{options} is for {HF} targets: the function {text} makes its model and batch itself."
        )
    return target
