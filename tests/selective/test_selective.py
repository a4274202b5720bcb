"""Selective checkpoints of eager models: the predicted peak, and gradients as they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.memory.fake_twin import Faker
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.selective import OperatorCall
from autoremat.selective.policy import BlockPolicy, Decisions
from autoremat.selective.search import Item
from autoremat.selective.trial import Trial
from tests.selective.stacks import (
    WIDTH,
    ByKeyword,
    Stack,
    batch,
    keeps,
    made,
    measured_peak,
    planned,
    range_of,
    same_gradients,
)


@pytest.fixture(scope="module")
def bounds() -> tuple[int, int]:
    """The smallest peak of the stack, and the one without checkpoints."""
    return range_of(made())


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.0, marks=pytest.mark.thorough),
        0.4,
        pytest.param(0.7, marks=pytest.mark.thorough),
        1.0,
    ],
)
def test_the_measured_peak_is_the_predicted_one(share: float, bounds: tuple[int, int]) -> None:
    """At budgets between the smallest peak and that of the plain model; gradients stay."""
    model, (least, most) = made(), bounds
    policy = planned(model, least + int(share * (most - least)))
    keeps(policy, model, batch())
    same_gradients(policy, model)
    assert bool(policy.blocks) is (share < 1)


@pytest.mark.thorough
def test_with_more_room_less_runs_again(bounds: tuple[int, int]) -> None:
    """And with enough, nothing."""
    least, most = bounds
    found = [planned(made(), least + (most - least) * part // 2) for part in range(3)]
    times = [policy.extra_us for policy in found]
    assert times[0] > times[1] > times[2] == 0


@pytest.mark.thorough
def test_gradients_are_those_of_the_plain_model_with_dropout() -> None:
    """Each rerun draws what its first run drew."""
    model = made(depth=2, dropout=0.2)
    least, most = range_of(model)
    policy = planned(model, least + (most - least) * 2 // 3)
    assert any(block.saved for block in policy.blocks)
    keeps(policy, model, batch())
    same_gradients(policy, model)


class Drawing(nn.Module):
    """Draws three times, each a value of its own that can be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.rand_like(x) * self.one(x).sigmoid()
        return x + torch.rand_like(x) * self.other(x).sigmoid() * torch.rand_like(x)


def test_draws_of_a_block_are_saved_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rerun that leaves one out would draw other numbers for those after it."""
    draws_first = property(lambda item: (all("rand" not in c.operator for c in item.calls), 0))
    monkeypatch.setattr(Item, "order", draws_first)
    model, only = made(depth=2, make=Drawing), {"blocks": ["blocks.0"]}
    least, most = range_of(model, **only)
    counts = set()
    for share in (0.05, 0.9):
        policy = planned(model, least + int(share * (most - least)), **only)
        for block in policy.blocks:
            counts.add(sum("rand" in call.operator for call in block.saved))
        same_gradients(policy, model)
    assert counts == {0, 3}


class DrawingApart(nn.Module):
    """Draws from a generator of its own, which no checkpoint sets back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return x + noise * self.linear(x).sigmoid()


class SeededStack(Stack):
    """Whose blocks draw the same in each step."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.generator.manual_seed(number)
        return super().forward(x)


def test_draws_from_a_generator_of_the_user_s_are_saved() -> None:
    """Whatever the budget."""
    model = made(SeededStack, make=DrawingApart)
    policy = planned(model, "min")
    assert all(OperatorCall("aten.rand.generator", 0) in block.saved for block in policy.blocks)
    same_gradients(policy, model)


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens}


def test_a_llama_of_transformers_keeps_its_budget() -> None:
    """Made from a configuration, loss and all."""
    model, given = llama()
    outputs = model(**given)
    outputs.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    del outputs
    model.zero_grad(set_to_none=True)
    resident = resident_nbytes(model, given)
    whole = measured_peak(model, **given)
    policy = autoremat.selective_checkpoints(
        model, budget=resident + (whole - resident) * 2 // 3, **given
    )
    assert {block.block for block in policy.blocks} <= {f"model.layers.{n}" for n in range(4)}
    assert any(block.saved for block in policy.blocks)
    keeps(policy, model, **given)
    model.zero_grad(set_to_none=True)
    with policy.apply(model):
        model(**given).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_a_step_without_contents_runs_the_operators_of_a_real_one() -> None:
    """Where positions are consecutive transformers makes no mask."""
    model, given = llama()
    faker, found = Faker(torch.device("cpu")), []
    trial = Trial(faker, faker.model(model), faker.values(((), given)), None)
    foretold = trial.run({"model.layers.0": frozenset()}).regions["model.layers.0"].first

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    names, layer = Names(), model.model.layers[0]
    layer.register_forward_pre_hook(lambda *_: names.__enter__() and None)
    layer.register_forward_hook(lambda *_: names.__exit__(None, None, None))
    model(**given)
    skipped = ("prim.", "aten.detach.")  # what autograd and fake tensors add
    names_foretold = [seen.call.operator for seen in foretold]
    assert [name for name in names_foretold if not name.startswith(skipped)] == [
        name for name in found if not name.startswith(skipped)
    ]
    assert "aten.where.self" not in found


def test_a_cache_of_keys_and_values_is_refused() -> None:
    """The rerun would add to it."""
    model, given = llama()
    model.config.use_cache = True
    with pytest.raises(ValueError, match="use_cache=False"):
        autoremat.selective_checkpoints(model, budget="min", **given)


# --- what is decided, and how it is told ----------------------------------------------------------


def test_each_call_of_an_operator_is_decided_by_its_number() -> None:
    """Of two equal matrix products the second is saved: the rerun runs the first only."""
    saved = OperatorCall("aten.mm.default", 1)
    policy = BlockPolicy("block", (saved,), ())
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    runs = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            runs.append(str(func))
            return func(*args, **(kwargs or {}))

    def region(x: Tensor) -> Tensor:
        return (x.mm(weights[0]).sin().mm(weights[1])).exp()

    with Count():
        result = checkpoint(
            region, torch.randn(4, 4), use_reentrant=False, context_fn=policy.context_fn
        )
        forward = runs.count("aten.mm.default")
        runs.clear()
        torch.autograd.backward([result], [torch.ones(4, 4)])
    assert forward == 2
    assert runs.count("aten.mm.default") == 1 + 3  # one of the region, three of the backward


def test_a_rerun_counts_from_the_start() -> None:
    """Before torch 2.13 it is asked as the first run is."""
    decide = Decisions(frozenset([OperatorCall("aten.mm.default", 1)]))
    context = type("Context", (), {"is_recompute": False})
    again = type("Context", (), {"is_recompute": True})
    first = [decide(context, "aten.mm.default").name for _ in range(3)]
    second = [decide(again, "aten.mm.default").name for _ in range(3)]
    assert first == second == ["PREFER_RECOMPUTE", "MUST_SAVE", "PREFER_RECOMPUTE"]


def test_the_policy_says_what_is_saved_of_which_block() -> None:
    """In words as in its data."""
    model = made()
    least, most = range_of(model)
    policy = planned(model, (least + most) // 2)
    head, *lines = str(policy).splitlines()
    assert "blocks in selective checkpoints" in head
    assert lines[0].startswith("blocks.0")
    assert "saves aten." in str(policy)
    for block in policy.blocks:
        assert set(block.saved).isdisjoint(block.recomputed)
        assert f"{block.block}: saves " in str(block)
        assert policy.context_fn(block.block) == block.context_fn
    assert policy.context_fn("head") is None
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_checkpoints_leave_names_as_they_are_and_can_be_removed() -> None:
    """Nothing of them is left then; a copy of the model has its own."""
    model = made()
    names, forwards = list(model.state_dict()), [vars(block).keys() for block in model.blocks]
    policy = planned(model, "min")
    checkpoints = policy.apply(model)
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="in a checkpoint of autoremat's already"):
        policy.apply(model)
    twin = copy.deepcopy(model)
    twin.blocks[0].wide.weight.data.zero_()
    assert not torch.equal(twin(batch()), model(batch()))
    checkpoints.remove()
    assert not any("forward" in vars(block) for block in model.blocks)
    assert forwards == [vars(block).keys() for block in model.blocks]
    with pytest.raises(ValueError, match="has no module"):
        policy.apply(nn.Linear(2, 2))


def test_a_model_without_contents_is_planned_as_one_with() -> None:
    """Sizes are all that counts; the optimizer's state is part of them."""
    model = made()
    with torch.device("meta"):
        nowhere = Stack().train()
    policy = planned(nowhere, "min", batch().to("meta"), device="cpu")
    assert policy.peak_nbytes == planned(model, "min").peak_nbytes
    optimizer = torch.optim.AdamW(model.parameters())
    more = planned(model, "min", optimizer=optimizer)
    assert more.resident_nbytes > policy.resident_nbytes


def test_blocks_are_those_that_are_named() -> None:
    """Others keep what autograd keeps."""
    model = made()
    policy = planned(model, "min", blocks=["blocks.1"])
    assert [block.block for block in policy.blocks] == ["blocks.1"]
    keeps(policy, model, batch())


def test_results_that_are_written_into_are_not_saved() -> None:
    """The backward would be refused."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.back(self.wide(x).relu_()).tanh()

    model, only = made(depth=2, make=InPlace), {"blocks": ["blocks.0"]}
    least, most = range_of(model, **only)
    saved = set()
    for share in (0.3, 0.8):
        policy = planned(model, least + int(share * (most - least)), **only)
        saved.update(call for block in policy.blocks for call in block.saved)
        same_gradients(policy, model)
    assert saved
    assert OperatorCall("aten.addmm.default", 0) not in saved


def test_under_autocast_the_step_is_followed_under_it() -> None:
    """The forward is, the backward is not, as people train."""
    model = made()
    policy = planned(model, "min", autocast=torch.bfloat16)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch_of)
        loss.backward()

    batch_of = batch()
    run()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with policy.apply(model):
        peak = resident_nbytes(model, batch_of) + measure_peak(run, device="cpu")
    assert 0.9 * policy.peak_nbytes <= peak <= policy.budget_nbytes
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_what_blocks_are_given_by_keyword_is_known_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of positional arguments it finds whose generators to set back, and what is written to."""
    model = made(ByKeyword, depth=2, dropout=0.2)
    policy = planned(model, "min")
    same_gradients(policy, model)
    given: list[tuple[Any, ...]] = []

    def noted(run: Any, *args: Any, **settings: Any) -> Any:
        given.append(args)
        return checkpoint(run, *args, **settings)

    monkeypatch.setattr("autoremat.selective.policy.checkpoint", noted)
    with policy.apply(model):
        model(batch())
    assert given
    assert all(isinstance(value, Tensor) for (value,) in given)
