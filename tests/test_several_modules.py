"""Several modules under one budget: what they hold counts once, and their graphs are one step."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.meter import measure_peak, resident_nbytes
from autoremat.optimized import optimized_call
from autoremat.watch.audit import Audit
from tests.tiny import Chain, many_rows
from tests.training import UNBOUNDED
from tests.training import told as told_during

# Dynamo looks at `.grad` of what another module has returned.
pytestmark = [
    pytest.mark.shares_plans,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BATCH, OTHER = many_rows(512), many_rows(512).flip(0)
OPTIONS = {"compiler": "eager", "verbose": False, "time_limit": 4.0}
Take = Callable[[nn.Module, nn.Module], object]


class Tower(Chain):
    """Layers without a loss."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def two(*, frozen: bool = False) -> list[nn.Module]:
    """A larger module and a smaller one, the same each time."""
    torch.manual_seed(0)
    one, other = Tower(8).train(), Tower(6).train()
    return [one, other.requires_grad_(not frozen)]


def parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Of all of them."""
    return [parameter for module in modules for parameter in module.parameters()]


def forget(modules: Iterable[nn.Module]) -> None:
    """Their gradients."""
    for module in modules:
        module.zero_grad(set_to_none=True)


# --- forms of a step ---------------------------------------------------------------------------


def towers(one: nn.Module, other: nn.Module) -> None:
    """One backward through both."""
    forget((one, other))
    F.mse_loss(one(BATCH), other(OTHER)).backward()


def encoder_and_decoder(encoder: nn.Module, decoder: nn.Module) -> None:
    """One through the other."""
    forget((encoder, decoder))
    decoder(encoder(BATCH)).square().mean().backward()


def policy_and_critic(policy: nn.Module, critic: nn.Module) -> None:
    """A backward of each."""
    forget((policy, critic))
    policy(BATCH).square().mean().backward()
    critic(BATCH).square().mean().backward()


def a_batch_of_each(policy: nn.Module, critic: nn.Module) -> None:
    """The same, and what the critic is going to be given is there from the beginning."""
    batch, other = BATCH.clone(), OTHER.clone()
    forget((policy, critic))
    policy(batch).square().mean().backward()
    critic(other).square().mean().backward()


def preferences(policy: nn.Module, reference: nn.Module) -> None:
    """DPO: the policy twice, and a reference that is frozen."""
    forget((policy, reference))
    with torch.no_grad():
        chosen, rejected = (reference(batch).sum(-1) for batch in (BATCH, OTHER))
    margin = (policy(BATCH).sum(-1) - chosen) - (policy(OTHER).sum(-1) - rejected)
    F.softplus(-margin).mean().backward()


def adversaries(maker: nn.Module, critic: nn.Module) -> None:
    """A GAN: the critic's backward, then the maker's through the critic."""
    forget([critic])
    (critic(maker(BATCH).detach()).mean() - critic(OTHER).mean()).backward()
    forget([maker])
    (-critic(maker(BATCH)).mean()).backward()


FORMS = [towers, encoder_and_decoder, policy_and_critic, preferences, adversaries]


def whole_peak(modules: Sequence[nn.Module], take: Take) -> int:
    """Measured bytes of a step, with what is there before it."""
    batches = {encoder_and_decoder: (BATCH,), policy_and_critic: (BATCH,), a_batch_of_each: ()}
    batches = batches.get(take, (BATCH, OTHER))
    held = resident_nbytes(nn.ModuleList(modules), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoremat.OverBudgetWarning)
        return held + measure_peak(lambda: take(*modules), device="cpu")


def told(modules: Sequence[nn.Module], take: Take) -> list[autoremat.OverBudgetWarning]:
    """What is said of the budget in a step."""
    return told_during(lambda: take(*modules))


def eager_step(take: Take) -> tuple[int, list[Tensor | None]]:
    """Peak and gradients of a step that is not planned."""
    plain = two(frozen=take is preferences)
    take(*plain)
    peak = whole_peak(plain, take)
    return peak, [parameter.grad for parameter in parameters(plain)]


@pytest.mark.parametrize("take", FORMS)
def test_the_step_keeps_one_budget_from_the_second_on(take: Take):
    """The first says what it takes; gradients are eager mode's."""
    highest, gradients = eager_step(take)
    budget = int(0.75 * highest)
    modules = two(frozen=take is preferences)
    assert autoremat.optimize(modules, budget, **OPTIONS) == modules
    for _ in range(2):
        assert all(over.is_planned_anew for over in told(modules, take))
        for mine, theirs in zip(parameters(modules), gradients, strict=True):
            assert (mine.grad is None) == (theirs is None)
            assert theirs is None or torch.allclose(mine.grad, theirs, atol=1e-6)
    assert not told(modules, take)
    peak = whole_peak(modules, take)
    assert peak <= budget
    for module in modules:
        assert autoremat.report(module).is_within_budget


@pytest.mark.parametrize("share", [0.6, 0.97])
@pytest.mark.parametrize("take", [towers, adversaries, encoder_and_decoder])
def test_modules_with_a_budget_each_leave_room_to_one_another(take: Take, share: float):
    """One that has no leaner plan asks the others, and plans again for what they leave."""
    budget = int(share * eager_step(take)[0])
    modules = two()
    for module in modules:
        autoremat.optimize(module, budget, **OPTIONS)
    for _ in range(6):
        last = told(modules, take)
    assert not last
    assert whole_peak(modules, take) <= budget


def test_what_other_modules_will_be_given_counts():
    """Known of the step before, as it is new each time; gradients of others are there as well."""
    highest, _ = eager_step(a_batch_of_each)
    modules = two()
    autoremat.optimize(modules, budget := int(0.75 * highest), **OPTIONS)
    for _ in range(2):
        told(modules, a_batch_of_each)
    assert whole_peak(modules, a_batch_of_each) <= budget


def test_one_budget_for_several_calls_is_that_of_a_list():
    """The same graphs, the same peak; the order of the calls does not matter."""
    budget = int(0.75 * eager_step(towers)[0])
    listed, apart = two(), two()
    autoremat.optimize(iter(listed), budget, **OPTIONS)
    shared = autoremat.Budget(budget)
    for module in reversed(apart):
        assert autoremat.optimize(module, shared, **OPTIONS) is module
    for modules in (listed, apart):
        for _ in range(3):
            told(modules, towers)
    one, other = (autoremat.report(modules[0]) for modules in (listed, apart))
    assert one.predicted_peak_nbytes == other.predicted_peak_nbytes <= budget
    assert len(one.graphs) == len(other.graphs) == 2


# --- what counts -------------------------------------------------------------------------------


def test_what_modules_share_counts_once():
    """As parameters, and in the state of their optimizers."""
    one, other = two()
    other.layers[0] = one.layers[0]
    optimizers = [
        torch.optim.AdamW(one.parameters()),
        torch.optim.AdamW(other.layers[1:].parameters()),
    ]
    autoremat.optimize([one, other], UNBOUNDED, optimizer=optimizers, **OPTIONS)
    towers(one, other)
    found = autoremat.report(one)
    distinct = {id(p): p for p in parameters((one, other))}.values()
    nbytes = sum(parameter.nbytes for parameter in distinct)
    assert found.resident.parameters_nbytes == nbytes
    assert found.resident.optimizer_nbytes == 2 * nbytes + 4 * len(distinct)
    assert found.optimizer == "AdamW"


def test_a_frozen_module_is_only_held():
    """It runs as it is, and its bytes count; given alone, it says so."""
    policy, reference = two(frozen=True)
    autoremat.optimize([policy, reference], UNBOUNDED, **OPTIONS)
    preferences(policy, reference)
    report = autoremat.report(reference)
    assert len(report.graphs) == 1
    nbytes = sum(parameter.nbytes for parameter in parameters((policy, reference)))
    assert report.resident.parameters_nbytes == nbytes
    alone = Tower().requires_grad_(False)
    with pytest.warns(autoremat.FallbackWarning, match="AR201"):
        autoremat.optimize([alone], UNBOUNDED, **OPTIONS)


def test_a_module_that_is_thawed_later_is_planned():
    """From then on."""
    policy, reference = two(frozen=True)
    autoremat.optimize([policy, reference], UNBOUNDED, **OPTIONS)
    preferences(policy, reference)
    reference.requires_grad_(True)
    towers(policy, reference)
    assert len(autoremat.report(policy).graphs) == 2


def test_modules_of_a_budget_are_not_kept_alive():
    """Neither by the budget nor by each other."""
    one, other = two()
    shared = autoremat.Budget(UNBOUNDED)
    for module in (one, other):
        autoremat.optimize(module, shared, **OPTIONS)
    towers(one, other)
    gone = weakref.ref(other)
    del other, module
    gc.collect()
    assert gone() is None
    one(BATCH).mean().backward()
    assert autoremat.report(one).resident.parameters_nbytes <= sum(
        p.nbytes for p in parameters([one])
    ) + sum(p.nbytes for p in Tower(6).parameters())


# --- what cannot be ----------------------------------------------------------------------------


def refused(modules: Any, error: type[Exception], message: str, **options: Any) -> None:
    """Optimizing these raises, and leaves them as they are."""
    with pytest.raises(error, match=message):
        autoremat.optimize(modules, **{"budget": UNBOUNDED} | OPTIONS | options)


def test_what_cannot_share_a_budget():
    """Each says what to do."""
    one, other = two()
    refused([], ValueError, "the list is empty")
    refused([one, other, one], ValueError, "given twice")
    refused([one, one.layers], ValueError, "ModuleList is a part of Tower")
    refused([one, 3], TypeError, "not int")
    refused(3, TypeError, "an nn.Module or several, not int")
    refused([one, Tower().to("meta")], ValueError, r"several devices \(cpu, meta\)")
    refused(
        [one], ValueError, "None of the optimizer", optimizer=torch.optim.SGD(other.parameters())
    )
    refused([one, other], ValueError, "matches no module", save="body.3")
    assert all(module._compiled_call_impl is None for module in (one, other))
    autoremat.optimize(one, UNBOUNDED, **OPTIONS)
    refused([one, other], ValueError, "optimised already")
    with pytest.raises(ValueError, match="Budget '40'"):
        autoremat.Budget("40")


def test_a_budget_is_shared_under_the_same_options():
    """One call cannot ask for another dropout than the others."""
    one, other = two()
    shared = autoremat.Budget("1GB")
    autoremat.optimize(one, shared, **OPTIONS)
    refused(other, ValueError, "under the same options", budget=shared, dropout="save_masks")
    refused(one, ValueError, "optimised already", budget=shared)


def test_what_is_of_one_module_only(tmp_path: Any):
    """Stored plans, a verification, and plans without a step."""
    modules = two()
    autoremat.optimize(modules, UNBOUNDED, **OPTIONS)
    towers(*modules)
    with pytest.raises(ValueError, match="a stored plan is of one module"):
        autoremat.save_plan(modules[0], tmp_path / "plan.json")
    with pytest.raises(ValueError, match="verify compares steps of one module"):
        autoremat.verify(modules[0], BATCH)
    with pytest.raises(TypeError, match=r"an nn\.Module, not list"):
        autoremat.plan(two(), BATCH, budget=UNBOUNDED, **OPTIONS)


def test_nothing_is_planned_before_the_first_call():
    """Asked of any of the modules; and a module without a call of its own is told of."""
    modules = two()
    autoremat.optimize(modules, UNBOUNDED, **OPTIONS)
    with pytest.raises(ValueError, match="Nothing is planned yet"):
        autoremat.report(modules[1])
    assert optimized_call(modules[0]).session is optimized_call(modules[1]).session


def test_a_module_that_dynamo_skips_is_told_of_beside_one_that_is_planned():
    """Its own graph is missing, whatever else there is."""

    class Skipped(Tower):
        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    modules = [Tower(), Skipped()]
    autoremat.optimize(modules, UNBOUNDED, **OPTIONS)
    modules[0](BATCH).mean().backward()
    with pytest.warns(autoremat.FallbackWarning, match="AR105"):
        modules[1](BATCH).mean().backward()


class Broken(Tower):
    """A graph break in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        return super().forward(x)


def test_modules_that_are_alike_run_the_same_graphs():
    """Also those behind a graph break: each is planned and compiled once, and counts twice."""
    torch.manual_seed(0)
    modules = [Broken(), Broken()]
    autoremat.optimize(modules, UNBOUNDED, **OPTIONS)
    towers(*modules)
    assert len(autoremat.report(modules[0]).graphs) == 2


class Scaled(Tower):
    """With a number that is part of the code."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_modules_of_one_class_that_are_not_alike_run_their_own():
    """They differ in a number, in a hook, in what is frozen, and in a layer."""
    torch.manual_seed(0)
    modules = [Scaled(2), Scaled(3), Scaled(2), Scaled(2), Scaled(2)]
    modules[2].register_forward_hook(lambda _module, _inputs, output: output.tanh())
    modules[3].layers[0].requires_grad_(False)
    modules[4].layers[0] = nn.Identity()
    same = copy.deepcopy(modules)
    autoremat.optimize(modules, UNBOUNDED, **OPTIONS)
    for ours, plain in zip(modules, same, strict=True):
        for module in (ours, plain):
            module(BATCH).square().mean().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


def test_modules_trained_in_turn_are_looked_into_as_rarely_as_one(monkeypatch: pytest.MonkeyPatch):
    """A forward of another's step, which is over, is none that this step's look has missed."""
    looks: list[Audit] = []
    look = Audit._look_around
    monkeypatch.setattr(Audit, "_look_around", lambda audit: (looks.append(audit), look(audit)))
    modules = two()
    for module in modules:
        autoremat.optimize(module, UNBOUNDED, **OPTIONS)
    counts = []
    for _ in range(8):
        looks.clear()
        policy_and_critic(*modules)
        counts.append(len(looks))
    assert counts[0]
    assert counts[5:] == [0, 0, 0]
