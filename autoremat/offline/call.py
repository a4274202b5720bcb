"""`plan`, as users call it.

Enters: a model, perhaps on the `meta` device, a batch of any contents, a budget. Leaves: a
`Report`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoremat.ask.budget import Budget
from autoremat.ask.hosts import told_of
from autoremat.ask.options import THROUGHPUT, Offline, Options
from autoremat.ask.plan_file import write
from autoremat.graph.selectors import Selection
from autoremat.offline.asking import options_for, place_of, require_trainable, reserved_limit
from autoremat.offline.reserved_budget import within_reserved
from autoremat.offline.step import OfflineStep, planned
from autoremat.reporting import ASSUMED, Fact, Report
from autoremat.setup.applied import run_of
from autoremat.setup.asked import TrainingSetup


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: str | int | None = None,
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    setup: TrainingSetup | None = None,
    compiler: str = "inductor",
    policy: str = "optimal",
    save: Selection = None,
    recompute: Selection = None,
    repeatable: Selection = None,
    save_to: str | Path | None = None,
    offload: str | int | None = None,
    link: str | float | None = None,
    time_limit: float = 30.0,
    verbose: bool = True,
    curve: int = 0,
    code: bool = True,
    sizes: Any = None,
    goal: str = "time",
    **keywords: Any,
) -> Report:
    """The plan of a training step, without running it.

    Model and batch may be on the `meta` device: only sizes matter. For a GPU that is not here,
    operations are estimated by its data sheet. With triton installed (`autoremat[gpu]`) attention
    is the one that torch takes on that GPU, and the peak is read from the code that Inductor
    generates for it; without it, and with `compiler="eager"`, the graph is the CPU's and the peak
    the model's. The report says which.

    Args:
        model: the module, in train mode.
        inputs: the batch's positional part; tensors of the sizes to plan for.
        budget: as for `optimize`; a percentage is of the memory of `device`. For a GPU it may be
            of what CUDA's allocator reserves, which is what "out of memory" is about:
            "75GB reserved", "95% reserved". Then several plans are made, up to six, each within
            `time_limit`.
        device: "cpu", "cuda", a name such as "H100" or "A100 40GB", or a file that
            `autoremat doctor --gpu --out` has exported on a GPU, "card.json"; where the model is
            if not given, which then must not be `meta`.
        optimizer: of the model's parameters, or its name, "AdamW8bit" or "SGD-momentum"; with it,
            the state that it holds or creates counts.
        setup: precision, adapters, sharding and what else the run has that this model has not. A
            copy of the model is planned for it. The report's `assumed` says what follows.
        compiler: "inductor" or "eager".
        policy: as for `optimize`.
        save: as for `optimize`.
        recompute: as for `optimize`.
        repeatable: as for `optimize`.
        save_to: where to store the plan, for `optimize(model, plan=...)`.
        offload: where values may wait, as for `optimize`; beside a GPU that is not here "auto" is
            90 % of what this machine has free.
        link: how they get there from a GPU that is not here: "pcie3", "pcie4", "pcie5",
            "nvlink-c2c" or bytes per second each way; its own by its data sheet, if not given.
        time_limit: seconds to choose a plan, per graph. Under Inductor the code that it would
            generate is read meanwhile; that cannot be cut short, and however late it is, lean
            plans are read until one fits.
        verbose: show progress and one summary line.
        curve: how many budgets to plan for beside this one, for the report's curve of peak and
            time; 0 for none, else at least 2. They take a third of `time_limit` more.
        code: whether code that Inductor generates for a GPU that is not here is read. Without, the
            plan takes less than half of the time, and its peak is that of a model of the code.
        sizes: as for `optimize`: one plan for a range of sizes, made for the largest; the batch is
            an example of it. The report says how far it is proven (`Sizes`), and gives the peak as
            a formula.
        goal: as for `optimize`. Inputs of the model's own that are called as an argument of this
            function go in by their position.
        keywords: the batch's keyword part.

    Raises:
        ValueError: for a malformed budget, compiler, device or policy, for patterns that match
            nothing, an offload or a link that does not go with the rest, a setup that the model
            cannot have, a model in eval mode or without a parameter that needs a gradient, another
            model's optimizer, and a step in which nothing can be planned.
        InfeasibleBudget: if no plan fits; `OverReserved` if none does that was tried for a budget
            of what is reserved.
    """
    _require_curve(curve)
    given = None if budget is None else Budget.parse(budget)
    require_trainable(model)
    place = place_of(model, device)
    limit_nbytes = reserved_limit(given, place)
    run = run_of(model, (inputs, dict(keywords)), optimizer, setup, place.runs_on)
    options = options_for(
        run.model,
        place,
        run.optimizer,
        budget=budget if limit_nbytes is None else limit_nbytes,
        compiler=compiler,
        policy=policy,
        save=save,
        recompute=recompute,
        repeatable=repeatable,
        offload=offload,
        link=link,
        time_limit=time_limit,
        verbose=verbose,
        sizes=sizes,
        goal=goal,
    )
    _require_together(options, offload, of_reserved=limit_nbytes is not None, save_to=save_to)
    options = options if code else options.without_reading()
    offline = Offline(
        curve,
        time_limit / 3,
        has_gradients=run.has_gradients,
        autocast=run.autocast,
        window_nbytes=run.window_nbytes,
    )
    step = OfflineStep(run.model, run.inputs, run.optimizer, place.home, offline)
    if limit_nbytes is None:
        made = planned(options, step)
    else:
        made = within_reserved(limit_nbytes, options, step)
    if save_to is not None:
        write(made.session.stored_plan(), save_to)
    host = options.setting.offload
    told = run.assumed if host is None else (*run.assumed, told_of(host))
    assumed = (Fact(ASSUMED, sentence) for sentence in told if sentence)
    return replace(made.report, facts=(*made.report.facts, *assumed))


def _require_curve(points: int) -> None:
    if points < 0 or points == 1:
        raise ValueError(f"curve is {points}: a curve has two ends, give 0 or at least 2.")


def _require_together(
    options: Options, offload: str | int | None, *, of_reserved: bool, save_to: str | Path | None
) -> None:
    """Refuse what no plan can heed at once."""
    if of_reserved and options.goal == THROUGHPUT:
        raise ValueError(
            f'goal="{THROUGHPUT}" is told for budgets of what is allocated, not of what is '
            "reserved: leave one of the two out."
        )
    if options.setting.offload is not None and (of_reserved or save_to is not None):
        other = "a budget of what is reserved" if of_reserved else "save_to="
        raise ValueError(f"offload={offload!r} does not go with {other}: leave one of the two out.")
