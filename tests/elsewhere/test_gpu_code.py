"""A step on a GPU that is not here: what is traced, what is generated, and that nothing stays."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoremat
from autoremat import _torch
from autoremat.elsewhere.libraries import workspaces
from autoremat.elsewhere.moved import moved_to
from autoremat.elsewhere.present import DEVICE, can_generate_for_gpus
from autoremat.graph.storages import find_storages
from autoremat.reporting import Report
from tests.joint_graphs import CPU, capture, leaf
from tests.training import step

pytestmark = [
    pytest.mark.skipif(not can_generate_for_gpus(), reason="needs triton, and forks"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]

WIDTH, HEADS, TOKENS, BATCH = 128, 2, 256, 4
_MIB = 1 << 20


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and in a residual sum."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks in bfloat16 or float32, and a loss."""

    def __init__(self, layers: int = 2, *, dropout: float = 0.0, narrow: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(dropout) for _ in range(layers)])
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            return self.blocks(x).float().square().mean()


def planned(model: nn.Module, device: str = "H100", budget: str = "100%", **given: Any) -> Report:
    """On sizes alone, every warning an error."""
    x = torch.empty(BATCH, TOKENS, WIDTH, device="meta")
    given = {"device": device, "budget": budget, "verbose": False, "time_limit": 4.0} | given
    return autoremat.plan(model.to("meta"), x, **given)


def operators(report: Report) -> set[str]:
    return {value.op for value in report.values}


def planned_for(report: Report) -> str:
    (text,) = (fact.text for fact in report.facts if fact.name == "Planned for")
    return text


def thorough(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("device", "model", "attention"),
    [
        ("H100", GPT(), "_scaled_dot_product_cudnn_attention"),
        thorough("A100", GPT(dropout=0.1), "_scaled_dot_product_flash_attention"),
        thorough("RTX 4090", GPT(narrow=False), "_scaled_dot_product_efficient_attention"),
    ],
    ids=["cuDNN", "flash, with dropout", "memory-efficient"],
)
def test_a_plan_is_made_from_the_code_for_that_gpu(device: str, model: nn.Module, attention: str):
    """Within the budget in the code that was read; its attention is that GPU's."""
    whole = planned(model, device, budget="100%")
    assert attention in operators(whole)
    assert not {op for op in operators(whole) if "for_cpu" in op}
    resident = whole.resident.nbytes
    share = resident + (whole.predicted_peak_nbytes - resident) * 60 // 100
    lean = planned(model, device, budget=f"{share}B")
    assert lean.is_within_budget
    assert any(value.recomputes for value in lean.values)
    assert "the code that Inductor generates" in planned_for(lean)
    assert lean.code_times_us is not None
    assert min(lean.code_times_us) > 0
    assert not lean.fallbacks


def test_what_draws_in_attention_runs_once():
    """Its seed is the kernel's own: the mask is not drawn again."""
    report = planned(GPT(1, dropout=0.1), "A100")
    assert "_scaled_dot_product_flash_attention draws random numbers" in report.constraints


def test_bytes_are_those_of_cudas_allocator_and_libraries():
    """Each tensor in steps of 512 bytes, and the workspace of products."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh())
    x = torch.empty(5, 3, device="meta")
    report = autoremat.plan(
        model.to("meta"), x, device="H100", budget="100%", verbose=False, time_limit=1.0
    )
    assert report.resident.parameters_nbytes == report.resident.batch_nbytes == 512
    kept = workspaces((9, 0))
    assert kept[0] == 32 * _MIB
    assert report.resident.nbytes == 1024 + sum(kept)
    # What tanh makes is returned and read again; its gradient comes in, and the product's is made.
    assert report.predicted_peak_nbytes == report.resident.nbytes + 4 * 512
    # The allocator, asked what the code asks it, gives as much, and 2 MiB for small blocks.
    assert report.reserved is not None
    assert report.reserved.default.allocated_nbytes == report.predicted_peak_nbytes
    assert report.reserved.peak_nbytes == sum(kept) + 2 * _MIB


def test_training_here_goes_on_as_if_nothing_had_been():
    """Between a step and the next one, in one process: no GPU is here, and CPU code is compiled."""
    compiled = autoremat.optimize(GPT(1), "1GB", compiler="eager", verbose=False, time_limit=1.0)
    x = torch.randn(BATCH, TOKENS, WIDTH)
    before = step(compiled, (x,))
    planned(GPT(1))
    assert not torch.cuda.is_available()
    assert torch.version.cuda is None or not torch.cuda.is_initialized()
    assert torch.equal(~torch.tensor([True]), torch.tensor([False]))
    after = step(compiled, (x,))
    assert torch.equal(before.loss, after.loss)


def test_without_triton_a_plan_is_coarser_and_says_so():
    """The graph is the CPU's then, its attention too."""
    with mock.patch.object(_torch, "has_triton_package", return_value=False):
        report = planned(GPT(1))
    assert "_scaled_dot_product_cudnn_attention" not in operators(report)
    assert "The plan is coarser" in planned_for(report)
    assert "autoremat[gpu]" in planned_for(report)


def test_what_no_code_can_be_generated_for_is_planned_coarser_with_a_warning():
    """A T4 has no bfloat16."""
    with pytest.warns(UserWarning, match=r"No code for NVIDIA T4 .*BF16 is not supported.*coarser"):
        report = planned(GPT(1), "T4")
    assert "The plan is coarser" in planned_for(report)


def test_a_moved_graph_shares_memory_as_it_did():
    """Names, sizes and views are the graph's, on another device."""
    joint = capture(lambda x: (x.t().exp() * x.t()).sum(), leaf(4, 6)).prepared()
    moved = moved_to(joint.module, DEVICE)
    before, after = joint.module.graph.nodes, moved.graph.nodes
    assert [node.name for node in before] == [node.name for node in after]
    tensors = [v for n in after for v in _torch.tensor_leaves(_torch.fake_value(n))]
    assert {tensor.device for tensor in tensors} == {DEVICE}
    here, there = find_storages(before, CPU), find_storages(after, DEVICE)
    assert [here.of_node[n] for n in before if n.op != "output"] == [
        there.of_node[n] for n in after if n.op != "output"
    ]


def test_the_users_own_tensors_are_not_touched():
    """A model with weights keeps them where they are."""
    model = GPT(1)
    first = model.blocks[0].qkv.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.randn(BATCH, TOKENS, WIDTH)
        autoremat.plan(model, x, device="H100", budget="1GB", verbose=False, time_limit=1.0)
    assert model.blocks[0].qkv.weight is first
    assert first.device == CPU
    assert first.grad is None


class Attention(nn.Module):
    """One attention between two products, in a form of its own."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, TOKENS))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            q, k, v = (
                part.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2)
                for part in self.into(x).chunk(3, dim=-1)
            )
            found = self.attended(q, k, v)
            return self.out(found.transpose(1, 2).flatten(2)).float().square().mean()

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given: dict[str, Any] = {}
        if self.form == "grouped":
            k, v, given["enable_gqa"] = k[:, :1], v[:, :1], True
        elif self.form == "learned bias":
            given["attn_mask"] = self.bias.expand(BATCH, -1, -1, -1)
        elif self.form == "boolean mask":
            given["attn_mask"] = torch.ones(
                TOKENS, TOKENS, dtype=torch.bool, device=q.device
            ).tril()
        elif self.form == "wide queries":
            q, k = q.float(), k.float()
        elif self.form == "constant":
            v = v * torch.tensor([1.0, 2.0]).repeat(WIDTH // HEADS // 2)
        return F.scaled_dot_product_attention(q, k, v, **given)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*CUDA is not available.  Disabling")
@pytest.mark.parametrize(
    ("form", "device", "attention"),
    [
        ("grouped", "H100", "_scaled_dot_product_cudnn_attention"),
        ("grouped", "A100", "_scaled_dot_product_flash_attention"),
        ("learned bias", "H100", "_scaled_dot_product_efficient_attention"),
        ("boolean mask", "H100", "_scaled_dot_product_cudnn_attention"),
        ("boolean mask", "A100", "_scaled_dot_product_efficient_attention"),
        ("wide queries", "A100", "_scaled_dot_product_flash_attention"),
        ("constant", "A100", "_scaled_dot_product_flash_attention"),
    ],
)
def test_forms_of_attention(form: str, device: str, attention: str):
    """Autocast for CUDA holds though none is here, and reaches what goes into attention."""
    report = planned(Attention(form), device)
    assert attention in operators(report)
    assert "the code that Inductor generates" in planned_for(report)


class Dropped(nn.Module):
    """A layer and dropout, whose seeds are drawn beside the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.1).square().mean()


def test_code_of_dropout_is_read():
    """Its seed is looked up in a tensor that lies on no device."""
    report = planned(Dropped(), "A100")
    assert "the code that Inductor generates" in planned_for(report)
    assert not report.fallbacks


def test_convolutions_keep_their_channels_last():
    """They lie as cuDNN lays them out, which a build without CUDA does not know."""
    layer = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    x = torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last)
    module = moved_to(capture(lambda x: layer(x).sin().sum(), x).module, DEVICE)
    target = torch.ops.aten.convolution.default
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    assert _torch.fake_value(node).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.thorough
def test_a_plan_for_a_gpu_can_be_stored(tmp_path: Path):
    """With the operators of that GPU, for whoever trains there."""
    planned(GPT(1), save_to=tmp_path / "plan.json")
    assert "_scaled_dot_product_cudnn_attention" in (tmp_path / "plan.json").read_text()
