"""What FSDP2 gathers and lets go of in forwards: only units that have changed are looked at."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import distributed

from autoremat import _torch
from autoremat.memory.meter import gradients_of
from autoremat.memory.storage_sizes import storage_sizes
from autoremat.watch.standing import Standing, moving_of, of_root
from tests.process_group import one_process  # noqa: F401
from tests.tiny import rows
from tests.training import make_seeded
from tests.watch.test_standing import Blocks, require_linear, visits

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    # Dynamo asks what FSDP2 has made of a block's input, which is no leaf any more.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

CPU = torch.device("cpu")
LAYERS = 4


def shard(model: Blocks, *, reshards: bool = True) -> Blocks:
    """FSDP2: each block by itself, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshards)
    return fully_shard(model)


@pytest.mark.parametrize("apart", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_twice_the_sharded_layers_are_twice_the_work(monkeypatch: pytest.MonkeyPatch, apart: bool):
    """Not four times: each run of a block would look at all units."""
    count_visits = functools.partial(visits, monkeypatch=monkeypatch, apart=apart, spread=shard)
    require_linear(count_visits)


@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_known_by_its_changes_is_what_is_there(reshards: bool):
    """At each block's forward: as if all units were looked at."""
    model = shard(make_seeded(lambda: Blocks(LAYERS)), reshards=reshards)
    seen: list[tuple[dict[int, int], dict[int, int]]] = []

    def look(*_: object) -> None:
        found = of_root(model, CPU)
        assert of_root(model, CPU) is found
        known = found.sizes | {key: n for part in found.moving for key, n in part.now().items()}
        units = _torch.sharded_units(model)
        there = [*_torch.tensors_of_units(units), *_torch.waiting_gradients(units)]
        seen.append((known, storage_sizes([*there, *gradients_of(there)], CPU)))

    for block in model.blocks:
        block.register_forward_hook(look)
    for _ in range(2):  # the first one begins before anything was gathered
        model(rows()).backward()
    assert len(seen) == 2 * LAYERS
    for known, there in seen:
        assert _with_memory(known) == _with_memory(there)
    totals = [sum(known.values()) for known, _ in seen[LAYERS:]]
    assert (len(set(totals)) == 1) == reshards  # else each block adds what it stays gathered


def _with_memory(sizes: dict[int, int]) -> dict[int, int]:
    return {key: nbytes for key, nbytes in sizes.items() if nbytes}


def test_those_who_ask_for_the_same_units_share_what_is_known():
    """Until a backward, after which nobody keeps it."""
    model = shard(make_seeded(lambda: Blocks(LAYERS)))
    model(rows())
    [one], [other] = (Standing(CPU, _torch.sharded_units(model)).moving for _ in range(2))
    assert one is other
    _torch.watch_backwards(lambda *_: None)
    model(rows()).backward()
    gathering = _torch.sharded_units(model)[0].gathering
    assert gathering is not None
    assert (moving_of(gathering, CPU) is one) == one.is_true
