"""A step of eager mode on tensors without contents: what it holds at its peak.

Enters: a twin of a model, its batch, and what checkpoints around its blocks are to save. Leaves: an
`Outcome`. Guarantees: autograd, checkpoints and modules are those of a real step, so that they hold
what they hold there, and as long; contents are missing, but for those that follow from sizes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autoremat import _torch
from autoremat.memory.fake_twin import Faker
from autoremat.memory.live_storages import LiveStorages
from autoremat.memory.storage_sizes import storage_identities, storage_sizes
from autoremat.selective.contents import contents_followed
from autoremat.selective.policy import BlockPolicy, Checkpoints, OperatorCall
from autoremat.selective.prices import Prices

Choice = Mapping[str, frozenset[OperatorCall]]
"""What is saved of each block that runs in a checkpoint, by the block's name."""


@dataclass
class Seen:
    """A call of an operator in a block.

    Attributes:
        call: which one.
        key: of its price.
        nbytes: of what it has made.
        time_us: what it takes.
        is_written: whether something is written into what it has made, or returned, afterwards.
    """

    call: OperatorCall
    key: Hashable
    nbytes: int
    time_us: float = 0.0
    is_written: bool = False


@dataclass
class Region:
    """What one block has run.

    Attributes:
        first: in its forward, in order.
        again: in the backward.
        writes_outside: whether it wrote into what it has not made.
    """

    first: list[Seen] = field(default_factory=list)
    again: list[Seen] = field(default_factory=list)
    writes_outside: bool = False


@dataclass(frozen=True)
class Outcome:
    """Of one step.

    Attributes:
        peak_nbytes: above what is resident.
        end_nbytes: what is held after the backward, above what is resident: gradients.
        time_us: of all operators.
        regions: what ran in checkpoints, by block; of a block that is called several times, all.
        has_loss: whether the model returns its loss.
    """

    peak_nbytes: int
    end_nbytes: int
    time_us: float
    regions: Mapping[str, Region]
    has_loss: bool

    @property
    def extra_us(self) -> float:
        """What running operators again takes."""
        again = (seen for region in self.regions.values() for seen in region.again)
        return math.fsum(seen.time_us for seen in again)


class Trial:
    """A step that can be tried under one choice after the other."""

    def __init__(
        self,
        faker: Faker,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        autocast: torch.dtype | None,
    ) -> None:
        """Of a twin.

        Args:
            faker: made the twin and its batch.
            model: the twin.
            inputs: the batch, positional and by keyword.
            autocast: the type to which the forward is under autocast, if it is.
        """
        self.prices = Prices()
        self._faker, self._model, self._inputs = faker, model, inputs
        self._autocast = autocast

    def run(self, choice: Choice) -> Outcome:
        """One step from no gradients."""
        step = _Step(self._faker.device, ignores_given=True, prices=self.prices)
        contexts = {
            block: partial(step.contexts, BlockPolicy(block, tuple(saved), ()))
            for block, saved in choice.items()
        }
        try:
            with (
                Checkpoints(self._model, contexts),
                self._faker.mode,
                contents_followed(),
                step,
                torch.enable_grad(),
            ):
                held = self._forward_and_backward()
                end_nbytes, has_loss = step.live_nbytes, loss_of(held) is not None
                del held
        finally:
            for tensor in self._leaves():
                tensor.grad = None
        unseen_nbytes = _generator_nbytes(self._faker.device, step.regions_begun)
        peak_nbytes = step.peak_nbytes + unseen_nbytes
        return Outcome(peak_nbytes, end_nbytes, step.time_us, step.regions, has_loss)

    def _leaves(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *_torch.tensor_leaves(self._inputs)]

    def _forward_and_backward(self) -> Any:
        args, keywords = self._inputs
        with torch.autocast(
            self._faker.device.type, self._autocast, enabled=self._autocast is not None
        ):
            output = self._model(*args, **keywords)
        loss = loss_of(output)
        if loss is not None:
            loss.backward()
        else:
            needed = [t for t in _torch.tensor_leaves(output) if t.requires_grad]
            # As much as a loss outside of the model hands back.
            torch.autograd.backward(needed, [torch.empty_like(t) for t in needed])
        return output


def loss_of(output: Any) -> torch.Tensor | None:
    """What a model returns as its loss: by that name, or alone or first and of one element."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    leaves = _torch.tensor_leaves(output)
    is_loss = bool(leaves) and leaves[0].numel() == 1 and leaves[0].requires_grad
    return leaves[0] if is_loss else None


def _generator_nbytes(device: torch.device, regions: int) -> int:
    """States of the CPU's generator: each checkpoint keeps one; a rerun, two more for a while."""
    if device.type != "cpu" or not regions:
        return 0
    return (regions + 2) * torch.get_rng_state().nbytes


@dataclass(eq=False)
class _Step(LiveStorages):
    """Counts what operators make and take for themselves, and notes who has run what.

    Attributes:
        prices: of operators.
        time_us: of all operators so far.
        regions: by block.
        regions_begun: how often a checkpoint has begun.
        makers: what has made a storage in a block, while it lives.
    """

    prices: Prices = field(default_factory=Prices)
    time_us: float = 0.0
    regions: dict[str, Region] = field(default_factory=dict)
    regions_begun: int = 0
    makers: dict[int, Seen] = field(default_factory=dict)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator; while it runs, it may hold more than what it returns."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        cost = self.prices.of(func, (args, kwargs or {}), result)
        within_nbytes = self.live_nbytes + cost.workspace_nbytes + cost.excess_nbytes
        self.peak_nbytes = max(self.peak_nbytes, within_nbytes)
        self.time_us += cost.time_us
        for key in storage_identities(written_by(func, args, kwargs or {})):
            if key in self.makers:
                self.makers[key].is_written = True
        return result

    def contexts(self, policy: BlockPolicy) -> tuple[Any, Any]:
        """Those of the policy, with one around each that sees what the region asks for."""
        self.regions_begun += 1
        region = self.regions.setdefault(policy.block, Region())
        first, again = policy.context_fn()
        saved = frozenset(policy.saved)
        return (
            _both(first, _Watch(self, region, region.first)),
            _both(again, _Watch(self, region, region.again, saved)),
        )

    def _freed(self, identity: int, number: int, nbytes: int) -> None:
        self.makers.pop(identity, None)
        super()._freed(identity, number, nbytes)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Any:
    with outer, inner:
        yield


class _Watch(_torch.TorchDispatchMode):
    """Sees the operators of one region, in the order in which its policy is asked for them."""

    def __init__(
        self,
        step: _Step,
        region: Region,
        found: list[Seen],
        served: frozenset[OperatorCall] = frozenset(),
    ) -> None:
        """Of a run that is given some of the results and computes the others."""
        super().__init__()
        self._step, self._region, self._found, self._served = step, region, found, served
        self._counts: Counter[str] = Counter()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Note the operator."""
        kwargs, step, name = kwargs or {}, self._step, str(func)
        call = OperatorCall(name, self._counts[name])
        self._counts[name] += 1
        existed = storage_identities(_torch.tensor_leaves((args, kwargs)))
        key = step.prices.key(func, (args, kwargs))
        result = func(*args, **kwargs)
        written = storage_identities(written_by(func, args, kwargs))
        made = {
            identity: nbytes
            for identity, nbytes in storage_sizes(_torch.tensor_leaves(result), step.device).items()
            if identity not in existed
        }
        self._made.update(made)
        if not written <= self._made:
            self._region.writes_outside = True
        if call in self._served:
            return result
        seen = Seen(call, key, sum(made.values()), step.prices.cost(key).time_us, bool(written))
        self._found.append(seen)
        step.makers.update(dict.fromkeys(made, seen))
        return result


def written_by(operator: Any, args: tuple, keywords: dict) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it says it writes to."""
    if not isinstance(operator, _torch.OpOverload) or not _torch.is_mutable(operator):
        return []
    found = []
    for position, argument in enumerate(_torch.arguments_of(operator)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if len(args) > position else keywords.get(argument.name)
            found += _torch.tensor_leaves(given)
    return found
