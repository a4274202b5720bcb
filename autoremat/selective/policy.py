"""What a selective checkpoint of each block saves: as data, in words, and put to work.

Enters: calls of operators by block. Leaves: a `context_fn` for each block, and a model whose blocks
run under them. Guarantees: the policy of a region depends on the operators that it has run so far
and on nothing else, so that its rerun decides as its first run did; gradients are those of the
model without checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autoremat.units import format_nbytes

Contexts = Callable[[], Any]


@dataclass(frozen=True, order=True)
class OperatorCall:
    """One call of an operator in a block.

    Attributes:
        operator: "aten.addmm.default".
        number: 0 for its first call in a run of the block, 1 for the second, and so on.
    """

    operator: str
    number: int


@dataclass(frozen=True)
class BlockPolicy:
    """What the checkpoint around one block does with what the block computes.

    Attributes:
        block: the module's name, as `named_modules` writes it.
        saved: calls whose results are kept until the backward.
        recomputed: calls that run again in the backward. Views, which take no memory, are left out.
    """

    block: str
    saved: tuple[OperatorCall, ...]
    recomputed: tuple[OperatorCall, ...]
    _kept: frozenset[OperatorCall] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare to be asked."""
        object.__setattr__(self, "_kept", frozenset(self.saved))

    def context_fn(self) -> Any:
        """Contexts of one region, as `torch.utils.checkpoint.checkpoint` asks for them."""
        return create_selective_checkpoint_contexts(Decisions(self._kept))

    def __str__(self) -> str:
        """What is saved, and what is not."""
        return f"{self.block}: {self._words}"

    @property
    def _words(self) -> str:
        saved, again = _in_words(self.saved), _in_words(self.recomputed)
        return f"saves {saved or 'its input only'}; recomputes {again or 'nothing'}"


class Decisions:
    """What one region decides of each operator: torch asks in its order, the rerun from the start.

    torch 2.13 keeps the answers of the first run, earlier releases ask again in the rerun.
    """

    def __init__(self, saved: frozenset[OperatorCall]) -> None:
        """Of a region that has not run."""
        self._saved = saved
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Whether this call's results are kept."""
        counts, name = self._counts[context.is_recompute], str(operator)
        call = OperatorCall(name, counts[name])
        counts[name] += 1
        if call in self._saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class SelectivePolicy:
    """What selective checkpoints around a model's blocks save, so that a step keeps a budget.

    Attributes:
        blocks: those that run in a checkpoint; all others keep what autograd keeps.
        peak_nbytes: predicted for the step, what is resident included.
        budget_nbytes: what was asked for.
        resident_nbytes: of the peak, what the step holds all the time.
        time_us: of the step's operators, those that run again included.
        extra_us: of that, what running operators again takes.
        assumed: what the peak rests on and nobody has said, one sentence each.
    """

    blocks: tuple[BlockPolicy, ...]
    peak_nbytes: int
    budget_nbytes: int
    resident_nbytes: int
    time_us: float
    extra_us: float
    assumed: tuple[str, ...] = ()

    def context_fn(self, block: str) -> Contexts | None:
        """Of a block by its name, for `checkpoint`; None where it needs no checkpoint."""
        return {policy.block: policy.context_fn for policy in self.blocks}.get(block)

    def apply(self, model: nn.Module) -> Checkpoints:
        """Let the blocks of an eager model run in checkpoints, in place, until they are removed.

        Names of modules and of parameters stay as they are.

        Raises:
            ValueError: if the model has no such block, or it runs in one of our checkpoints.
        """
        return Checkpoints(model, {policy.block: policy.context_fn for policy in self.blocks})

    def __str__(self) -> str:
        """The peak, then the blocks; neighbours of which the same holds on one line."""
        share = 100 * self.extra_us / max(1e-9, self.time_us - self.extra_us)
        head = (
            f"autoremat: {len(self.blocks)} blocks in selective checkpoints (+{share:.1f} % time), "
            f"peak {format_nbytes(self.peak_nbytes)} of {format_nbytes(self.budget_nbytes)}"
        )
        return "\n".join((head, *self._lines(), *(f"Assumed: {text}" for text in self.assumed)))

    def _lines(self) -> Iterator[str]:
        for words, group in groupby(self.blocks, key=lambda policy: policy._words):
            first, *rest = (policy.block for policy in group)
            yield f"{first} to {rest[-1]}: {words}" if rest else f"{first}: {words}"


class Checkpoints:
    """Blocks of a model that run in checkpoints; also a context, at whose end they do no more."""

    def __init__(self, model: nn.Module, contexts: Mapping[str, Contexts]) -> None:
        """Put them there.

        Args:
            model: whose blocks they are.
            contexts: a `context_fn` for each, by its name.

        Raises:
            ValueError: if there is no such block, or it runs in a checkpoint of ours.
        """
        blocks = [_block_of(model, path) for path in contexts]
        self._before: list[tuple[nn.Module, Any, Any]] = []
        for block, contexts_of in zip(blocks, contexts.values(), strict=True):
            # A partial of a bound method goes with copies of the model, as a closure would not.
            ours = partial(_run_region, block.forward, contexts_of)
            self._before.append((block, vars(block).get("forward"), ours))
            block.forward = ours

    def remove(self) -> None:
        """Let the blocks run as they did before; what others have put around one since stays."""
        while self._before:
            block, own, ours = self._before.pop()
            if vars(block).get("forward") is not ours:
                continue
            if own is None:
                del block.forward
            else:
                block.forward = own

    def __enter__(self) -> Checkpoints:
        """As they are."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove them."""
        self.remove()


def _run_region(forward: Any, contexts: Contexts, /, *args: Any, **keywords: Any) -> Any:
    """The block, in a checkpoint.

    Of positional arguments alone torch finds the devices whose generators are set back, and sees
    whether something was written to them before the rerun; and it has keywords of its own.
    """
    names, count = tuple(keywords), len(args)

    def run(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    values = (*args, *keywords.values())
    return checkpoint(run, *values, use_reentrant=False, context_fn=contexts)


def _block_of(model: nn.Module, path: str) -> nn.Module:
    try:
        block = model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(
            f"{type(model).__name__} has no module {path!r}: the policy is for the model that it "
            "was made for, and others of its structure."
        ) from error
    forward = vars(block).get("forward")
    if isinstance(forward, partial) and forward.func is _run_region:
        raise ValueError(
            f"{path!r} runs in a checkpoint of autoremat's already: call remove() on what apply() "
            "returned before another policy is applied."
        )
    return block


def _in_words(calls: tuple[OperatorCall, ...]) -> str:
    """Operators with the numbers of their calls: "aten.addmm.default 0 2, aten.gelu.default 0"."""
    numbers: dict[str, list[int]] = {}
    for call in calls:
        numbers.setdefault(call.operator, []).append(call.number)
    return ", ".join(
        f"{operator} {' '.join(map(str, found))}" for operator, found in numbers.items()
    )
