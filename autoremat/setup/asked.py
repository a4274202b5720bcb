"""What a user says of a training run: plain values, checked where they are made. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Patterns = str | Sequence[str]
"""Module paths, with or without wildcards; a text may hold several, with commas between them."""

AUTOCAST = "autocast"
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ATTENTIONS = ("sdpa", "eager")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class TrainingSetup:
    """How a run is set up, beside its model, batch and optimizer.

    Attributes:
        precision: "float32", "bfloat16" or "float16" ("fp32", "bf16", "fp16"): parameters of that
            type; "autocast": parameters in float32, the forward under autocast to bfloat16. As
            the model has it if not given.
        accumulate: micro-batches of one optimizer step: with more than 1, gradients exist already
            when a micro-batch begins.
        lora: linear layers that get low-rank adapters, everything else being frozen: patterns of
            their paths, or endings of them ("q_proj"), or "all-linear" for all but the head.
        lora_rank: of the adapters.
        freeze: modules or parameters that are not trained, likewise.
        attention: "sdpa" or "eager", for models of transformers.
        shards: GPUs among which parameters, gradients and optimizer state are divided, as FSDP2
            divides them.
        loss_chunks: parts in which a causal language model of transformers computes its loss, so
            that its logits are never whole.
    """

    precision: str | None = None
    accumulate: int = 1
    lora: Patterns = ()
    lora_rank: int = 16
    freeze: Patterns = ()
    attention: str | None = None
    shards: int = 1
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        """Refuses what no run can have.

        Raises:
            ValueError: naming the field at fault and what is accepted.
        """
        given = PRECISIONS.get(str(self.precision), self.precision)
        known = (*PRECISIONS.values(), AUTOCAST)
        if given is not None and given not in known:
            raise ValueError(f"precision is one of {', '.join(known)}, not {given!r}.")
        object.__setattr__(self, "precision", given)
        for name, least, remedy in (
            ("accumulate", 1, "1 is a step of one batch"),
            ("lora_rank", 1, "peft's default is 8; leave lora out to train without adapters"),
            ("shards", 1, "1 is a GPU that holds everything"),
            ("loss_chunks", 1, "1 computes the loss at once"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"{name} is a whole number of at least {least}, not {value!r}: {remedy}."
                )
        if self.lora_rank != TrainingSetup.lora_rank and not self.lora:
            raise ValueError(
                f"lora_rank={self.lora_rank} is of lora=, which is not given: name the layers, as "
                'in lora="all-linear".'
            )
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise ValueError(
                f"attention is {' or '.join(map(repr, ATTENTIONS))}, not {self.attention!r}: other "
                "implementations are of packages whose kernels cannot be traced."
            )
        for name in ("lora", "freeze"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))


def _patterns(name: str, given: object) -> tuple[str, ...]:
    many = given.split(",") if isinstance(given, str) else given
    if not isinstance(many, (list, tuple)) or not all(isinstance(one, str) for one in many):
        raise ValueError(
            f'{name} takes patterns of module paths such as "*.q_proj", not {given!r}.'
        )
    return tuple(found for one in many if (found := one.strip()))
