"""What calls of modules hold: the outermost ones and their batch, whatever runs inside of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoremat.memory.calls import CallsAround
from autoremat.memory.storage_sizes import tensors_in

BATCH = torch.ones(2, 4)


class Noting(nn.Module):
    """Notes who called it, as a graph inside of it does."""

    def __init__(self, around: CallsAround) -> None:
        super().__init__()
        self.around, self.weight = around, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.around.note()
        return x * self.weight


def noted(*more: nn.Module) -> tuple[CallsAround, nn.Sequential, Noting]:
    """A model and a part of it, after a call of the model."""
    around = CallsAround()
    inner = Noting(around)
    model = nn.Sequential(inner, *more)
    model(BATCH)
    return around, model, inner


def test_a_part_that_runs_alone_does_not_stand_for_the_whole():
    """As checkpoints run it again in the backward; its input is no batch."""
    around, model, inner = noted()
    inner(torch.zeros(3, 4))
    assert around.roots == [model]
    assert [given is BATCH for given in around.given] == [True]


def test_what_calls_a_known_module_takes_its_place():
    """A part was called first, then the model."""
    around, model, _ = noted()
    outer = nn.Sequential(model)
    outer(BATCH)
    assert around.roots == [outer]


def test_models_called_in_turn_count_together_until_they_are_gone():
    """Encoder and decoder without a module around them."""
    around, first, _ = noted()
    second = nn.Sequential(Noting(around), nn.Linear(4, 4))
    second(BATCH)
    assert around.roots == [first, second]
    assert around.storages(torch.device("cpu")).keys() >= {
        p.untyped_storage()._cdata for p in (*first.parameters(), *second.parameters())
    }
    del second
    assert around.roots == [first]


def test_what_has_no_size_yet_counts_as_nothing():
    """Lazy parameters and buffers; the count of batches has one."""
    around, device = CallsAround(), torch.device("cpu")
    found: list[dict[int, int]] = []
    model = nn.Sequential(Noting(around), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    model[0].register_forward_hook(lambda *_: found.append(around.storages(device)))
    model(BATCH)
    assert sum(found[0].values()) == BATCH.nbytes + model[0].weight.nbytes + 8
    assert len(around.storages(device)) > len(found[0])


def test_what_refers_to_itself_is_looked_through_once():
    """A dataclass of the user's, given to a module around the graphs."""

    @dataclass
    class Context:
        batch: Tensor
        parent: Context | None = None

    context = Context(BATCH)
    context.parent = context
    assert [tensor is BATCH for tensor in tensors_in([context, context])] == [True]
