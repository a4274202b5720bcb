"""The command line: `autoremat solve`, `autoremat verify`, `autoremat show`.

Enters: arguments. Leaves: a result on stdout, messages on stderr, and an exit code: 0 for success,
1 for input that cannot be used, 2 for a budget that no plan found fits, 3 for a verification that
failed, 130 after Ctrl-C.
Guarantees: importing this needs no torch; a command imports what it needs when it runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autoremat.commands.interrupt import INTERRUPTED, SENTENCE, leaving_at_once
from autoremat.dropout_policy import DropoutPolicy

BAD_INPUT, INFEASIBLE, DIFFERENT = 1, 2, 3

# One line per paragraph: typer keeps the line breaks inside them.
_SOLVE_HELP = "\n\n".join(
    [
        "Plan which operations of a graph to run again, so that its peak fits a budget.",
        "[bold]PROBLEM[/] is a JSON file: a networkx node-link graph with [bold]time[/] and "
        "[bold]nbytes[/] per node (and perhaps [bold]phase[/], forward or backward), or a problem "
        "in autoremat's own schema. An edge leads from a producer to its reader.",
        "The baseline is the graph without recompute: every operation once, in the file's order.",
        "[bold]Examples[/]",
        "  autoremat solve graph.json --budget 60%",
        "  autoremat solve graph.json --budget 12GiB --out plan.json",
        "  autoremat solve graph.json --budget 123456 --json",
        "  autoremat solve graph.json --pareto --time-limit 120",
        "[bold]Exit codes[/]",
        "  0  a plan within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

_VERIFY_HELP = "\n\n".join(
    [
        "Check on one training step that the gradients are those of eager mode and that the "
        "measured peak is within a budget.",
        "[bold]TARGET[/] is [bold]path/to/file.py:function[/] or "
        "[bold]package.module:function[/]. The function takes no arguments and returns "
        "(model, inputs) or (model, inputs, loss_fn): inputs is a tensor, a tuple of tensors "
        "(positional) or a dict of them (keywords); without loss_fn(output) the model returns its "
        "loss, or an output with .loss. It runs as a script of yours does.",
        "The step runs once in eager mode as well, so it has to fit without a plan.",
        "[bold]Examples[/]",
        "  autoremat verify examples/train_gpt.py:make --budget 150MiB",
        "  autoremat verify my_package.models:small --budget 80%",
        "  autoremat verify model.py:make --budget 12GiB --compiler eager --json",
        "[bold]Exit codes[/]",
        "  0  the same results, within the budget",
        "  1  input that cannot be used",
        "  2  no plan found fits the budget",
        "  3  a difference, or a measured peak above the budget",
        "  130  interrupted with Ctrl-C",
    ]
)

_SHOW_HELP = "\n\n".join(
    [
        "Print a stored report, or write it as a page, a table, a snapshot or a trace.",
        "[bold]REPORT[/] is the JSON that [bold]autoremat.report(model).to_json()[/] gives. "
        "PyTorch is not needed.",
        "An output file that is there is replaced if this command wrote it; another one is kept, "
        "unless --force is given.",
        "[bold]Examples[/]",
        "  autoremat show report.json",
        "  autoremat show report.json --html report.html",
        "  autoremat show report.json --snapshot plan.pickle    (https://pytorch.org/memory_viz)",
        "  autoremat show report.json --trace plan.json    (https://ui.perfetto.dev)",
        "  autoremat show report.json --csv values.csv --json",
        "[bold]Exit codes[/]",
        "  0  shown",
        "  1  input that cannot be used, or an output that cannot be written",
        "  130  interrupted with Ctrl-C",
    ]
)


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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(help=_SOLVE_HELP, no_args_is_help=True)
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
    try:
        with leaving_at_once():
            from autoremat.commands.solve import run

        code = run(problem, budget, pareto=pareto, out=out, as_json=as_json, time_limit=time_limit)
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command(help=_VERIFY_HELP, no_args_is_help=True)
def verify(
    target: Annotated[
        str, typer.Argument(help="The function that makes model and batch.", metavar="TARGET")
    ],
    budget: Annotated[
        str,
        typer.Option(
            help="Highest peak allowed: 12GiB, 1.5GB, 123456 (bytes), or 80% of the device's "
            "memory.",
            show_default=False,
        ),
    ],
    compiler: Annotated[
        Compiler, typer.Option(help="What runs the planned graphs; eager compiles fast.")
    ] = Compiler.INDUCTOR,
    dropout: Annotated[
        DropoutPolicy | None,
        typer.Option(
            help="Draw random numbers again where that is safe, or keep what was drawn; without "
            "it, the safe choice for the device.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the table.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for the solver, per graph.", min=0.0)
    ] = 30.0,
) -> None:
    """Load, plan, compare, print: see `commands.verify`."""
    try:
        with leaving_at_once():
            from autoremat.commands.verify import run

        code = run(
            target,
            budget,
            compiler=compiler,
            dropout=dropout,
            as_json=as_json,
            time_limit=time_limit,
        )
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command(help=_SHOW_HELP, no_args_is_help=True)
def show(
    report: Annotated[Path, typer.Argument(help="The report, as JSON.", metavar="REPORT")],
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained page here.", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the values as a table.", show_default=False)
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write a memory snapshot for PyTorch's viewer.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in place of the text.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that this command did not write.")
    ] = False,
) -> None:
    """Read, render, print: see `commands.show`."""
    outputs = {"html": html, "csv": csv, "snapshot": snapshot, "trace": trace}
    try:
        with leaving_at_once():
            from autoremat.commands.show import run

        paths = {name: path for name, path in outputs.items() if path is not None}
        code = run(report, paths, as_json=as_json, force=force)
    except KeyboardInterrupt:
        typer.echo(SENTENCE, err=True)
        code = INTERRUPTED
    raise typer.Exit(code)
