"""Advice to train in half precision or on two devices: beside steps that really are so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import autoremat
from autoremat import TrainingSetup
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.memory.storage_sizes import storages_nbytes
from autoremat.reporting import Remedy, Report, remedies

pytestmark = pytest.mark.shares_plans

TOKENS, WIDTH, WORDS = 512, 128, 256
CPU = torch.device("cpu")
HALF, SHARDED = "bf16 autocast", "shard over two devices"


class Mixer(nn.Module):
    """A block of products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A block of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(4, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Language(nn.Module):
    """Blocks between an embedding and a head; the loss is in float32 under autocast, too."""

    def __init__(
        self, block: Callable[[], nn.Module] = Mixer, *, layers: int = 4, half: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head, self.half = nn.Linear(WIDTH, WORDS), half

    def forward(self, ids: Tensor) -> Tensor:
        if self.half:
            with torch.autocast("cpu", torch.bfloat16):
                return self.loss(ids)
        return self.loss(ids)

    def loss(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), ids)


def ids_of() -> Tensor:
    return torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0))


def planned(model: nn.Module, budget: int | str = "1GB", **options: object) -> Report:
    ask = {"compiler": "eager", "verbose": False} | options
    return autoremat.plan(model, ids_of(), budget=budget, **ask)  # type: ignore[arg-type]


def found(report: Report, name: str) -> Remedy | None:
    return next((one for one in report.advice if one.name == name), None)


def measured_nbytes(model: nn.Module, call: nn.Module, ids: Tensor) -> int:
    """The highest of a second step under autocast, what is resident included."""

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(ids)
        loss.backward()

    step()
    model.zero_grad()
    held_nbytes = resident_nbytes(model, [ids])
    return held_nbytes + measure_peak(step, device="cpu")


@pytest.mark.parametrize("block", [Mixer, Attention])
@pytest.mark.parametrize("policy", ["save-all", "optimal"])
def test_a_step_that_runs_under_autocast_takes_what_is_told(
    block: Callable[[], nn.Module], policy: str
) -> None:
    """As it is, the step takes about so much; and a plan keeps to it."""
    whole = planned(Language(block)).predicted_peak_nbytes
    budget = whole if policy == "save-all" else int(0.6 * whole)
    remedy = found(planned(Language(block), budget, policy=policy), HALF)
    assert remedy is not None
    model, ids = Language(block), ids_of()
    if policy == "save-all":
        measured = measured_nbytes(model, model, ids)
    else:
        autoremat.optimize(model, remedy.peak_nbytes, compiler="eager", verbose=False)
        measured = measured_nbytes(model, model, ids)
        assert measured <= remedy.peak_nbytes
    assert remedy.peak_nbytes == pytest.approx(measured, rel=0.1)
    assert remedy.peak_nbytes < 0.95 * budget


def test_copies_of_weights_are_counted_and_named() -> None:
    """Of every product's weight, and its bias."""
    remedy = found(planned(Language()), HALF)
    model = Language()
    cast = [p for n, p in model.named_parameters() if "norm" not in n and "embed" not in n]
    nbytes = sum(p.numel() * 2 for p in cast)
    assert remedy is not None
    assert f"cast to copies of {nbytes / 1e6:.1f} MB" in remedy.sentence


@pytest.mark.parametrize("how", ["parameters", "within", "setup"])
def test_who_computes_in_half_already_is_not_told_to(how: str) -> None:
    """Whether by parameters, by autocast of the model's own, or as the run is described."""
    model = Language(half=how == "within")
    model = model.bfloat16() if how == "parameters" else model
    setup = TrainingSetup(precision="autocast") if how == "setup" else None
    assert found(planned(model, setup=setup), HALF) is None


def test_a_model_that_runs_is_told_the_same_and_goes_on() -> None:
    """It is traced again, which adds no graph and no guard."""
    model, ids = Language(), ids_of()
    offline = found(planned(Language()), HALF)
    called = autoremat.optimize(model, "1GB", compiler="eager", verbose=False)
    called(ids).backward()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    remedy = found(autoremat.report(model), HALF)
    called(ids).backward()
    assert remedy is not None
    assert offline is not None
    assert remedy.saved_nbytes == pytest.approx(offline.saved_nbytes, rel=0.01)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    assert not autoremat.report(model).fallbacks


@pytest.mark.parametrize("optimizer", [None, "AdamW"])
def test_two_devices_hold_what_is_told(
    optimizer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the offline way of dividing says of the same model, traced with its shards."""
    monkeypatch.setattr(remedies, "MOST", 9)  # others save more
    ask = {"policy": "save-all", "optimizer": optimizer}
    remedy = found(planned(Language(layers=12), **ask), SHARDED)
    divided = planned(Language(layers=12), setup=TrainingSetup(shards=2), **ask)
    assert remedy is not None
    assert remedy.peak_nbytes == pytest.approx(divided.predicted_peak_nbytes, rel=0.01)
    assert found(divided, SHARDED) is None


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is one and the other answers nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def test_one_of_two_devices_takes_no_more_than_is_told(mesh: DeviceMesh) -> None:
    """FSDP2's own, each module wrapped that the sentence names."""
    remedy = found(planned(Language(layers=12), policy="save-all"), SHARDED)
    model, ids = Language(layers=12), ids_of()
    for unit in (*model.blocks, model.embed, model.head, model):
        fully_shard(unit, mesh=mesh)
    shares = [parameter.to_local() for parameter in model.parameters()]
    for _ in range(2):
        model(ids).backward()
        model.zero_grad()
    peak = measure_peak(lambda: model(ids).backward(), device="cpu")
    assert remedy is not None
    assert 0.9 * remedy.peak_nbytes <= peak + storages_nbytes(shares, CPU) <= remedy.peak_nbytes


def test_a_model_of_one_block_is_not_told_to_divide_what_is_gathered_again() -> None:
    """Gathered whole beside its shares, it would take more."""
    model = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.GELU(), nn.Linear(64 * WIDTH, 1))
    ask = {"budget": "1GB", "compiler": "eager", "verbose": False}
    report = autoremat.plan(model, torch.ones(4, WIDTH), **ask)
    assert found(report, SHARDED) is None


@pytest.mark.parametrize("name", [HALF, SHARDED])
def test_a_refusal_says_both(name: str) -> None:
    """With the peak that the smallest plan would have."""
    budget = resident_nbytes(Language()) + 100_000
    with pytest.raises(autoremat.InfeasibleBudget) as offline:
        planned(Language(), budget, optimizer="AdamW")
    assert name in {one.name for one in offline.value.advice}
    model, ids = Language(), ids_of()
    autoremat.optimize(model, budget, compiler="eager", verbose=False)
    with pytest.raises(autoremat.InfeasibleBudget) as caught:
        model(ids)
    assert HALF in {one.name for one in caught.value.advice}
    assert caught.value.smallest_peak_nbytes > budget
