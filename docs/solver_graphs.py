"""The joint graphs that `solver_benchmarks.py` plans: captured once, kept as problems.

Started in a process of its own as `python docs/solver_graphs.py NAME FOLDER`. Enters: the name of
a graph. Leaves: `NAME.json`, the solver's problem, and `NAME.facts.json`, what the page says of
the capture. The problem is what a session with the eager executor solves: the session's own
stages, from the joint graph that AOTAutograd hands over to `lower`, times measured operation by
operation. Models have random weights, small widths and real depth (`tests/models.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "solver"))

import torch
from autoremat_solver import Problem
from torch import fx, nn

from autoremat import _torch
from autoremat.emit.op_by_op import compile_eager
from autoremat.graph.joint_graph import copy_module
from autoremat.planning.pipeline import Setting, graph_of, state
from autoremat.problem.lower import shell_of
from tests import models
from tests.models import Case, Inputs

CPU = torch.device("cpu")
VOCABULARY = 512


@dataclass(frozen=True)
class Captured:
    """One joint graph of a training step.

    Attributes:
        problem: what the solver sees of it.
        joint_nodes: how many fx nodes AOTAutograd handed over.
    """

    problem: Problem
    joint_nodes: int


def vit(layers: int = 12, batch: int = 8, size: int = 128, patch: int = 8) -> Case:
    """Hugging Face's Vision Transformer without dropout: 257 tokens an image."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=size,
        patch_size=patch,
        num_labels=100,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config).train()
    model.loss_type = "ForSequenceClassification"  # else its first loss warns: a graph break
    config.problem_type = "single_label_classification"  # else the first loss changes it
    images = torch.randn(batch, 3, size, size)
    return _case("vit", model, (images, torch.randint(100, (batch,))), "pixel_values")


def mixtral(layers: int = 8, batch: int = 4, tokens: int = 256) -> Case:
    """Hugging Face's Mixtral: eight experts per layer, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).train()
    return _case("mixtral", model, models._tokens(VOCABULARY, batch, tokens), "input_ids")


def t5(layers: int = 6, batch: int = 4, tokens: int = 128) -> Case:
    """Hugging Face's T5: so many layers in the encoder and again in the decoder, with dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.1,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).train()
    return _case("t5", model, models._tokens(VOCABULARY, batch, tokens), "input_ids")


def _case(name: str, model: nn.Module, inputs: Inputs, argument: str) -> Case:
    """A Hugging Face model that takes one input by name, and labels."""

    def forward(module: nn.Module, given: Inputs) -> Any:
        return module(**{argument: given[0]}, labels=given[1])

    return Case(name, model, inputs, forward, models.its_loss, ())


GRAPHS: dict[str, Callable[[], Case]] = {
    "gpt2_12": partial(models.gpt2, layers=12),
    "gpt2_48": partial(models.gpt2, layers=48),
    "llama_16": partial(models.llama, layers=16),
    "llama_32": partial(models.llama, layers=32),
    "bert_12": partial(models.bert, layers=12),
    "resnet_50": models.resnet50,
    "unet": models.unet,
    "vit_12": partial(vit, layers=12),
    "mixtral_8": partial(mixtral, layers=8),
    "t5_6_6": partial(t5, layers=6),
}

# Too large for the table of the ten; what the solver's processor time is measured on.
LARGE: dict[str, Callable[[], Case]] = {
    "gpt2_96": partial(models.gpt2, layers=96),
    "llama_96": partial(models.llama, layers=96),
}


def capture(case: Case) -> list[Captured]:
    """The joint graphs of one training step, in the order in which it meets them."""
    found: list[Captured] = []

    def partition(
        module: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_later_arguments: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        untouched = copy_module(module)
        problem = lowered_problem(module, num_fwd_outputs, static_lifetime_input_indices)
        if problem is not None:
            found.append(Captured(problem, len(module.graph.nodes)))
        return _torch.default_partition(untouched, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    backend = _torch.aot_autograd(
        fw_compiler=compile_eager,
        bw_compiler=compile_eager,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled = torch.compile(case.model, backend=backend)
    case.loss_of(case.forward(compiled, case.inputs))
    return found


def lowered_problem(
    module: fx.GraphModule, num_fwd_outputs: int, static: list[int] | None
) -> Problem | None:
    """The problem of a joint graph as a session with the eager executor would state it."""
    graph = graph_of(module, CPU, num_fwd_outputs=num_fwd_outputs, static_indices=static)
    if not graph.joint.backward:
        return None
    resident_nbytes = graph.storages.total_nbytes(graph.joint.primals, resident=True)
    shell = shell_of(graph.joint, graph.storages, resident_nbytes=resident_nbytes)
    return state(graph, shell, Setting(compiler="eager")).lowered.problem


def main() -> None:
    """Capture the graph that the command line names."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = capture({**GRAPHS, **LARGE}[name]())
    seconds = time.perf_counter() - began
    if not found:
        raise SystemExit(f"{name}: no graph of the step needs a gradient, so there is no problem.")
    largest = max(found, key=lambda graph: len(graph.problem.ops))
    facts = {
        "graphs": len(found),
        "joint_nodes": largest.joint_nodes,
        "capture_seconds": seconds,
        "torch": torch.__version__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.facts.json").write_text(json.dumps(facts))
    (folder / f"{name}.json").write_text(largest.problem.to_json())


if __name__ == "__main__":
    main()
