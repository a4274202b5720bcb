"""`selective_checkpoints`, as users call it.

Enters: a model, perhaps on the `meta` device, a batch of any contents, a budget. Leaves: a
`SelectivePolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.ask.options import Options
from autoremat.comparison.layers import repeated_layers
from autoremat.errors import InfeasibleBudget
from autoremat.memory.fake_twin import Faker
from autoremat.memory.optimizers import require_optimizer_of
from autoremat.memory.residents import Resident, resident_of_twin
from autoremat.offline.asking import place_of, require_trainable
from autoremat.selective.policy import BlockPolicy, OperatorCall, SelectivePolicy
from autoremat.selective.search import Found, Search
from autoremat.selective.trial import Choice, Outcome, Region, Trial

_NO_LOSS = "the loss is outside of the model and takes nothing, which that of many classes does."


def selective_checkpoints(
    model: nn.Module,
    *inputs: Any,
    budget: str | int,
    device: str | torch.device | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    blocks: Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
    time_limit: float = 30.0,
    **keywords: Any,
) -> SelectivePolicy:
    """What selective checkpoints around a model's blocks are to save, without running a step.

    For models that are not compiled: eager mode, with `torch.utils.checkpoint`. Model and batch may
    be on the `meta` device. The step that is planned calls the model once, begins with no
    gradients, and has its loss from the model, or one outside that takes nothing.

    Args:
        model: the module, in train mode.
        inputs: the batch's positional part; tensors of the sizes to plan for.
        budget: peak of everything that the step holds on the device; as for `optimize`, but not of
            what is reserved.
        device: "cpu" or "cuda"; where the model is if not given, which then must not be `meta`.
        optimizer: of the model's parameters; with it, the state that it holds or creates counts.
        blocks: names of the modules that may run in checkpoints; if not given, neighbours of one
            class in a `ModuleList` or `Sequential`.
        autocast: the type to which the forward is under autocast, as `torch.bfloat16`.
        time_limit: seconds to try choices, beside what measuring operators takes.
        keywords: the batch's keyword part.

    Raises:
        ValueError: for a malformed budget, a device that is not here, blocks that the model has not
            or that cannot run again, a model in eval mode or without a parameter that needs a
            gradient, another model's optimizer.
        InfeasibleBudget: if nothing that was tried fits; it names the smallest of these peaks.
    """
    require_trainable(model)
    require_optimizer_of(model, optimizer)
    place = place_of(model, device)
    if place.spec is not None:
        raise ValueError(
            f"device={str(device)!r} is not here, and eager mode is followed where it would run: "
            'give "cpu" or "cuda".'
        )
    options = Options.parse(budget=budget, compiler="eager", time_limit=time_limit, verbose=False)
    names = _blocks_of(model, blocks)
    faker = Faker(place.home)
    twin, batch = faker.model(model), faker.values((inputs, keywords))
    resident = resident_of_twin(twin, batch, model, optimizer, place.home)
    trial = Trial(faker, twin, batch, autocast)
    search = Search(trial, _leanest(trial, names, is_named=blocks is not None), time_limit)
    return _best(search, resident, options.budget_nbytes(place.home))


def _best(search: Search, resident: Resident, budget_nbytes: int) -> SelectivePolicy:
    """The fastest within the budget; where that is as little as can be, what peaks lowest."""
    least_nbytes = _peak_nbytes(search.smallest.outcome, resident)
    wanted_nbytes = budget_nbytes or least_nbytes
    if least_nbytes > wanted_nbytes:
        raise InfeasibleBudget(wanted_nbytes, least_nbytes, resident.nbytes, resident.parts)
    found = search.within(wanted_nbytes - resident.nbytes)
    assert found is not None, "the smallest is within the budget"
    return _policy(found, search.lean, resident, wanted_nbytes)


def _policy(found: Found, lean: Found, resident: Resident, budget_nbytes: int) -> SelectivePolicy:
    regions = found.outcome.regions
    return SelectivePolicy(
        tuple(
            BlockPolicy(block, tuple(sorted(saved)), tuple(_recomputed(regions[block])))
            for block, saved in found.choice.items()
        ),
        _peak_nbytes(found.outcome, resident),
        budget_nbytes,
        resident.nbytes,
        found.outcome.time_us,
        found.outcome.extra_us,
        () if found.outcome.has_loss else (_NO_LOSS,),
    )


def _peak_nbytes(outcome: Outcome, resident: Resident) -> int:
    """Of the step, its optimizer included."""
    after_nbytes = outcome.end_nbytes + resident.transient_nbytes
    return resident.nbytes + max(outcome.peak_nbytes, after_nbytes)


def _recomputed(region: Region) -> list[OperatorCall]:
    return list(dict.fromkeys(seen.call for seen in region.again if seen.nbytes))


def _blocks_of(model: nn.Module, given: Sequence[str] | None) -> list[str]:
    """Names of the blocks that may run in checkpoints.

    Raises:
        ValueError: if there are none.
    """
    if given is not None:
        modules = dict(model.named_modules())
        unknown = [name for name in given if name not in modules]
        if unknown or isinstance(given, str):
            raise ValueError(f"blocks={given!r} are names of modules, as named_modules() has them.")
        nested = [n for n in given for outer in given if n.startswith(f"{outer}.")]
        if nested:
            raise ValueError(f"blocks={given!r}: {nested[0]!r} is a part of another one.")
        for name in given:
            if why := _not_again(modules[name]):
                raise ValueError(f"{name!r} cannot run in a checkpoint: {why}.")
        return list(dict.fromkeys(given))
    places = [place for run in repeated_layers(model) for place in run]
    places = list({id(place.layer): place for place in reversed(places)}.values())[::-1]
    found = [place.path for place in places if not _not_again(place.layer)]
    if not found:
        whys = list(dict.fromkeys(_not_again(place.layer) for place in places))
        why = f": {whys[0]}" if whys else " in a ModuleList or Sequential"
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks that can run in checkpoints{why}. Name "
            "the modules that can: blocks=[...]."
        )
    return found


def _not_again(block: nn.Module) -> str:
    """Why a block must not run twice in a step; "" if it may."""
    for name, part in block.named_modules():
        if getattr(part, "track_running_stats", False) and part.training:
            return f"{name or type(part).__name__} would count each batch twice in its statistics"
        if getattr(part, "gradient_checkpointing", False) is True:
            return f"{name or type(part).__name__} does so already (gradient_checkpointing)"
    return ""


def _leanest(trial: Trial, blocks: Sequence[str], *, is_named: bool) -> Choice:
    """What each block that runs has to save, in their order, as a step shows that saves nothing.

    Raises:
        ValueError: if a block cannot run again, or the step asks for contents of tensors.
    """
    try:
        trial.run({})
    except (_torch.DataDependentOutput, _torch.DynamicOutputShape) as error:
        raise ValueError(
            "The step cannot be followed without being run: it depends on what "
            f"{error.func} returns."
        ) from error
    saves_nothing: Choice = dict.fromkeys(blocks, frozenset[OperatorCall]())
    try:
        regions = trial.run(saves_nothing).regions
    except RuntimeError as error:
        raise ValueError(
            "The blocks cannot run again in the backward, as checkpoints let them: what they "
            "compute then is not what it was. Is there a cache of keys and values "
            "(use_cache=False), or does a block write to what it is given? torch says: "
            f"{error}"
        ) from error
    idle = [block for block in blocks if block not in regions]
    if idle and is_named:
        raise ValueError(f"blocks= names {', '.join(idle)}: the step does not call it.")
    trial.prices.measure()
    return {block: frozenset(_must_save(block, region, trial)) for block, region in regions.items()}


def _must_save(block: str, region: Region, trial: Trial) -> Iterator[OperatorCall]:
    if region.writes_outside:
        raise ValueError(
            f"{block!r} cannot run in a checkpoint: it writes to a buffer, or to what it is given, "
            "and would do so twice. Name the modules that can: blocks=[...]."
        )
    for seen in region.first:
        if trial.prices.draws_apart(seen.key):
            if seen.is_written:
                raise ValueError(
                    f"{block!r} cannot run in a checkpoint: {seen.call.operator} draws from a "
                    "generator of its own, whose state no checkpoint restores."
                )
            yield seen.call
