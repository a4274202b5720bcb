"""Random numbers: the backward reads those of the forward, drawn once or replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

import autoremat
import autoremat.backend
from autoremat import _torch
from autoremat.emit import rewrite
from autoremat.emit import torch_split as torch_partition
from autoremat.emit.equivalence import first_difference
from autoremat.graph.dropout_policy import DropoutPolicy, parse_dropout
from autoremat.graph.random_draws import Replays, has_own_generator, is_random, replays, safe_policy
from autoremat.planning import pipeline
from tests.joint_graphs import CPU
from tests.training import (
    UNBOUNDED,
    close,
    make_seeded,
    measured,
    optimized,
    peaks,
    recomputes,
    refusal,
    same,
    step,
)

WIDTH, ROWS = 16, 256
CUDA = torch.device("cuda", 0)
REPLAY, SAVE_MASKS = DropoutPolicy


def rows() -> Tensor:
    """A batch of 256 rows of 16 numbers."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.4)),
    "rand": lambda h: h * torch.rand(ROWS, WIDTH),
    "multinomial": lambda h: h + h[torch.multinomial(torch.ones(ROWS), ROWS, True)],
    "attention": lambda h: F.scaled_dot_product_attention(
        *h.view(8, 1, 32, WIDTH).expand(3, 8, 1, 32, WIDTH), dropout_p=0.3
    ).reshape(ROWS, WIDTH),
}


class Draws(nn.Module):
    """Three layers, each with a random operation after its `tanh`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.draw = DRAWS[kind]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + self.draw(x).sin()
        return x.square().mean()


def random_values(model: nn.Module) -> list[tuple[str, int]]:
    """What becomes of each drawn value, and how often it is drawn again."""
    names = ("dropout", "bernoulli", "rand", "multinomial", "random")
    values = autoremat.report(model).values
    return [(v.action, v.recomputes) for v in values if any(name in v.op for name in names)]


# --- the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["save", "", "REPLAY", True, 1, ["replay"]])
def test_a_malformed_policy_is_refused_with_the_accepted_forms(given: Any):
    """By `optimize`, before anything is compiled."""
    with pytest.raises(ValueError, match=r'"replay" or "save_masks" \(or None .*, not '):
        autoremat.optimize(Draws("dropout"), "1GB", dropout=given)


@pytest.mark.parametrize("given", [None, "replay", "save_masks"])
def test_the_accepted_policies(given: str | None):
    """None leaves the choice to what is safe."""
    assert parse_dropout(given) == given


def test_the_backend_takes_the_policy_as_an_option():
    """And refuses a malformed one."""
    options = {"budget": UNBOUNDED, "compiler": "eager", "verbose": False}
    inputs = (rows(),)
    for dropout in DropoutPolicy:
        torch._dynamo.reset()
        model = torch.compile(
            make_seeded(lambda: Draws("dropout")),
            backend=autoremat.backend.autoremat,
            options={**options, "dropout": str(dropout)},
        )
        eager, ours = step(make_seeded(lambda: Draws("dropout")), inputs), step(model, inputs)
        for theirs, mine in zip(eager.gradients.values(), ours.gradients.values(), strict=True):
            assert theirs is mine is None or torch.allclose(theirs, mine, atol=1e-6)
    torch._dynamo.reset()
    malformed = options | {"dropout": 3}
    model = torch.compile(Draws("dropout"), backend=autoremat.backend.autoremat, options=malformed)
    with pytest.raises(ValueError, match="dropout is"):
        model(*inputs)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_on_the_cpu_replaying_is_the_safe_policy(compiler: str):
    """It is what these tests prove."""
    assert safe_policy(compiler, CPU) is REPLAY


@pytest.mark.parametrize("four", [True, False])
def test_where_kernels_on_cuda_draw_four_at_a_time_masks_are_saved(four: bool, monkeypatch):
    """Kernels of other shapes may draw other numbers from one seed (pytorch#198333)."""
    monkeypatch.setattr(_torch, "DRAWS_FOUR_AT_A_TIME", four)
    assert safe_policy("inductor", CUDA) is (SAVE_MASKS if four else REPLAY)
    assert safe_policy("eager", CUDA) is REPLAY


def test_on_devices_that_nobody_tested_masks_are_saved():
    """A saved mask is right everywhere."""
    assert safe_policy("eager", torch.device("mps")) is SAVE_MASKS


def test_each_executor_has_its_own_way_to_replay():
    """Op by op from the generator's state, compiled from the seeds that Inductor keeps."""
    assert replays(REPLAY, "eager", CPU) == Replays(states=True)
    assert replays(REPLAY, "inductor", CPU) == Replays(seeds=True)
    assert replays(SAVE_MASKS, "eager", CPU) == replays(SAVE_MASKS, "inductor", CPU) == Replays()


def test_the_state_of_another_device_than_the_current_one_is_not_replayed(monkeypatch):
    """Torch saves the current device's generator, whichever device the operator runs on."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert replays(REPLAY, "eager", CUDA).states
    assert not replays(REPLAY, "eager", torch.device("cuda", 1)).states


def test_a_generator_of_the_users_own_is_not_replayed():
    """Its state is not the one that is saved."""
    graph = fx.Graph()
    for given in (None, torch.Generator()):
        node = graph.call_function(torch.ops.aten.rand.generator, ([3],), {"generator": given})
        assert is_random(node)
        assert has_own_generator(node) is (given is not None)


# --- both policies, op by op -------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", DRAWS)
def test_gradients_are_the_same_under_both_policies(kind: str):
    """Bit for bit those of the step without recompute, at each policy's smallest budget."""
    make, inputs = (lambda: Draws(kind)), (rows(),)
    reference = step(optimized(make, UNBOUNDED), inputs)
    close(step(make_seeded(make), inputs), reference, 1e-5)
    for dropout in DropoutPolicy:
        smallest = refusal(make, inputs, dropout=str(dropout)).smallest_peak_nbytes
        model = optimized(make, smallest, dropout=str(dropout))
        same(reference, step(model, inputs))
        assert recomputes(model) > 0
        if dropout is SAVE_MASKS:
            assert not any(again for _, again in random_values(model))


@pytest.mark.thorough
def test_kept_masks_are_saved_and_take_memory():
    """Replaying goes lower; the report says which it is; measured is as predicted."""
    make, inputs = (lambda: Draws("dropout")), (rows(),)
    found = {policy: peaks(make, inputs, dropout=str(policy)) for policy in DropoutPolicy}
    assert found[REPLAY].smallest < found[SAVE_MASKS].smallest
    for policy, expected in ((REPLAY, "recompute"), (SAVE_MASKS, "save")):
        model = optimized(make, found[policy].smallest, dropout=str(policy))
        step(model, inputs)
        assert expected in {action for action, _ in random_values(model)}
        assert measured(model, inputs) <= found[policy].smallest


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # two steps are open at once
@pytest.mark.parametrize("dropout", list(DropoutPolicy))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_steps_keep_their_own_draws(dropout: str, order: tuple[int, int]):
    """forward, forward, backward, backward: each backward reads what its own forward drew."""
    make = lambda: Draws("dropout")  # noqa: E731
    budget = refusal(make, (rows(),), dropout=str(dropout)).smallest_peak_nbytes

    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        losses = [model(rows()), model(2 * rows())]
        found = {i: torch.autograd.grad(losses[i], list(model.parameters())) for i in order}
        return [*found[0], *found[1]]

    ours = gradients(optimized(make, budget, dropout=str(dropout)))
    for mine, theirs in zip(ours, gradients(make_seeded(make)), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


# --- the self-check ----------------------------------------------------------------------------


def _draw_again_plainly(self: Any, node: fx.Node, argument: Any, repeat: int) -> fx.Node:
    """A rewrite that forgets to replay: each repeat draws new numbers."""
    copy = self._graph.node_copy(node, argument)
    return self._tag(copy, node, repeat)


def _replay_from_the_first_state(self: Any, node: fx.Node, argument: Any, repeat: int) -> fx.Node:
    """A rewrite that replays every draw from the state of the step's first one."""
    if repeat:
        first = next(iter(self._rng_states.values()))
        self._rng_states = dict.fromkeys(self._rng_states, first)
    return EMIT_RANDOM(self, node, argument, repeat)


EMIT_RANDOM = rewrite._Writer._emit_random


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::autoremat.OverBudgetWarning")  # torch's own takes more
@pytest.mark.parametrize("sabotage", [_draw_again_plainly, _replay_from_the_first_state])
def test_a_rewrite_that_draws_other_numbers_never_trains(sabotage: Any, monkeypatch):
    """It is a defect: told with its code, and the step runs under torch's own partitioner."""
    make, inputs = (lambda: Draws("dropout")), (rows(),)
    budget = refusal(make, inputs).smallest_peak_nbytes
    eager = step(make_seeded(make), inputs)
    monkeypatch.setattr(rewrite._Writer, "_emit_random", sabotage)
    model = optimized(make, budget, strict=False)
    with pytest.warns(autoremat.FallbackWarning, match="AR106") as told:
        ours = step(model, inputs)
    assert any(word in str(told[0].message) for word in ("draws random", "is computed otherwise"))
    close(eager, ours, 1e-5)
    with pytest.raises(autoremat.FallbackError, match="AR106"):
        step(optimized(make, budget), inputs)


def test_where_torchs_own_partition_draws_again_it_is_not_taken():
    """The step as torch splits it is checked by the same rule.

    rand -> mul -> sum, and in the backward the mask once more: as a new draw, or as a saved value.
    """
    joint, forward, backward = _split_with_mask(drawn_again=True)
    found = first_difference(joint, forward, backward, 1)
    assert found == "rand draws random numbers that are not those of its first run."
    assert first_difference(*_split_with_mask(drawn_again=False), 1) is None


def _split_with_mask(*, drawn_again: bool) -> tuple[fx.GraphModule, ...]:
    aten = torch.ops.aten

    def forward_part(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
        x = graph.placeholder("primals_1")
        mask = graph.create_node("call_function", aten.rand.default, ([4],), {}, "rand")
        return mask, graph.call_function(aten.sum.default, (_times(graph, x, mask),))

    def _times(graph: fx.Graph, x: fx.Node, mask: fx.Node) -> fx.Node:
        return graph.call_function(aten.mul.Tensor, (x, mask))

    joint, forward, backward = fx.Graph(), fx.Graph(), fx.Graph()
    mask, loss = forward_part(joint)
    joint.output(((loss,), (_times(joint, joint.placeholder("tangents_1"), mask),)))
    mask, loss = forward_part(forward)
    forward.output((loss, mask))
    if drawn_again:
        again = backward.create_node("call_function", aten.rand.default, ([4],), {}, "rand")
    else:
        again = backward.placeholder("rand")
    backward.output((_times(backward, backward.placeholder("tangents_1"), again),))
    return tuple(fx.GraphModule(nn.Module(), graph) for graph in (joint, forward, backward))


def _split_at_a_small_budget(drops_tags: bool) -> Callable[..., Any]:
    """Torch's partitioner under its own memory budget; it may forget what must be saved."""

    def split(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int) -> Any:
        for node in module.graph.nodes if drops_tags else ():
            node.meta.pop("recompute", None)
        with _torch.activation_memory_budget(0.01):
            return min_cut_rematerialization_partition(
                module, inputs, num_fwd_outputs=num_fwd_outputs
            )

    return split


def _broken(*args: Any, **keywords: Any) -> Any:
    raise KeyError("a defect")


def test_draws_are_saved_where_torchs_partitioner_would_repeat_them(monkeypatch):
    """A graph without a plan: its first split draws again, and is not the one that runs."""
    make, inputs = (lambda: Draws("dropout")), (rows(),)
    eager = step(make_seeded(make), inputs)
    monkeypatch.setattr(pipeline, "find_storages", _broken)
    monkeypatch.setattr(_torch, "default_partition", _split_at_a_small_budget(False))
    splits = []
    original = torch_partition.drawn_again
    monkeypatch.setattr(
        torch_partition, "drawn_again", lambda *m: splits.append(original(*m)) or splits[-1]
    )
    with pytest.warns(autoremat.FallbackWarning, match="AR101"):
        ours = step(optimized(make, UNBOUNDED, strict=False), inputs)
    close(eager, ours, 1e-5)
    assert len(splits) == 2
    assert splits[0] is not None
    assert splits[1] is None


def test_a_graph_that_torch_would_only_split_wrongly_is_refused(monkeypatch):
    """AR111, whether the user is strict or not: no gradient is better than a wrong one."""
    monkeypatch.setattr(pipeline, "find_storages", _broken)
    monkeypatch.setattr(_torch, "default_partition", _split_at_a_small_budget(True))
    model = optimized(lambda: Draws("dropout"), UNBOUNDED, strict=False)
    with (
        pytest.warns(autoremat.FallbackWarning, match="AR101"),
        pytest.raises(autoremat.FallbackError, match=r"AR111.*is not run"),
    ):
        step(model, (rows(),))


# --- Inductor ----------------------------------------------------------------------------------


@pytest.mark.inductor
@pytest.mark.parametrize("fallback_random", [False, True])
def test_compiled_code_keeps_masks(fallback_random: bool):
    """In both of Inductor's random modes: the same gradients, and nothing is drawn again."""
    make, inputs = (lambda: Draws("dropout")), (rows(),)
    options = {"compiler": "inductor", "dropout": "save_masks", "time_limit": 1.0}
    with torch._inductor.config.patch(fallback_random=fallback_random):
        unbounded = optimized(make, UNBOUNDED, **options)
        reference = step(unbounded, inputs)
        if fallback_random:
            close(step(make_seeded(make), inputs), reference, 1e-5)
        report = autoremat.report(unbounded)
        above = report.predicted_peak_nbytes - report.resident_nbytes
        model = optimized(make, report.resident_nbytes + int(0.9 * above), **options)
        close(reference, step(model, inputs), 1e-6)
        assert recomputes(model) > 0
        assert not any(again for _, again in random_values(model))


# --- a GPU -------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("dropout", list(DropoutPolicy))
def test_gradients_on_cuda(compiler: str, dropout: str):
    """Both policies, at the smallest budget, against the step without recompute."""
    make, inputs = (lambda: Draws("dropout").cuda()), (rows().cuda(),)
    options = {"compiler": compiler, "dropout": str(dropout)}
    reference = step(optimized(make, UNBOUNDED, **options), inputs)
    smallest = refusal(make, inputs, **options).smallest_peak_nbytes
    close(reference, step(optimized(make, smallest, **options), inputs), 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs():
    """What mode="reduce-overhead" stands for, as an option: three steps replay one graph."""
    torch._dynamo.reset()
    options = {"budget": UNBOUNDED, "verbose": False, "strict": True, "triton.cudagraphs": True}
    make, inputs = (lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh()).cuda()), (rows().cuda(),)
    model = torch.compile(make_seeded(make), backend=autoremat.backend.autoremat, options=options)
    eager = step(make_seeded(make), inputs)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.allclose(eager.loss, step(model, inputs).loss)
