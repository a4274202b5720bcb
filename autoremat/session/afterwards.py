"""What is asked of a graph after it was compiled, as if it was being compiled still.

Enters: a graph as Dynamo handed it over, its plan, and the user's options. Leaves: what generated
code has to be read for: the peak without a plan, and other plans that fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.inductor.hook import configured
from autoremat.planning.choice import Baseline, Choice
from autoremat.planning.nesting import placed
from autoremat.planning.part import Part
from autoremat.planning.rivals import rivals
from autoremat.planning.sizes import sizes_of

Found = TypeVar("Found")


def afterwards(
    ask: Callable[[], Found], graph: Callable[[], _torch.DynamoGraph | None], options: Options
) -> Found:
    """The answer of a question that needs the compile of a graph.

    Args:
        ask: the question.
        graph: finds the graph; None while it is being compiled.
        options: what the session was asked for.
    """
    found = graph()
    if found is None:
        return ask()
    with configured(options.inductor), found.resumed():
        return ask()


def with_later_baseline(
    choice: Choice, graph: Callable[[], _torch.DynamoGraph | None], options: Options
) -> Choice:
    """The choice, whose peak without a plan may be asked for at any time.

    Where that cannot be told, only the time is: a report is no place to fail.
    """

    def baseline() -> Baseline:
        try:
            return afterwards(choice.baseline, graph, options)
        except Exception:
            return Baseline(0, choice.baseline_time_us())

    return replace(choice, baseline=baseline)


def rivals_of(
    part: Part, budget_nbytes: int, most: int, graph: _torch.DynamoGraph, options: Options
) -> list[Choice]:
    """Other choices for a planned graph, beside what its own was made beside; see `rivals`.

    There are none where sizes vary from step to step: what one step takes says nothing of another.
    """
    if sizes_of(part.subject):
        return []
    chosen = part.choice
    lowered = placed(part.subject.lowered, part.planned.whole.counted)
    ask = functools.partial(
        rivals, replace(part.subject, lowered=lowered), budget_nbytes, options.setting, chosen, most
    )
    return [
        replace(rival, baseline=chosen.baseline, baseline_time_us=chosen.baseline_time_us)
        for rival in afterwards(ask, lambda: graph, options)
    ]
