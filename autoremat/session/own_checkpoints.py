"""What the user's own checkpoints cost a step that they are in.

Enters: `Steps` that are planned. Leaves: a sentence with both times and the remedy, or none.
Guarantees: it is found when a report asks for it, and nothing of the step changes by that; of what
cannot be compared nothing is told: a plan that the user chose, one that is about to be replaced,
values that wait elsewhere, graphs that run more than once, and checkpoints that Dynamo left to
eager mode, of whose reruns no plan decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from autoremat.planning.nesting import Beside
from autoremat.planning.part import Part
from autoremat.planning.uncheckpointed import WORTH, Place
from autoremat.session.steps import Steps
from autoremat.units import format_us_apart

_log = logging.getLogger(__name__)


def cost_of_checkpoints(steps: Steps) -> str | None:
    """What they cost and what to do; None if that is little, or not known.

    Args:
        steps: what is planned.
    """
    try:
        return _told(steps)
    except Exception:  # what is only told may cost nobody their report
        _log.debug("autoremat: nothing is known of your own checkpoints", exc_info=True)
    return None


def _told(steps: Steps) -> str | None:
    found = _comparable(steps)
    places = _places(steps, found)
    if not places:
        return None
    graphs = {name: part.planned.whole.uncheckpointed for name, (part, _) in found.items()}
    limit_s = steps.options.setting.time_limit_s / len(places)  # a trainer may wait for a report
    now_us, once_us, free_us = (
        math.fsum(times)
        for times in (
            (graph.now_us for graph in graphs.values()),
            (graph.once_us for graph in graphs.values()),
            (
                graph.free_us(places[name], limit_s) if name in places else graph.now_us
                for name, graph in graphs.items()
            ),
        )
    )
    if now_us <= (1 + WORTH) * free_us:
        return None
    return _sentence(now_us, free_us, once_us)


def _sentence(now_us: float, free_us: float, once_us: float) -> str:
    now, free = format_us_apart(now_us, free_us)
    return (
        "Your own checkpoints cost more than they have to: leave out torch.utils.checkpoint, or "
        "gradient_checkpointing_enable(). Within this budget autoremat then recomputes "
        f"{free_us / once_us - 1:.1%} of a step in place of {now_us / once_us - 1:.1%}: its "
        f"operations take {free} instead of {now}."
    )


def _comparable(steps: Steps) -> Mapping[str, tuple[Part, Beside]]:
    """The graphs of a step in which each runs once, with what is held beside it; else none."""
    graphs, setting = steps.graphs, steps.options.setting
    is_chosen = bool(setting.steering.choice) or setting.offload is not None
    if is_chosen or graphs.provisional:
        return {}
    beside, parts = graphs.beside(steps.surroundings.now), graphs.current
    are_once = sorted(graphs.graphs) == sorted(beside) and len(parts) == len(beside)
    if not are_once or any(part.is_run_again or part.is_kept for part in parts):
        return {}
    pairs = zip(beside.items(), parts, strict=True)
    return {name: (part, found) for (name, found), part in pairs}


def _places(steps: Steps, graphs: Mapping[str, tuple[Part, Beside]]) -> Mapping[str, Place]:
    """Of the graphs with checkpoints: what one keeps, others have beside them."""
    marked = {n: one for n, one in graphs.items() if one[0].subject.constraints.checkpointed}
    budget_nbytes, room_nbytes = steps.budget_nbytes, steps.surroundings.now.room_nbytes
    if len(graphs) == 1:
        return {
            name: Place(found, part.peak_nbytes(found), budget_nbytes, room_nbytes)
            for name, (part, found) in marked.items()
        }
    spare_nbytes = max(0, budget_nbytes - steps.peak_nbytes)
    share_nbytes = spare_nbytes // max(1, len(marked))
    own_nbytes = budget_nbytes - (spare_nbytes - share_nbytes)
    return {
        name: Place(found, part.peak_nbytes(found), own_nbytes, room_nbytes, share_nbytes)
        for name, (part, found) in marked.items()
    }
