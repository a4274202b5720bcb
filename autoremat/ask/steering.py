"""What users ask of a plan besides a budget: a strategy by name, constraints, a stored plan.

Enters: the arguments `policy`, `save`, `recompute`, `repeatable`, `plan`, `known_plan`. Leaves: a
`Steering`. Guarantees: what cannot be done as asked raises `SteeringError`, and is never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import fspath
from pathlib import Path

from torch import nn

from autoremat.ask.plan_file import StoredPlan, digest, read
from autoremat.ask.policy import OPTIMAL, Policy, parse_policy
from autoremat.errors import PlanMismatch, SteeringError
from autoremat.graph.modules import has_repeated_layers
from autoremat.graph.selectors import (
    Selection,
    Selector,
    is_known_operator,
    parse_selectors,
    require_modules,
)


@dataclass(frozen=True)
class Steering:
    """What the user asked for.

    Attributes:
        policy: which strategy decides.
        selectors: what to save, what to recompute, and what may run again although it need not
            give what it gave before.
        plan: a plan to apply as it is.
        plan_path: where it was read from.
        known: a plan to take for the graphs that it is of, where that fits; others are searched.
        model_is_known: whether module patterns were compared with the model already.
    """

    policy: Policy = OPTIMAL
    selectors: tuple[Selector, ...] = ()
    plan: StoredPlan | None = None
    plan_path: str = ""
    known: StoredPlan | None = None
    model_is_known: bool = False

    @property
    def choice(self) -> str:
        """The argument that decides the plan; "" where the planner searches."""
        if self.plan is not None:
            return f'plan="{self.plan_path}"'
        return str(self.policy) if self.policy.is_fixed else ""

    def asked(self) -> dict[str, str]:
        """By argument, in words that can be compared; of a plan, what is in it."""
        by_keyword = {
            keyword: ", ".join(s.text for s in self.selectors if s.keyword == keyword) or "None"
            for keyword in ("save", "recompute", "repeatable")
        }
        plans = {"plan": self.plan, "known_plan": self.known}
        files = {
            keyword: "None" if plan is None else f"a file with digest {digest(plan)}"
            for keyword, plan in plans.items()
        }
        return {"policy": self.policy.name, **by_keyword, **files}

    @property
    def decided(self) -> tuple[Selector, ...]:
        """What is to be saved, and what is to be recomputed."""
        return tuple(s for s in self.selectors if s.keyword != "repeatable")

    @property
    def repeatable(self) -> tuple[Selector, ...]:
        """What may run again."""
        return tuple(s for s in self.selectors if s.keyword == "repeatable")

    @property
    def must_match(self) -> tuple[Selector, ...]:
        """Selectors that have to match something in the step's first graph."""
        return tuple(s for s in self.decided if s.is_operator or not self.model_is_known)

    def of(self, *models: nn.Module) -> Steering:
        """The same, compared with the model, or with several that are trained together.

        Raises:
            SteeringError: if none of them has such modules, or layers.
        """
        require_modules(self.selectors, *models)
        if self.policy.layers and not any(map(has_repeated_layers, models)):
            raise SteeringError(
                f"{self.policy} finds no repeated layers: no ModuleList or Sequential of the "
                'model has two children of one class. Use policy="sqrt", which cuts between '
                "operations."
            )
        return replace(self, model_is_known=True)


def parse_steering(
    *,
    policy: str,
    save: Selection,
    recompute: Selection,
    repeatable: Selection,
    plan: str | Path | None,
    known_plan: str | Path | None,
    compiler: str,
) -> Steering:
    """What the arguments of these names ask for.

    Raises:
        ValueError: naming the argument at fault.
        OSError: if the plan's file cannot be read.
    """
    given = {"save": save, "recompute": recompute, "repeatable": repeatable}
    selectors = tuple(s for keyword, one in given.items() for s in parse_selectors(keyword, one))
    for selector in selectors:
        if selector.keyword == "repeatable" and is_known_operator(selector):
            raise SteeringError(
                f"{selector} is neither a collective nor a custom operator: it runs again where "
                "that gives what it gave before, and nowhere else. Drop it, or name one of those."
            )
    strategy = parse_policy(policy)
    if plan is None:
        return Steering(strategy, selectors, known=_known(known_plan, compiler))
    if known_plan is not None:
        raise SteeringError("plan= says what is done with all graphs: drop known_plan=.")
    if strategy.is_fixed or any(s.keyword != "repeatable" for s in selectors):
        raise SteeringError(
            "plan= says what is saved and recomputed by itself: drop policy=, save= and recompute=."
        )
    path = _path(plan, "plan")
    stored = read(path)
    if stored.compiler != compiler:
        raise PlanMismatch(
            f'{path} was made for compiler="{stored.compiler}", whose graphs are not those of '
            f'compiler="{compiler}": pass compiler="{stored.compiler}", or plan again.'
        )
    return Steering(selectors=selectors, plan=stored, plan_path=path)


def _known(plan: str | Path | None, compiler: str) -> StoredPlan | None:
    """A plan of which what can be taken is taken; of another compiler's graphs, nothing can."""
    stored = None if plan is None else read(_path(plan, "known_plan"))
    return stored if stored is not None and stored.compiler == compiler else None


def _path(given: object, keyword: str) -> str:
    try:
        return str(fspath(given))  # type: ignore[call-overload]
    except TypeError:
        raise SteeringError(
            f"{keyword}= is the path of a stored plan, not {given!r:.80}."
        ) from None
