"""How a run is set up: what each word of `TrainingSetup` does to a step, in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat.memory.fake_twin import without_contents
from autoremat.memory.optimizer_memory import optimizer_footprint
from autoremat.memory.window import Window, window_of
from autoremat.reporting import PointKind, Report
from autoremat.setup.adapters import adapt, freeze
from autoremat.setup.asked import TrainingSetup
from autoremat.setup.chunked_loss import chunk_loss
from autoremat.setup.optimizers import optimizer_of
from autoremat.setup.sharded import shard

pytestmark = pytest.mark.shares_plans

WIDTH, BATCH, DEPTH = 64, 256, 2
MATRIX = WIDTH * WIDTH
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    """Two blocks of two linear layers, and their loss."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PARAMETERS = DEPTH * (2 * MATRIX + WIDTH)


def planned(model: nn.Module | None = None, *inputs: Tensor, **options: Any) -> Report:
    torch._dynamo.reset()
    given = {"budget": "1GB", "compiler": "eager", "verbose": False, "device": "H100"} | options
    model = model or Blocks()
    return autoremat.plan(model, *(inputs or (torch.randn(BATCH, WIDTH),)), **given)


def setup_of(**words: Any) -> dict[str, Any]:
    return {"setup": TrainingSetup(**words)}


# --- precision -----------------------------------------------------------------------------------


def test_parameters_in_bfloat16_take_half_and_the_batch_follows():
    report = planned(**setup_of(precision="bf16"))
    assert report.resident.parameters_nbytes == 2 * PARAMETERS
    assert report.resident.batch_nbytes == 2 * BATCH * WIDTH
    assert {value.dtype for value in report.values} == {"bfloat16"}


def test_under_autocast_parameters_stay_and_products_are_narrow():
    report = planned(**setup_of(precision="autocast"))
    assert report.resident.parameters_nbytes == 4 * PARAMETERS
    assert {value.dtype for value in report.values if "mm" in value.op} == {"bfloat16"}
    assert any("autocast to bfloat16" in sentence for sentence in report.assumed)


# --- what is trained -----------------------------------------------------------------------------


def test_adapters_are_all_that_has_gradients_and_state():
    """Two thin matrices for each of two layers, in the layer's type."""
    report = planned(optimizer="AdamW", **setup_of(lora="up", lora_rank=8))
    adapters = DEPTH * 8 * (WIDTH + WIDTH)
    assert report.resident.parameters_nbytes == 4 * (PARAMETERS + adapters)
    assert report.resident.optimizer_nbytes == pytest.approx(2 * 4 * adapters, abs=64 * 512)
    assert any("2 linear layers have adapters of rank 8" in s for s in report.assumed)


def test_adapters_of_all_linear_layers_leave_the_head_out():
    llama = tiny_llama()
    named = adapt(llama, ("all-linear",), 4)
    assert len(named) == 7
    assert "lm_head" not in named


def test_layers_whose_weight_is_the_other_way_round_are_adapted():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).to("meta")
    assert adapt(model, ("c_attn",), 2) == ["transformer.h.0.attn.c_attn"]
    layer = model.transformer.h[0].attn.c_attn
    assert (layer.lora_A.shape, layer.lora_B.shape) == ((2, 8), (24, 2))
    assert layer(torch.empty(1, 3, 8, device="meta")).shape == (1, 3, 24)


def test_a_head_alone_is_not_adapted_by_all_linear():
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    with pytest.raises(ValueError, match="leaves nothing to be trained"):
        adapt(Head(), ("all-linear",), 2)


def test_a_rank_without_layers_is_refused():
    with pytest.raises(ValueError, match="lora_rank=4 is of lora=, which is not given"):
        TrainingSetup(lora_rank=4)


def test_a_fused_optimizer_takes_nothing_for_itself():
    """Also on meta, where it cannot run."""
    model = Blocks().to("meta")
    found = optimizer_footprint(optimizer_of(model, "AdamW-fused"))
    assert found.transient_nbytes == 0
    assert found.state_nbytes == pytest.approx(2 * 4 * PARAMETERS, rel=0.01)


def test_an_adapted_layer_is_the_layer_and_a_thin_product():
    layer = nn.Sequential(nn.Linear(5, 3))
    x, before = torch.randn(2, 5), layer[0]
    plain = layer(x)
    adapt(layer, ("0",), 2)
    nn.init.normal_(layer[0].lora_A)
    nn.init.zeros_(layer[0].lora_B)
    assert layer[0] is before
    assert torch.equal(layer(x), plain)
    nn.init.ones_(layer[0].lora_B)
    assert not torch.equal(layer(x), plain)
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"0.lora_A", "0.lora_B"}


def test_a_frozen_part_has_no_gradient_and_no_state():
    part = planned(optimizer="Adam", **setup_of(freeze="layers.0,layers.1.up"))
    whole = planned(optimizer="Adam")
    assert part.resident.parameters_nbytes == whole.resident.parameters_nbytes
    frozen = (2 * MATRIX + WIDTH) + (MATRIX + WIDTH)
    less = whole.resident.optimizer_nbytes - part.resident.optimizer_nbytes
    assert less == pytest.approx(8 * frozen, abs=64 * 512)


def test_nothing_of_the_users_model_changes():
    model = Blocks()
    before = {name: (id(p), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    planned(model, **setup_of(precision="bf16", lora="down", freeze="layers.0", shards=2))
    after = {name: (id(p), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert after == before
    assert {name: type(module) for name, module in model.named_modules()} == kinds


# --- optimizers by name --------------------------------------------------------------------------


def state_nbytes(name: str, numel: int = 1 << 20) -> int:
    model = nn.Linear(numel >> 10, 1 << 10, bias=False, device="meta")
    return optimizer_footprint(optimizer_of(model, name), torch.device("cuda")).state_nbytes


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        ("AdamW", 8),
        ("adamw-fused", 8),
        ("SGD", 0),
        ("SGD-momentum", 4),
        ("AdamW8bit", 2 + 2 * 4 / 256),
        ("adamw_8bit", 2 + 2 * 4 / 256),
        ("Lion8bit", 1 + 4 / 256),
        ("Adafactor", 2 * 4 / 1024),
    ],
)
def test_bytes_of_state_by_the_name_of_the_optimizer(name: str, bytes_per_parameter: float):
    """For each element of a parameter in float32; step counts are next to nothing."""
    assert state_nbytes(name) == pytest.approx(bytes_per_parameter * MIB, abs=2048)


def test_small_parameters_keep_states_of_four_bytes_under_eight_bit_optimizers():
    model = nn.Linear(63, 63, bias=False, device="meta")
    footprint = optimizer_footprint(optimizer_of(model, "AdamW8bit"))
    assert footprint.state_nbytes == 2 * 4 * 63 * 63
    assert footprint.transient_nbytes == 0


def test_eight_bit_optimizers_do_not_train():
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(model, "AdamW8bit")
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="does not train"):
        optimizer.step()


def test_what_fused_steps_take_for_themselves_is_less():
    """The multi-tensor form makes one more copy of all parameters."""
    model = nn.Linear(1 << 10, 1 << 10, bias=False, device="meta")
    cuda = torch.device("cuda")
    taken = {
        name: optimizer_footprint(optimizer_of(model, name), cuda).transient_nbytes
        for name in ("AdamW", "AdamW-fused")
    }
    assert taken["AdamW"] >= 4 * MIB
    assert taken["AdamW-fused"] < 1024


# --- gradient accumulation, loss in parts --------------------------------------------------------


def test_gradients_of_earlier_micro_batches_are_there():
    one, several = planned(), planned(**setup_of(accumulate=4))
    assert one.resident.gradients_nbytes == 0
    assert several.resident.gradients_nbytes == 4 * PARAMETERS
    assert any("4 micro-batches" in sentence for sentence in several.assumed)


def test_a_budget_of_what_is_reserved_is_of_the_same_run():
    words = setup_of(accumulate=2, shards=2)
    report, plain = (planned(budget=budget, **words) for budget in ("1GB reserved", "1GB"))
    assert report.resident == plain.resident
    assert report.assumed == plain.assumed


def tiny_llama(**more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
            **{"num_attention_heads": 4, "vocab_size": 2048, "use_cache": False},
            **more,
        }
    )
    return transformers.LlamaForCausalLM(config).train()


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 2048, (2, 128))
    return {"input_ids": ids, "labels": ids.clone()}


def test_a_loss_in_parts_is_the_same_loss_with_the_same_gradients():
    torch.manual_seed(0)
    model, batch = tiny_llama(), tokens()
    batch["labels"][0, :50] = -100
    whole = model(**batch).loss
    whole.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    chunk_loss(model, 5)
    parts = model(**batch).loss
    parts.backward()
    assert torch.allclose(parts, whole)
    assert all(torch.allclose(p.grad, before[n], atol=1e-6) for n, p in model.named_parameters())


def test_logits_are_never_whole():
    """Without a word of the budget: of four parts one is there at a time."""
    batch, whole_nbytes = tokens(), 4 * 2 * 128 * 2048
    plain = planned(tiny_llama(), **batch)
    parts = planned(tiny_llama(), **batch, **setup_of(loss_chunks=4))
    assert max(value.nbytes for value in plain.values) >= whole_nbytes
    assert max(value.nbytes for value in parts.values) <= whole_nbytes / 4
    assert parts.predicted_peak_nbytes < plain.predicted_peak_nbytes - whole_nbytes


@pytest.mark.thorough
def test_attention_of_transformers_is_the_one_asked_for():
    eager = planned(tiny_llama(), **tokens(), **setup_of(attention="eager"))
    sdpa = planned(tiny_llama(), **tokens(), **setup_of(attention="sdpa"))
    assert any("softmax" in value.op and len(value.shape) == 4 for value in eager.values)
    assert not any(value.op == "_softmax" and len(value.shape) == 4 for value in sdpa.values)
    assert "attention is transformers' 'eager'" in eager.assumed


# --- sharding ------------------------------------------------------------------------------------


def test_parameters_gradients_and_state_are_divided():
    """And the largest block, the next one and a block's gradients count beside."""
    whole = planned(optimizer="AdamW")
    part = planned(optimizer="AdamW", **setup_of(shards=4))
    block = 4 * (2 * MATRIX + WIDTH)
    assert part.resident.parameters_nbytes == whole.resident.parameters_nbytes / 4
    assert part.resident.optimizer_nbytes == pytest.approx(
        whole.resident.optimizer_nbytes / 4, abs=64 * 512
    )
    library = whole.resident.others_nbytes
    assert part.resident.others_nbytes == library + 3 * block
    gradients = [v.nbytes for v in part.graphs[0].values if v.op == "scatter"]
    assert all(nbytes <= MATRIX for nbytes in gradients)


def test_a_gathered_parameter_is_gathered_for_each_use_however_much_there_is():
    report = planned(**setup_of(shards=4))
    gathered = [value for value in report.values if value.op == "gather"]
    assert len(gathered) == 3 * DEPTH
    assert all(value.action != "save" for value in gathered)
    matrices = [value for value in gathered if value.nbytes == 4 * MATRIX]
    assert sum(value.recomputes for value in matrices) >= 2 * DEPTH - 1  # the first input is data


def test_the_plain_step_keeps_no_gathered_parameter_either():
    """Beside what is resident, of twelve matrices no more than a few at any time."""
    report = planned(Blocks(6), torch.randn(1, WIDTH), **setup_of(shards=4))
    above = report.baseline_peak_nbytes - report.resident_nbytes
    assert 4 * MATRIX <= above <= 6 * 4 * MATRIX


def test_what_is_tied_is_gathered_with_one_unit():
    """An embedding that is the head as well; the other units are the blocks."""
    model = nn.ModuleDict({"embed": nn.Embedding(64, 8), "head": nn.Linear(8, 64, bias=False)})
    model["blocks"] = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    model["head"].weight = model["embed"].weight
    window, words, block = window_of(model), 4 * 64 * 8, 4 * 8 * 8
    assert window == Window(words, block, words)


def test_shared_parameters_are_one_shard():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to("meta")
    model[1].weight = model[0].weight
    shard(model, 3, None)
    assert [tuple(p.shape) for p in model.parameters()] == [(24,)]


def test_rows_are_not_divided():
    """FSDP2 gives each GPU whole rows of the first dimension: of few, to some none."""
    experts = nn.ParameterList([nn.Parameter(torch.empty(4, 8, 2, device="meta"))])
    shard(experts, 16, None)
    assert [p.numel() for p in experts.parameters()] == [16]


def test_recurrent_layers_are_not_divided():
    with pytest.raises(ValueError, match=r"cannot be planned for 0, of type LSTM"):
        shard(nn.Sequential(nn.LSTM(4, 4)), 2, None)


def test_under_autocast_masters_stay_wide_and_gathering_is_narrow():
    report = planned(**setup_of(shards=4, precision="autocast"))
    assert report.resident.parameters_nbytes == 4 * PARAMETERS / 4
    gathered = [value.dtype for value in report.values if value.op == "gather"]
    assert set(gathered) == {"bfloat16"}


def test_a_model_without_a_list_of_blocks_is_one_block():
    model = without_contents(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()))
    assert window_of(model) == Window(256, 0, 256)
    assert window_of(model, torch.bfloat16) == Window(128, 0, 128)


# --- input that cannot be used -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"shards": 0}, "shards is a whole number of at least 1, not 0"),
        ({"lora": "up", "lora_rank": 0}, "lora_rank is a whole number of at least 1, not 0"),
        ({"accumulate": -1}, "accumulate is a whole number of at least 1"),
        ({"loss_chunks": 1.5}, "loss_chunks is a whole number"),
        ({"precision": "int8"}, "precision is one of float32, bfloat16, float16, autocast"),
        ({"attention": "flash_attention_2"}, "attention is 'sdpa' or 'eager'"),
        ({"lora": 3}, "lora takes patterns"),
    ],
)
def test_what_no_run_can_have(words: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TrainingSetup(**words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"setup": {"shards": 2}}, "setup is a TrainingSetup, not dict"),
        ({"optimizer": "AdamQ"}, "optimizer 'AdamQ' is not known. Did you mean Adam"),
        (setup_of(lora="upp"), "lora='upp' matches no linear layer.* Near it: \"layers.0.up\""),
        (setup_of(freeze="layer.0"), r"matches no module or parameter. Near it: .*\"layers.0\""),
        (setup_of(freeze="*"), "leaves no parameter that is trained"),
        (setup_of(attention="eager"), "attention='eager' is for models of transformers"),
        (setup_of(loss_chunks=2), "no causal language model of transformers"),
        (setup_of(shards=10**6), "more than the 64 rows of the longest parameter"),
    ],
)
def test_what_this_model_cannot_have(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        planned(**options)


def test_an_optimizer_of_the_users_own_is_none_of_the_copy():
    model = Blocks()
    with pytest.raises(ValueError, match='give its name, optimizer="SGD"'):
        planned(model, optimizer=torch.optim.SGD(model.parameters()), **setup_of(shards=2))


def test_logits_that_go_through_something_else_are_not_chunked():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128},
    )
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        chunk_loss(transformers.Gemma2ForCausalLM(config), 4)


def test_freezing_by_the_name_of_a_parameter():
    model = Blocks()
    freeze(model, ("*.bias",))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        f"layers.{n}.up.bias" for n in range(DEPTH)
    }


# --- curves, and plans without code --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "time_limit"),
    [
        ({"shards": 4, "precision": "autocast"}, 0.0),
        pytest.param({"shards": 4, "precision": "autocast"}, 3.0, marks=pytest.mark.thorough),
        pytest.param({}, 0.0, marks=pytest.mark.thorough),
        pytest.param({}, 3.0, marks=pytest.mark.thorough),
    ],
)
def test_no_plan_is_above_what_checkpointing_by_hand_does(words: dict[str, Any], time_limit: float):
    """In peak and time at once, however little time there is; what is missing is told."""
    budget = planned(**setup_of(**words), budget="min", time_limit=time_limit).predicted_peak_nbytes
    report = planned(**setup_of(**words), budget=int(1.05 * budget), time_limit=time_limit, curve=4)
    strategies = [p for p in report.curve if p.kind is PointKind.STRATEGY]
    ours = [p for p in report.curve if p.kind in (PointKind.PLAN, PointKind.CHOSEN)]
    assert strategies
    assert ours
    for point in ours:
        assert not [
            p
            for p in strategies
            if p.peak_nbytes <= point.peak_nbytes and p.time_us < 0.999 * point.time_us
        ]
    if not any(p.kind is PointKind.PLAN for p in ours):
        assert report.curve_left_out


def test_without_code_the_graph_is_the_gpus_and_the_report_says_so():
    pytest.importorskip("triton")
    report = planned(compiler="inductor", code=False, budget="1GB")
    facts = {fact.name: fact.text for fact in report.facts}
    assert "none of which was generated" in facts["Planned for"]
    assert report.code_times_us is None
    assert report.reserved is not None


@pytest.mark.thorough
@pytest.mark.parametrize("words", [{}, {"shards": 4, "precision": "bf16"}])
def test_the_model_of_the_code_is_near_the_code(words: dict[str, Any]):
    """Of the plain step: above what is resident, within a tenth."""
    pytest.importorskip("triton")
    modelled, read = (
        planned(compiler="inductor", code=code, budget="1GB", **setup_of(**words))
        for code in (False, True)
    )
    above = [r.predicted_peak_nbytes - r.resident_nbytes for r in (modelled, read)]
    assert above[0] == pytest.approx(above[1], rel=0.1)


def test_a_loss_in_parts_needs_labels():
    keywords = tokens()
    del keywords["labels"]
    with pytest.raises(ValueError, match=r"loss_chunks=2 is of the loss .* give it labels="):
        autoremat.plan(tiny_llama(), **keywords, **setup_of(loss_chunks=2), budget="1GB")
