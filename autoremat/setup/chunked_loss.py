"""A language model's loss in parts of its tokens, so that the logits are never whole.

Enters: a causal language model of transformers, a copy of our own. Leaves: the same model, whose
head hands its input on and whose loss calls the head for one part after the other, in its forward
and once more in its backward, as hand-written kernels do. Guarantees: the
loss is the same sum; a model whose logits go through anything else is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoremat.setup.adapters import output_head

_IGNORED = -100  # the label that counts for nothing
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def chunk_loss(model: Any, chunks: int) -> None:
    """Compute the loss in so many parts.

    Raises:
        ValueError: if the model's loss is not a cross-entropy of its head's own results.
    """
    head = output_head(model)
    reason = _obstacle(model, head)
    if reason:
        raise ValueError(
            f"loss_chunks={chunks} cannot be done for {type(model).__name__}: {reason}. It is for "
            "causal language models of transformers; leave it out, or chunk the loss in the model."
        )
    assert head is not None
    model.loss_function = ChunkedLoss(head, chunks)
    head.__class__ = type(f"Deferred{type(head).__name__}", (_Deferred, type(head)), {})


def _obstacle(model: Any, head: nn.Module | None) -> str:
    name = type(model).__name__
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or not hasattr(model, "loss_function"):
        return "it is no causal language model of transformers"
    if type(head) is not nn.Linear:
        return "it has no linear output head, or that has an adapter"
    if "self.loss_function(" not in inspect.getsource(type(model).forward):
        return "its forward computes the loss by itself"
    config = model.config.get_text_config()
    changing = [name for name in _AFTER_THE_HEAD if getattr(config, name, None)]
    return f"its logits go through {changing[0]}" if changing else ""


def _summed(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> Tensor:
    """The sum over some tokens; in a checkpoint, so that their logits go with them."""
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


class _Deferred:
    """A head that is called later, by the loss."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


class ChunkedLoss:
    """Cross-entropy of the next token, of one part of the tokens after the other."""

    def __init__(self, head: Any, chunks: int) -> None:
        """Of a head's results, in so many parts."""
        self.head, self.chunks = head, chunks

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **_others: Any,
    ) -> Tensor:
        """The loss; `logits` are what the head was given."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden, targets = logits.flatten(0, -2), shift_labels.flatten()
        weight, bias = self.head.weight, self.head.bias
        chunks = min(self.chunks, len(targets))
        parts = zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True)
        losses = [
            checkpoint(
                *(_summed, part, weight, bias, target, ignore_index),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for part, target in parts
        ]
        count = (
            (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        )
        return torch.stack(losses).sum() / count
