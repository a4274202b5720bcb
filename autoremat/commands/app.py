"""The command line: each command as typer sees it.

Enters: arguments. Leaves: what the command's own module makes of them, and its exit code.
Guarantees: importing this needs no torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoremat.commands import helptexts
from autoremat.commands.arguments import FitArguments, PlanArguments, outputs_asked
from autoremat.commands.exits import Commands, run_and_exit
from autoremat.commands.options import (
    AsJson,
    Batch,
    Budget,
    Compiler,
    CompilerOption,
    Csv,
    Device,
    Dtype,
    Force,
    Goal,
    Html,
    LinkOption,
    Offload,
    Optimizer,
    ReportFile,
    Seq,
    Snapshot,
    Target,
    TimeLimit,
    Trace,
    target_given,
)
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

app = typer.Typer(
    cls=Commands,
    help="Training steps that stay within a memory budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from autoremat import __version__

        typer.echo(f"autoremat {__version__}")
        raise typer.Exit


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
    offload: Offload = None,
    link: LinkOption = None,
    goal: Annotated[
        Goal,
        typer.Option(
            help="throughput: say what the step does per second, what more memory would buy and "
            "less would cost, by up to three more plans."
        ),
    ] = Goal.TIME,
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
    run_and_exit(
        "plan",
        target_given(target, batch, seq, dtype),
        PlanArguments(
            *(budget, device, optimizer, compiler, time_limit, curve),
            setup=setup,
            code=not no_code,
            offload=offload,
            link=link,
            sizes=sizes,
            goal=goal,
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
    run_and_exit(
        "fit",
        target_given(target, batch, seq, dtype),
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
    run_and_exit(
        "pareto",
        target_given(target, batch, seq, dtype),
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
    run_and_exit(
        "profile",
        target_given(target, batch, seq, dtype),
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
    run_and_exit(
        "solve", problem, budget, pareto=pareto, out=out, as_json=as_json, time_limit=time_limit
    )


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
    run_and_exit(
        "verify",
        target_given(target, batch, seq, dtype),
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
    run_and_exit(
        "compare",
        target_given(target, batch, seq, dtype),
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
    run_and_exit("show", report, outputs, as_json=as_json, force=force)


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
    run_and_exit("cache", clear=clear, exported=exported, imported=imported, as_json=as_json)


@app.command(help=helptexts.DOCTOR)
def doctor(
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Try the GPU at hand: predicted beside measured."),
    ] = False,
    compiler: Annotated[
        Compiler, typer.Option(help="Of --gpu: what runs the planned graphs.")
    ] = Compiler.INDUCTOR,
    out: Annotated[
        Path | None,
        typer.Option(help="Of --gpu: write what was found as JSON.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Look at what autoremat rests on here: see `commands.doctor` and `commands.doctor_gpu`."""
    if gpu:
        run_and_exit("doctor_gpu", compiler=compiler, out=out, as_json=as_json, force=force)
    if out is not None:
        raise typer.BadParameter("goes with --gpu.", param_hint="--out")
    run_and_exit("doctor", as_json=as_json)
