"""One graph, one plan: on all ranks of a job, and in later processes on this machine.

Enters: a stated graph, what is asked of its plan, and a search. Leaves: a `Choice`. Guarantees:
those of `found_before`; an answer that is none of this graph is not taken, and a plan above the
budget is kept for later processes only if the search for it was not cut short.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat_solver import Plan, Problem, Solution, check, simulate
from autoremat_solver.plan import Status

from autoremat.planning.asked import saved_names
from autoremat.planning.choice import TORCH, Alone, Baseline, Choice, Modules, written_out
from autoremat.planning.found_before import answer
from autoremat.planning.identity import in_words
from autoremat.planning.known_readings import read_once
from autoremat.planning.simulated import simulated_baseline
from autoremat.planning.torch_own import Unplanned
from autoremat.planning.torch_plan import TorchPlan
from autoremat.problem.shell import closed, in_texts
from autoremat.problem.subject import Subject


@dataclass(frozen=True)
class Found:
    """What a search has found, its peaks, and what is proven of it.

    Attributes:
        schedule: the steps in their order, as `in_texts` writes them.
        saved: names of what the backward receives, sorted.
        method: the strategy that found it.
        peak_nbytes: as of `Choice`.
        needed_nbytes: as of `Choice`.
        fits: as of `Choice`.
        code_us: as of `Choice`.
        in_order: as of `Choice`.
        baseline_time_us: as `Choice` tells it.
        status: as of `Solution`, as what follows.
        alone: time, peak, and whether that fits, as of `Choice`; empty where there is none.
        failed: as of `Alone`.
    """

    schedule: list[str]
    saved: list[str]
    method: str
    peak_nbytes: int
    needed_nbytes: int
    fits: bool
    code_us: float | None
    in_order: bool
    baseline_time_us: float
    status: str
    bound_us: float
    floor_nbytes: int
    tried: list[str]
    left_out: list[str]
    alone: list[float]
    failed: str

    @classmethod
    def of(cls, choice: Choice) -> Found:
        """The plan of a choice."""
        solution, alone = choice.solution, choice.alone
        return cls(
            schedule=list(in_texts(solution.plan)),
            saved=list(saved_names(choice.backward)),
            method=choice.method,
            peak_nbytes=choice.peak_nbytes,
            needed_nbytes=choice.needed_nbytes,
            fits=choice.fits,
            code_us=choice.code_us,
            in_order=choice.in_order,
            baseline_time_us=choice.baseline_time_us(),
            status=solution.status.value,
            bound_us=solution.bound_us,
            floor_nbytes=solution.floor_nbytes,
            tried=list(solution.tried),
            left_out=list(solution.left_out),
            alone=[alone.time_us, alone.peak_nbytes, alone.fits] if alone else [],
            failed=alone.failed if alone else "",
        )

    def is_last_word(self, budget_nbytes: int) -> bool:
        """Whether a search with more time would find no plan within the budget either.

        A busy machine must not decide for later processes that a step is above its budget, nor a
        failure that no value leaves.
        """
        if self.failed:
            return False
        return self.fits or not self.left_out or self.floor_nbytes > budget_nbytes


def choose_once(
    subject: Subject, budget_nbytes: int, asked: str, search: Callable[[], Choice], *, reads: bool
) -> Choice:
    """What was found for this question before, or what a search finds.

    Args:
        subject: the graph.
        budget_nbytes: of the whole step.
        asked: what else decides the plan, in words.
        search: finds a plan.
        reads: whether peaks are read from generated code.
    """
    stated = f"{in_words(subject)}, {reads}"
    own: list[Choice] = []

    def searched() -> Found:
        own.append(search())
        return Found.of(own[0])

    question = f"{stated}, {budget_nbytes}, {asked}"
    found = answer(
        question,
        Found,
        searched,
        subject.device,
        is_worth_keeping=lambda new: new.is_last_word(budget_nbytes),
    )
    choice = own[0] if own and Found.of(own[0]) == found else None
    choice = choice or _applied(subject, found, reads=reads)
    choice = choice or (own[0] if own else search())
    known = functools.partial(answer, stated, Baseline, choice.baseline, subject.device)
    return replace(choice, baseline=functools.cache(known))


def _applied(subject: Subject, found: Found, *, reads: bool) -> Choice | None:
    """A plan that was found before; None where it is none of this graph."""
    unplanned = Unplanned(subject)
    simulated = functools.partial(simulated_baseline, subject)
    written = _written(subject, found, unplanned)
    if written is None:
        return None
    modules, problem, plan, torchs = written
    if list(saved_names(modules[1])) != found.saved:
        return None
    solution = Solution(
        plan=plan,
        timeline=simulate(problem, plan),
        status=Status(found.status),
        bound_us=found.bound_us,
        floor_nbytes=found.floor_nbytes,
        method=found.method,
        seconds=0.0,
        tried=tuple(found.tried),
        left_out=tuple(found.left_out),
    )
    return Choice(
        *modules,
        found.method,
        solution,
        found.peak_nbytes,
        found.needed_nbytes,
        found.fits,
        baseline=unplanned.baseline if reads else simulated,
        baseline_time_us=lambda: found.baseline_time_us,
        is_read=reads,
        torchs=torchs,
        code_us=found.code_us,
        in_order=found.in_order,
        alone=_alone(*found.alone, failed=found.failed) if found.alone else None,
        asked=read_once(subject, *modules).asked if reads and _is_gpu(subject) else None,
    )


def _alone(time_us: float, peak_nbytes: float, fits: float, *, failed: str) -> Alone:
    return Alone(time_us, int(peak_nbytes), bool(fits), failed)


def _is_gpu(subject: Subject) -> bool:
    return subject.device.type == "cuda"


def _written(
    subject: Subject, found: Found, unplanned: Unplanned
) -> tuple[Modules, Problem, Plan, TorchPlan | None] | None:
    """The plan written out, and what it is a plan of."""
    problem = subject.lowered.problem
    if found.method == TORCH:
        own = unplanned.own
        if own is None:
            return None
        return (own.forward, own.backward), own.problem, own.torchs.plan, own.torchs
    plan = closed(problem, tuple(found.schedule))
    host_nbytes = subject.host.free_nbytes if subject.host is not None else None
    if check(problem, plan, host_budget_nbytes=host_nbytes):
        return None
    return written_out(subject, plan, in_order=found.in_order), problem, plan, None
