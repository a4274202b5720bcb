"""What code in eager mode has saved, and what of it outlives the backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoremat import _torch
from autoremat.memory.storage_sizes import storage_identities
from autoremat.watch import eager_code
from autoremat.watch.eager_code import Results, saved_storages

CPU = torch.device("cpu")


def saved(loss: Tensor, *, only_held: bool) -> dict[int, int]:
    """By the node of a loss, and by those behind it that make what it reads."""
    found: dict[int, int] = {}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        found |= saved_storages(node, (), CPU, only_held=only_held)
        nodes += [source for source, _ in node.next_functions if source]
    return found


@pytest.mark.parametrize("of", [lambda labels: labels, lambda labels: labels.view(-1)])
def test_labels_that_the_caller_holds_outlive_the_backward(of):
    """Whole, or as the view of them that was saved; scores and what was made of them do not."""
    scores = torch.randn(6, 8, requires_grad=True).tanh()
    labels = torch.arange(6)
    loss = F.cross_entropy(scores, of(labels))
    assert saved(loss, only_held=True) == dict.fromkeys(storage_identities([labels]), 6 * 8)
    assert saved(loss, only_held=False).keys() > storage_identities([labels])


def test_bytes_that_a_layer_saved_for_itself_do_not_outlive_the_backward():
    """As the workspace of a recurrent layer, or a mask: numbers, but nobody's."""
    x = torch.randn(6, 8, requires_grad=True).tanh()
    loss = (x * (torch.rand(6, 8) < 0.5)).sum()
    assert not saved(loss, only_held=True)
    assert 6 * 8 in saved(loss, only_held=False).values()


def test_a_target_of_real_numbers_that_the_caller_holds():
    """Labels are not always whole numbers."""
    x, target = torch.randn(6, 8, requires_grad=True).tanh(), torch.randn(6, 8)
    held = saved(F.mse_loss(x, target), only_held=True)
    assert storage_identities([target]) <= held.keys()


@pytest.mark.parametrize("of", [lambda x: x * x, lambda x: x @ x.T])
def test_a_value_that_one_operation_saves_twice_is_held_by_nobody(of):
    """Itself twice, or it and a view of it: the list of what was saved is no holder."""
    loss = of(torch.randn(6, 8, requires_grad=True).tanh()).sum()
    assert not saved(loss, only_held=True)


def test_it_is_found_out_while_hooks_of_the_user_pack_what_is_saved():
    """The first look of a process may come inside of them; they do not see it."""
    labels = torch.arange(6)
    loss = F.cross_entropy(torch.randn(6, 8, requires_grad=True).tanh(), labels)
    eager_code._references_of_unheld.cache_clear()
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        found = saved(loss, only_held=True)
    assert found.keys() == storage_identities([labels])


def test_what_a_node_has_saved_is_looked_up_once(monkeypatch: pytest.MonkeyPatch):
    """However many graphs of a step come after it: what they are given has all of it behind."""
    asked: list[object] = []
    saved_by = _torch.saved_by
    monkeypatch.setattr(_torch, "saved_by", lambda node: (asked.append(node), saved_by(node))[1])
    made = torch.randn(6, 8, requires_grad=True)
    for _ in range(4):
        made = made.tanh()
        found = Results()
        found.note_saved([made], CPU)
    assert sum(found.held(CPU).values()) == 4 * made.nbytes
    assert len(asked) == len(set(asked))
