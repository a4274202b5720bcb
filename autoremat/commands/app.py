"""The command line: each command as typer sees it.

Enters: arguments. Leaves: a result on stdout, messages on stderr, and an exit code: 0 for success,
1 for input that cannot be used, 2 for a budget that no plan found fits, 3 for a verification that
failed, 130 after Ctrl-C.
Guarantees: importing this needs no torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from autoremat.commands import helptexts
from autoremat.commands.arguments import FitArguments, PlanArguments, outputs_asked
from autoremat.commands.interrupt import INTERRUPTED, SENTENCE, leaving_at_once
from autoremat.commands.setup_options import (
    Accumulate,
    Attention,
    Freeze,
    Lora,
    LoraRank,
    LossChunks,
    NoCode,
    Precision,
    Shards,
    setup_given,
)
from autoremat.graph.dropout_policy import DropoutPolicy
from autoremat.targets.arguments import HF, TargetArguments

BAD_INPUT, INFEASIBLE, DIFFERENT = 1, 2, 3


class Compiler(StrEnum):
    """What runs the planned graphs."""

    INDUCTOR = "inductor"
    EAGER = "eager"


class _Commands(TyperGroup):
    """Commands whose usage errors exit with 1, since 2 means that no plan fits."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            # Both the exit code of a command and a usage error end here; the cause tells.
            if end.code == INFEASIBLE and not isinstance(end.__context__, typer.Exit):
                raise SystemExit(BAD_INPUT) from None
            raise


app = typer.Typer(
    cls=_Commands,
    help="Training steps that stay within a memory budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run(command: str, *args: Any, **keywords: Any) -> NoReturn:
    """Import a command's module, run it, and exit with its code."""
    try:
        with leaving_at_once():
            module = importlib.import_module(f"autoremat.commands.{command}")
        code = module.run(*args, **keywords)
        sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        typer.echo(f"autoremat: The result cannot be printed: {error.strerror}.", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        code = BAD_INPUT
    raise typer.Exit(code)


def _target(text: str, batch: int | None, seq: int | None, dtype: str | None) -> TargetArguments:
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


# --- arguments that several commands share -----------------------------------------------------

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
        "a100-40gb.",
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


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from autoremat import __version__

        typer.echo(f"autoremat {__version__}")
        raise typer.Exit


# --- commands ----------------------------------------------------------------------------------


@app.callback()
def version(
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Training steps that stay within a memory budget."""


@app.command(help=helptexts.PLAN, no_args_is_help=True)
def plan(
    target: Target,
    budget: Budget,
    device: Device = None,
    optimizer: Optimizer = None,
    compiler: CompilerOption = Compiler.INDUCTOR,
    batch: Batch = None,
    seq: Seq = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="One plan for a range of sizes: batch=1:32,sequence=128:4096, or an input and a "
            "dimension of it, images.2=224:384.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = None,
    precision: Precision = None,
    accumulate: Accumulate = 1,
    lora: Lora = "",
    lora_rank: LoraRank = 16,
    freeze: Freeze = "",
    attention: Attention = None,
    shards: Shards = 1,
    loss_chunks: LossChunks = 1,
    no_code: NoCode = False,
    out: ReportFile = None,
    html: Html = None,
    csv: Csv = None,
    snapshot: Snapshot = None,
    trace: Trace = None,
    curve: Annotated[
        int, typer.Option(help="Points of the curve of peak and time; 0 leaves it out.", min=0)
    ] = 8,
    time_limit: TimeLimit = 30.0,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Plan without running, print, write: see `commands.plan`."""
    setup = setup_given(locals())
    _run(
        "plan",
        _target(target, batch, seq, dtype),
        PlanArguments(
            *(budget, device, optimizer, compiler, time_limit, curve),
            setup=setup,
            code=not no_code,
            sizes=sizes,
        ),
        outputs_asked(report=out, html=html, csv=csv, snapshot=snapshot, trace=trace),
        as_json=as_json,
        force=force,
    )


@app.command(help=helptexts.FIT, no_args_is_help=True)
def fit(
    target: Target,
    budget: Budget,
    over: Annotated[
        str,
        typer.Option(help="The size: batch, sequence, or both, batch,sequence, for hf: targets."),
    ] = "batch",
    global_batch: Annotated[
        int | None,
        typer.Option(help="To be made of several batches.", min=1, show_default=False),
    ] = None,
    device: Device = None,
    optimizer: Optimizer = None,
    compiler: CompilerOption = Compiler.INDUCTOR,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    reserve: Annotated[
        float, typer.Option(help="Share of the budget to leave free, such as 0.05.", min=0.0)
    ] = 0.0,
    most: Annotated[
        int | None, typer.Option(help="The largest size to try.", min=1, show_default=False)
    ] = None,
    multiple_of: Annotated[int, typer.Option(help="Sizes are multiples of it.", min=1)] = 1,
    points: Annotated[
        int, typer.Option(help="Sizes to plan to find the fastest; 0 for the largest alone.", min=0)
    ] = 8,
    svg: Annotated[
        Path | None,
        typer.Option(help="Write throughput over size to this SVG file.", show_default=False),
    ] = None,
    html: Html = None,
    csv: Csv = None,
    time_limit: Annotated[
        float, typer.Option(help="Seconds to choose a plan, per size.", min=0.0)
    ] = 30.0,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Plan sizes without running, print, draw: see `commands.fit`."""
    _run(
        "fit",
        _target(target, batch, seq, dtype),
        FitArguments(
            *(budget, over, global_batch, device, optimizer, compiler, time_limit),
            *(reserve, most, multiple_of, points),
        ),
        outputs_asked(svg=svg, html=html, csv=csv),
        as_json=as_json,
        force=force,
    )


@app.command(help=helptexts.PARETO, no_args_is_help=True)
def pareto(
    target: Target,
    device: Device = None,
    optimizer: Optimizer = None,
    compiler: CompilerOption = Compiler.INDUCTOR,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    precision: Precision = None,
    accumulate: Accumulate = 1,
    lora: Lora = "",
    lora_rank: LoraRank = 16,
    freeze: Freeze = "",
    attention: Attention = None,
    shards: Shards = 1,
    loss_chunks: LossChunks = 1,
    no_code: NoCode = False,
    points: Annotated[int, typer.Option(help="Budgets, the two ends included.", min=2)] = 10,
    out: ReportFile = None,
    time_limit: Annotated[
        float,
        typer.Option(help="Seconds for one plan; the curve gets a third of it more.", min=0.0),
    ] = 60.0,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Plan for many budgets without running: see `commands.pareto`."""
    setup = setup_given(locals())
    _run(
        "pareto",
        _target(target, batch, seq, dtype),
        PlanArguments(
            *(None, device, optimizer, compiler, time_limit, points),
            setup=setup,
            code=not no_code,
        ),
        outputs_asked(report=out),
        as_json=as_json,
        force=force,
    )


@app.command(help=helptexts.PROFILE, no_args_is_help=True)
def profile(
    target: Target,
    device: Device = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Price every operation of a step: see `commands.profile`."""
    _run(
        "profile",
        _target(target, batch, seq, dtype),
        PlanArguments(None, device, None, Compiler.EAGER, 0.0, 0),
        as_json=as_json,
    )


@app.command(help=helptexts.SOLVE, no_args_is_help=True)
def solve(
    problem: Annotated[Path, typer.Argument(help="The graph, as JSON.", metavar="PROBLEM")],
    budget: Annotated[
        str | None,
        typer.Option(
            help="Highest peak allowed: 12GiB, 1.5GB, 123456 (bytes), or 60% of the peak "
            "without recompute.",
            show_default=False,
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The whole curve of peak and time; no --budget.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this JSON file.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the table.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds; 0 takes the best of the simple strategies.", min=0.0)
    ] = 30.0,
) -> None:
    """Parse, solve, print: see `commands.solve`."""
    _run("solve", problem, budget, pareto=pareto, out=out, as_json=as_json, time_limit=time_limit)


@app.command(help=helptexts.VERIFY, no_args_is_help=True)
def verify(
    target: Target,
    budget: Budget,
    compiler: CompilerOption = Compiler.INDUCTOR,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    dropout: Annotated[
        DropoutPolicy | None,
        typer.Option(
            help="Draw random numbers again where that is safe, or keep what was drawn; without "
            "it, the safe choice for the device.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    time_limit: TimeLimit = 30.0,
) -> None:
    """Load, plan, compare, print: see `commands.verify`."""
    _run(
        "verify",
        _target(target, batch, seq, dtype),
        budget,
        compiler=compiler,
        dropout=dropout,
        as_json=as_json,
        time_limit=time_limit,
    )


@app.command(help=helptexts.COMPARE, no_args_is_help=True)
def compare(
    target: Target,
    budgets: Annotated[
        str,
        typer.Option(
            help="Of autoremat: shares of what eager's step needs above its resident bytes, sizes "
            "of the whole step (12GiB, bytes), or smallest."
        ),
    ] = "75%,50%,25%,smallest",
    variants: Annotated[
        str | None,
        typer.Option(help="What else to measure; see above.", show_default=False),
    ] = None,
    compiler: CompilerOption = Compiler.INDUCTOR,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    rounds: Annotated[int, typer.Option(help="Timed steps of each variant.", min=1)] = 7,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write peak against time to this SVG file.", show_default=False),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="Time each variant before the next is built, where the device holds only one.",
        ),
    ] = False,
    time_limit: TimeLimit = 30.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one variant to be measured.")] = 900.0,
) -> None:
    """Measure, print, draw: see `commands.compare`."""
    _run(
        "compare",
        _target(target, batch, seq, dtype),
        budgets=budgets,
        variants=variants,
        compiler=compiler,
        rounds=rounds,
        time_limit=time_limit,
        timeout=timeout,
        alone=alone,
        picture=plot,
        force=force,
        as_json=as_json,
    )


@app.command(help=helptexts.SHOW, no_args_is_help=True)
def show(
    report: Annotated[Path, typer.Argument(help="The report, as JSON.", metavar="REPORT")],
    html: Html = None,
    csv: Csv = None,
    snapshot: Snapshot = None,
    trace: Trace = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Read, render, print: see `commands.show`."""
    outputs = outputs_asked(html=html, csv=csv, snapshot=snapshot, trace=trace)
    _run("show", report, outputs, as_json=as_json, force=force)


@app.command(help=helptexts.CACHE)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Forget everything first.")] = False,
    exported: Annotated[
        Path | None,
        typer.Option("--export", help="Write the files to this folder.", show_default=False),
    ] = None,
    imported: Annotated[
        Path | None,
        typer.Option(
            "--import", help="Add what the files of this folder have.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show, clear, carry what is kept on this machine: see `commands.cache`."""
    _run("cache", clear=clear, exported=exported, imported=imported, as_json=as_json)


@app.command(help=helptexts.DOCTOR)
def doctor(as_json: AsJson = False) -> None:
    """Look at what autoremat rests on here: see `commands.doctor`."""
    _run("doctor", as_json=as_json)
